"""Settings of the XLA compiler that are global to the process.

They change code outside Armillary too, and so are never made unless asked for. How
Armillary's own programs are compiled is not among them: `_compile.py` chooses that.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.xla._compile import use_compilation_cache as use_compilation_cache

_mark_public(globals())
