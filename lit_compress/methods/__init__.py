"""One file per paper. A config names the class: ``class_path: lit_compress.methods.LPAF``."""

from lit_compress.methods.base import Method
from lit_compress.methods.cofi import CoFi
from lit_compress.methods.cofi_losparse import CoFiLoSparse
from lit_compress.methods.first_order import FirstOrder
from lit_compress.methods.fwsvd import FWSVD
from lit_compress.methods.itp import ITP
from lit_compress.methods.losparse import LoSparse, LowRankI, LowRankII
from lit_compress.methods.lpaf import LPAF
from lit_compress.methods.magnitude import Magnitude
from lit_compress.methods.movement import Movement
from lit_compress.methods.platon import PLATON
from lit_compress.methods.sp3 import SP3
from lit_compress.methods.svd import SVD

__all__ = [
    "FWSVD",
    "ITP",
    "LPAF",
    "PLATON",
    "SP3",
    "SVD",
    "CoFi",
    "CoFiLoSparse",
    "FirstOrder",
    "LoSparse",
    "LowRankI",
    "LowRankII",
    "Magnitude",
    "Method",
    "Movement",
]
