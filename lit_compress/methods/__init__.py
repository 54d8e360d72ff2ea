"""One file per paper. A config names the class: ``class_path: lit_compress.methods.LPAF``."""

from lit_compress.methods.base import Method
from lit_compress.methods.lpaf import LPAF
from lit_compress.methods.svd import SVD

__all__ = ["LPAF", "SVD", "Method"]
