"""The same as the commands, from Python: on models and data sets in memory.

Every function writes its objects to disk and runs the same code as its command, so that both make the same files.
Begin with functions.py, then inputs.py (the user's models and data) and compressed.py (the returned model).
``import lit_compress`` loads nothing of this before it is used.
"""

from lit_compress.api.compressed import Compressed, Report, load
from lit_compress.api.functions import compress, evaluate, factorize

__all__ = ["Compressed", "Report", "compress", "evaluate", "factorize", "load"]
