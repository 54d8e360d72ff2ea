"""All options with type, default and meaning, read from the source of the classes and commands that take them.

Nothing is imported: a help text and a mistyped option need no PyTorch. The options of a class are the parameters of its
constructor, or the attributes with a type and a value; of a command the parameters of its function. Both are described
under ``Args:`` of the docstring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeGuard

import griffe
from griffe import Class, Expr, Function

from lit_compress.utils.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
_LINKED = ("model.task", "data.backbone", "data.teacher", "data.seed")  # follow from other options, cannot be given
_SHARED = ("cli.options.Settings", "data.datamodule.DataModule", "export.choices.Choices")  # classes of options


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


@cache
def _module(name: str) -> griffe.Module | None:
    """Return a module from its source; None if there is none."""
    top, *names = name.split(".")
    if not top or (spec := find_spec(top)) is None or spec.origin is None:
        return None
    place = Path(spec.origin).parents[bool(spec.submodule_search_locations)].joinpath(top, *names)
    file = next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)
    try:
        with griffe.logger.disable():
            return griffe.visit(name, file, file.read_text(encoding="utf-8")) if file else None
    except SyntaxError as error:  # in a method of the user's own
        raise UserError(f"{file}, line {error.lineno}: {error.msg}") from error


@cache
def _find(path: str, inside: str = "") -> Any:
    """Return the object of an import path, also one imported there from a module ``inside``; None without a source."""
    module, _, name = path.rpartition(".")
    if module == f"{PACKAGE.name}.methods" and name in methods():  # which finds its classes when it is imported
        module = methods()[name]
    found = source.members.get(name) if (source := _module(module)) else None
    if not isinstance(found, griffe.Alias):
        return found
    return _find(found.target_path, inside) if found.target_path.startswith(inside) else None


def _lineage(kind: Class | Function) -> list[Class | Function]:
    """Return the base classes in the package, and last this class or function."""
    names = [name for name in getattr(kind, "bases", []) if isinstance(name, griffe.ExprName)]
    bases = [_find(name.canonical_path) for name in reversed(names)]
    return [*dict.fromkeys(one for base in bases if isinstance(base, Class) for one in _lineage(base)), kind]


def _is_method(kind: object) -> TypeGuard[Class]:
    """Return whether a class is ``Method`` or derived from it."""
    return isinstance(kind, Class) and any(one.name == "Method" for one in _lineage(kind))


def _written(source: str | Expr) -> str:
    """Return a type or a default in words, with the types and constants that names in it stand for."""
    words = ""
    for part in [source] if isinstance(source, str) else source.iterate():
        scope = getattr(part, "parent", None)
        known = _find(f"{scope.module.path}.{part}", PACKAGE.name) if isinstance(scope, griffe.Object) else None
        value = known.value if isinstance(known, griffe.Attribute) else None  # else a class, or elsewhere
        words += _written(value) if isinstance(value, str | griffe.ExprSubscript | griffe.ExprBinOp) else str(part)
    return words


def _options(kind: Class | Function, group: str = "") -> dict[str, Option]:
    """Return the options by name behind ``group``, those of settings one by one."""
    found, meanings, options = dict[str, tuple[str | Expr, str | Expr | None]](), dict[str, str](), dict[str, Option]()
    # attributes of another base of a method are no options (utils/fields.py)
    for one in list(filter(_is_method, _lineage(kind))) or _lineage(kind):
        given = [(p.name, p.annotation, p.default) for p in one.parameters if "variadic" not in p.kind.value]
        values = [a for a in one.attributes.values() if a.value and "instance-attribute" in a.labels]
        for name, hint, default in given or [(a.name, a.annotation, a.value) for a in values]:
            if hint or name in found:  # a new default has no type
                before = found.get(name, ("", None))
                found[name] = (hint or before[0], before[1] if default is None else default)
        if isinstance(rule := one.members.get("usual_density"), griffe.Attribute):
            found["density"] = (found["density"][0], rule.value)
        sections = one.docstring.parse("google", warnings=False) if one.docstring else []
        entries = [entry for section in sections if section.kind == "parameters" for entry in section.value]
        meanings |= {entry.name.strip("*"): " ".join(entry.description.split()) for entry in entries}
    for name, (hint, default) in found.items():
        full, usual = f"{group}{name}", None if default is None else _written(default)
        if full in _LINKED:
            continue
        by_place = kind.is_function and kind.parameters[name].kind is griffe.ParameterKind.positional_or_keyword
        options[full] = Option(full, _written(hint), usual, meanings.get(name, ""), by_place)
        if isinstance(default, griffe.ExprCall) and isinstance(settings := _find(default.canonical_path), Class):
            options |= _options(settings, f"{full}.")
            for word in default.arguments:
                if isinstance(word, griffe.ExprKeyword) and (old := options.get(f"{full}.{word.name}")):
                    options[old.name] = replace(old, default=_written(word.value))
    return options


@cache
def methods() -> dict[str, str]:
    """Return the shipped methods, name -> module."""
    files = griffe.ModuleFinder([PACKAGE.parent]).iter_submodules(PACKAGE / "methods")
    modules = [_module(".".join((PACKAGE.name, "methods", *parts))) for parts, _ in files if parts != ("base",)]
    kinds = [kind for module in modules if module for kind in module.members.values() if _is_method(kind)]
    return {kind.name: kind.module.path for kind in sorted(kinds, key=lambda kind: kind.name)}


def command(name: str) -> dict[str, Option]:
    """Return the options of a command."""
    return _options(_find(f"{PACKAGE.name}.cli.commands.{'list_' if name == 'list' else name}"))


def about(name: str) -> str:
    """Return the first line of a command's docstring."""
    return _find(f"{PACKAGE.name}.cli.commands.{'list_' if name == 'list' else name}").docstring.lines[0]


@cache
def of_method(name: str) -> dict[str, Option]:
    """Return the options of a method, a shipped one or by its import path; {} without the source of its classes."""
    package, _, last = name.rpartition(".")
    kind = _find(f"{package or f'{PACKAGE.name}.methods'}.{last}")
    return _options(kind, "model.") if _is_method(kind) else {}


@cache
def shared() -> dict[str, Option]:
    """Return the options that all methods share: of the run, the data and the export."""
    run, data, export = (_find(f"{PACKAGE.name}.{path}") for path in _SHARED)
    more = [
        Option("config", "str", None, "a file, or the name of a shipped config; several are merged"),
        Option("print_config", "bool", "", "print the whole config and end"),
        Option("model", "str", None, "the method: its name, or the import path of your own"),
    ]
    return {one.name: one for one in more} | _options(run) | _options(data, "data.") | _options(export, "export.")


@cache
def trainer() -> dict[str, Option]:
    """Return the options of Lightning's Trainer."""
    return _options(_find("lightning.pytorch.trainer.trainer.Trainer"), "trainer.")


def names(kind: str | None = None) -> list[str]:
    """Return the sorted names of the options of a method (unknown: of all), the data and the Trainer."""
    own = (kind and of_method(kind)) or {name for known in methods() for name in of_method(known)}
    return sorted({*own, *shared(), *trainer()})
