"""The compression methods: one paper, one file or one folder, each with a LightningModule.

Code that several papers share is in stages/, code on models and layers in models/ and layers/; a paper never imports
another. Begin with base.py, then lpaf.py. A config names a class, ``class_path: lit_compress.methods.LPAF``: this
package offers every subclass of ``Method`` that a file of this folder defines.
"""

from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any

from lit_compress.methods.base import Method


def _found() -> dict[str, type[Method]]:
    modules = [import_module(info.name) for info in walk_packages(__path__, f"{__name__}.")]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    shared = Method.__module__  # whose other classes are bases of methods
    found = [kind for kind in classes if issubclass(kind, Method) and (kind is Method or kind.__module__ != shared)]
    return {kind.__name__: kind for kind in found}


globals().update(_found())
__all__ = sorted(_found())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The names of the methods are found, not written here."""
