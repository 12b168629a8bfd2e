"""`armillary new`: writes a small project from the files in `template`.

The files of the template end with `.tmpl`, so that no tool treats them as code of the
library. A new project replaces `my_project` in them with its name.
"""
