"""The same as the commands, from Python: on models and data sets in memory.

Every function gives what it gets a place on disk, and calls what the command of its name calls, so that both make the
same files. Begin with functions.py, then inputs.py (models and data that are brought) and compressed.py (what comes
back). ``import lit_compress`` loads nothing of this before it is used.
"""

from lit_compress.api.compressed import Compressed, Report, load
from lit_compress.api.functions import Compared, compare, compress, evaluate, factorize

__all__ = ["Compared", "Compressed", "Report", "compare", "compress", "evaluate", "factorize", "load"]
