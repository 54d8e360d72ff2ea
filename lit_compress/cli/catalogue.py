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

PACKAGE = Path(__file__).resolve().parents[1]
_LINKED = ("model.task", "data.backbone", "data.teacher", "data.seed")  # follow from other options, cannot be given
_ROOTS = ("Method", "LightningModule", "LightningDataModule")  # where a class's options end


@dataclass(frozen=True)
class Option:
    """An option.

    Attributes:
        name: in full, as users type it.
        kind: its type, as in the source, with the values of a ``Literal`` written out.
        default: as in the source; None if it has to be given.
        help: its meaning.
        position: it is given without its name.
    """

    name: str
    kind: str
    default: str | None
    help: str
    position: bool = False


class _Class:
    """A class or function in the source: its node, and the module that names are looked up in."""

    def __init__(self, node: ast.ClassDef | ast.FunctionDef, module: str) -> None:
        self.node, self.module = node, module
        text = ast.get_docstring(node) or ""
        section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        entries = re.findall(r"^    \*{0,2}(\w+): (.*(?:\n     .*)*)", section[1] if section else "", re.MULTILINE)
        self.meanings = {name: " ".join(words.split()) for name, words in entries}
        self.about = text.partition("\n")[0]

    def lineage(self) -> Iterator[_Class]:
        """Yield this class and its base classes in the package, the nearest first."""
        yield self
        for base in self.node.bases if isinstance(self.node, ast.ClassDef) and self.node.name not in _ROOTS else ():
            if isinstance(base, ast.Name) and (found := find(self.module, base.id)) is not None:
                yield from found.lineage()

    def is_method(self) -> bool:
        """Return whether the class is ``Method`` or derived from it."""
        return any(kind.node.name == "Method" for kind in self.lineage())

    def own(self) -> dict[str, tuple[ast.expr | None, ast.expr | None]]:
        """Return type and default of the options that this class declares itself; a new default has no type."""
        function = self.node
        if isinstance(function, ast.ClassDef):
            makers = (n for n in self.node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
            if (function := next(makers, None)) is None:  # type: ignore[assignment]
                return dict(self._attributes())
        given = function.args
        first = [*given.posonlyargs, *given.args]
        usual = [None] * (len(first) - len(given.defaults)) + given.defaults
        pairs = [*zip(first, usual, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
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
        chosen: dict[str, Option] = {}
        defaults: dict[str, ast.expr] = {}
        meanings = {name: text for kind in reversed([*self.lineage()]) for name, text in kind.meanings.items()}
        of_method = self.is_method()
        for kind in self.lineage():
            if of_method and not kind.is_method():  # attributes of another base are no options (utils/fields.py)
                continue
            for name, (hint, default) in kind.own().items():
                if default is not None:
                    defaults.setdefault(name, default)
                if hint is None or group + name in chosen:
                    continue
                default = defaults.get(name, default)
                chosen[group + name] = Option(
                    group + name, kind.written(hint), None if default is None else kind.value(default),
                    meanings.get(name, ""),
                    isinstance(self.node, ast.FunctionDef) and name in [arg.arg for arg in self.node.args.args],
                )  # fmt: skip
                if isinstance(default, ast.Call) and isinstance(default.func, ast.Name):
                    changed = {f"{group}{name}.{k.arg}": kind.value(k.value) for k in default.keywords}
                    settings = find(kind.module, default.func.id) or find(self.module, default.func.id)
                    for option in settings.options(f"{group}{name}.").values() if settings else ():
                        chosen[option.name] = replace(option, default=changed.get(option.name, option.default))
        if of_method:
            attributes = (pair for kind in self.lineage() for pair in kind._attributes())
            usual = next(default for name, (_, default) in attributes if default and name == "usual_density")
            chosen[f"{group}density"] = replace(chosen[f"{group}density"], default=self.value(usual))
        return chosen

    def value(self, node: ast.expr) -> str:
        """Return a default in words, the value of a constant in place of its name."""
        if isinstance(node, ast.Name) and isinstance(found := _assigned(self.module, node.id), ast.Constant):
            node = found
        return ast.unparse(node)

    def written(self, hint: ast.expr) -> str:
        """Return a type in words, with the types that names in it stand for."""
        module = self.module

        class Spelled(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                found = _assigned(module, node.id)
                return self.visit(found) if isinstance(found, ast.Subscript | ast.BinOp) else node

        return ast.unparse(Spelled().visit(ast.parse(ast.unparse(hint), mode="eval").body))


@cache
def _tree(module: str) -> tuple[ast.Module, dict[str, tuple[str, str]]] | None:
    """Return the source of a module and its imports, name -> (module, name there); None if there is no source."""
    top, *rest = module.split(".")
    if (spec := find_spec(top)) is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin).with_suffix("")
    place = place.joinpath(*rest)
    file = next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)
    if file is None:
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level)
    return tree, {name.asname or name.name: (str(node.module), name.name) for node in imports for name in node.names}


@cache
def find(module: str, name: str) -> _Class | None:
    """Return a class or function by the name that it has in a module; None if its source is not found."""
    if (found := _tree(module)) is None:
        return None
    for node in found[0].body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _Class(node, module)
    if module == f"{PACKAGE.name}.methods" and name in methods():  # which finds its classes when it is imported
        return find(methods()[name], name)
    return find(*found[1][name]) if name in found[1] else None


def _assigned(module: str, name: str) -> ast.expr | None:
    """Return what is assigned to a name in a module or where the module has it from; None: it is something else."""
    if (found := _tree(module)) is None:
        return None
    for node in found[0].body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node.value
    place = found[1].get(name)
    return _assigned(*place) if place and place[0].startswith(PACKAGE.name) else None


@cache
def methods() -> dict[str, str]:
    """Return the shipped methods, name -> module."""
    files = (path.relative_to(PACKAGE.parent) for path in sorted((PACKAGE / "methods").rglob("*.py")))
    modules = (".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files)
    sources = ((module, _tree(module)) for module in modules)
    nodes = ((node, module) for module, source in sources if source for node in source[0].body)
    classes = {node.name: module for node, module in nodes if isinstance(node, ast.ClassDef)}
    found = {name: find(module, name) for name, module in sorted(classes.items())}
    return {
        name: classes[name] for name, kind in found.items()
        if kind and not classes[name].endswith("methods.base") and kind.is_method()
    }  # fmt: skip


def command(name: str) -> _Class | None:
    """Return the function of a command; None without one."""
    return find(f"{PACKAGE.name}.cli.commands", "list_" if name == "list" else name)


@cache
def of_method(name: str) -> dict[str, Option]:
    """Return the options of a method, in the order in which a run uses them; {} without the source of its classes.

    It is a shipped one by its name, or any by its import path.
    """
    package, _, last = name.rpartition(".")
    kind = find(package or f"{PACKAGE.name}.methods", last)
    base = find(f"{PACKAGE.name}.methods.base", "Method")
    assert base is not None
    options, common = kind.options("model.") if kind and kind.is_method() else {}, list(base.own())

    def place(option: str) -> float:
        first = option.split(".")[1]
        own = common.index("dense" if f"model.{first}.epochs" in options else "density") + 0.5
        return common.index(first) if first in common else own

    return {name: options[name] for name in sorted(options, key=place) if name not in _LINKED}


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
