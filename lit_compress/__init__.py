"""Smaller, faster transformer language models: one LightningModule per compression method.

From Python, four functions: ``factorize``, ``compress``, ``evaluate`` and ``load``; ``methods`` has the methods. Their
imports happen when one is first used.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lit_compress.version import __version__ as __version__

if TYPE_CHECKING:
    from lit_compress import methods
    from lit_compress.api import Compressed, Report, compress, evaluate, factorize, load
    from lit_compress.utils.errors import UserError

__all__ = ["Compressed", "Report", "UserError", "compress", "evaluate", "factorize", "load", "methods"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lit_compress' has no attribute '{name}'")
    state = random.getstate()  # libraries draw from it when they are imported
    try:
        if name == "methods":
            return import_module("lit_compress.methods")
        return getattr(import_module("lit_compress.utils.errors" if name == "UserError" else "lit_compress.api"), name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
