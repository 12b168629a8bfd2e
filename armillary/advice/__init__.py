"""Advice in errors: the line to write for a wrong name, keyword, call or array.

`_traceback` adds it to errors that leave a public function.
"""
