"""All options with type, default and meaning, read from the source of the classes and commands that take them.

Nothing is imported: a help text and a mistyped option need no PyTorch. The options of a class are the parameters of its
constructor, or the attributes with a type and a value; of a command the parameters of its function. Both are described
under ``Args:`` of the docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lit_compress.utils.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
_LINKED = ("model.task", "data.backbone", "data.teacher", "data.seed")  # follow from other options, cannot be given
_ROOTS = ("Method", "LightningModule", "LightningDataModule")  # where a class's options end


@dataclass(frozen=True)
class Option:
    """An option: its full name, its type and its default as in the source, and its meaning.

    In the type the values of a ``Literal`` are written out; the default is None if the option has to be given.
    """

    name: str
    kind: str
    default: str | None
    help: str
    position: bool = False  # it is given without its name


class _Class:
    """A class or function in the source: its node, and the module that names are looked up in."""

    def __init__(self, node: ast.ClassDef | ast.FunctionDef, module: str) -> None:
        self.node, self.module = node, module
        text = ast.get_docstring(node) or ""
        section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        entries = re.findall(r"^    \*{0,2}(\w+): (.*(?:\n     .*)*)", section[1] if section else "", re.MULTILINE)
        self.meanings = {name: " ".join(words.split()) for name, words in entries}
        self.about = text.partition("\n")[0]

    def lineage(self) -> list[_Class]:
        """Return the base classes in the package, and last this class."""
        names = [] if isinstance(self.node, ast.FunctionDef) or self.node.name in _ROOTS else self.node.bases
        bases = (find(self.module, base.id) for base in reversed(names) if isinstance(base, ast.Name))
        return [*dict.fromkeys(kind for base in bases if base for kind in base.lineage()), self]

    def is_method(self) -> bool:
        """Return whether the class is ``Method`` or derived from it."""
        return any(kind.node.name == "Method" for kind in self.lineage())

    def own(self) -> dict[str, tuple[ast.expr | None, ast.expr | None]]:
        """Return type and default of the options that this class declares itself; a new default has no type."""
        makers = [n for n in self.node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        function = self.node if isinstance(self.node, ast.FunctionDef) else next(iter(makers), None)
        if function is None:
            return dict(self._attributes())
        given = function.args
        usual = [None] * (len(given.args) - len(given.defaults)) + given.defaults
        pairs = zip([*given.args, *given.kwonlyargs], usual + given.kw_defaults, strict=True)
        return {arg.arg: (arg.annotation, default) for arg, default in pairs if arg.arg != "self"}

    def _attributes(self) -> Iterator[tuple[str, tuple[ast.expr | None, ast.expr]]]:
        for node in self.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                if "ClassVar" not in ast.unparse(node.annotation):
                    yield node.target.id, (node.annotation, node.value)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield node.targets[0].id, (None, node.value)

    def options(self, group: str = "") -> dict[str, Option]:
        """Return the options by name behind ``group``, those of settings one by one."""
        meanings, chosen = dict[str, str](), dict[str, Option]()
        found: dict[str, tuple[str, ast.expr | None, _Class]] = {}  # written type, default, the class that gives it
        of_method, places = self.is_method(), self.node.args.args if isinstance(self.node, ast.FunctionDef) else []
        for kind in self.lineage():
            meanings |= kind.meanings
            # attributes of another base of a method are no options (utils/fields.py)
            for name, (hint, default) in kind.own().items() if kind.is_method() or not of_method else ():
                old = found.get(name, ("", None, kind))
                if hint is not None or name in found:
                    written = old[0] if hint is None else kind.written(hint)
                    found[name] = (written, *old[1:]) if default is None else (written, default, kind)
            if usual := dict(kind._attributes()).get("usual_density") if of_method and "density" in found else None:
                found["density"] = (found["density"][0], usual[1], kind)
        for name, (written, default, kind) in found.items():
            chosen[group + name] = Option(
                group + name, written, None if default is None else kind.written(default), meanings.get(name, ""),
                name in [arg.arg for arg in places],
            )  # fmt: skip
            if isinstance(default, ast.Call) and isinstance(default.func, ast.Name):
                changed = {f"{group}{name}.{k.arg}": kind.written(k.value) for k in default.keywords}
                settings = find(kind.module, default.func.id)
                for option in settings.options(f"{group}{name}.").values() if settings else ():
                    chosen[option.name] = replace(option, default=changed.get(option.name, option.default))
        return chosen

    def written(self, node: ast.expr) -> str:
        """Return a type or a default in words, with the types and constants that names in it stand for."""

        def meaning(name: re.Match[str]) -> str:
            found, _ = _named(self.module, name[0], PACKAGE.name) or (None, "")
            return self.written(found) if isinstance(found, ast.Subscript | ast.BinOp | ast.Constant) else name[0]

        return re.sub(r"\b[A-Z]\w*", meaning, ast.unparse(node))


@cache
def _tree(module: str) -> tuple[ast.Module, dict[str, tuple[str, str]]] | None:
    """Return the source of a module and its imports, name -> (module, name there); None if there is no source."""
    names = module.split(".")
    if (spec := find_spec(names[0])) is None or spec.origin is None:
        return None
    place = Path(spec.origin).parents[bool(spec.submodule_search_locations)].joinpath(*names)
    file = next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)
    if file is None:
        return None
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError as error:  # in a method of the user's own
        raise UserError(f"{file}, line {error.lineno}: {error.msg}") from error
    nodes = [*tree.body, *(node for block in tree.body if isinstance(block, ast.If) for node in block.body)]
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level)
    return tree, {name.asname or name.name: (str(node.module), name.name) for node in imports for name in node.names}


def _named(module: str, name: str, inside: str = "") -> tuple[ast.AST, str] | None:
    """Return the class, the function or the value that a name stands for, and the module; None: it is something else.

    Imports are followed into modules whose names begin with ``inside``.
    """
    if (found := _tree(module)) is None:
        return None
    for node in found[0].body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node, module
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node.value, module
    if module == f"{PACKAGE.name}.methods" and name in methods():  # which finds its classes when it is imported
        return _named(methods()[name], name)
    place = found[1].get(name)
    # a package may import a module of its own by this name: `from torch import nn`
    follows = place and place[0].startswith(inside) and place != (module, name)
    return _named(*place, inside) if place and follows else None


@cache
def find(module: str, name: str) -> _Class | None:
    """Return a class or function by the name that it has in a module; None if its source is not found."""
    node, place = _named(module, name) or (None, "")
    return _Class(node, place) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None


@cache
def methods() -> dict[str, str]:
    """Return the shipped methods, name -> module."""
    found = {}
    for path in sorted((PACKAGE / "methods").rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        source = None if path.stem == "base" else _tree(module)
        for node in source[0].body if source else ():
            if isinstance(node, ast.ClassDef) and _Class(node, module).is_method():
                found[node.name] = module
    return dict(sorted(found.items()))


def command(name: str) -> _Class:
    """Return the function of a command."""
    function = find(f"{PACKAGE.name}.cli.commands", "list_" if name == "list" else name)
    assert function is not None, name
    return function


@cache
def of_method(name: str) -> dict[str, Option]:
    """Return the options of a method, a shipped one or by its import path; {} without the source of its classes."""
    package, _, last = name.rpartition(".")
    kind = find(package or f"{PACKAGE.name}.methods", last)
    options = kind.options("model.") if kind and kind.is_method() else {}
    return {name: option for name, option in options.items() if name not in _LINKED}


@cache
def shared() -> dict[str, Option]:
    """Return the options that all methods share: of the run, the data and the export."""
    run, data = find(f"{PACKAGE.name}.cli.options", "Settings"), find(f"{PACKAGE.name}.data.datamodule", "DataModule")
    choices = find(f"{PACKAGE.name}.export.choices", "Choices")
    assert run and data and choices
    more = {
        "config": Option("config", "str", None, "a file, or the name of a shipped config; several are merged"),
        "print_config": Option("print_config", "bool", "", "print the whole config and end"),
        "model": Option("model", "str", None, "the method: its name, or the import path of your own"),
    }
    options = more | run.options() | data.options("data.") | choices.options("export.")
    return {name: option for name, option in options.items() if name not in _LINKED}


@cache
def trainer() -> dict[str, Option]:
    """Return the options of Lightning's Trainer."""
    kind = find("lightning.pytorch.trainer.trainer", "Trainer")
    return kind.options("trainer.") if kind else {}


def names(kind: str | None = None) -> list[str]:
    """Return the sorted names of the options of a method (unknown: of all), the data and the Trainer."""
    own = (kind and of_method(kind)) or {name for known in methods() for name in of_method(known)}
    return sorted({*own, *shared(), *trainer()})
