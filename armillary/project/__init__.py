"""What `armillary new` writes: a small project to begin with, in `template`.

The files of the template end with `.tmpl`, so that no tool takes them for code of the
library. Where they say `my_project`, a new project has its name.
"""
