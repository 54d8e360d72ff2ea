"""Classes whose annotated attributes are the options of their constructors; options without an effect."""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from inspect import Parameter, Signature, signature
from operator import attrgetter
from typing import Any, get_type_hints

from lit_compress.utils.errors import UserError


class Fields:
    """Makes the constructors of classes that are derived from a direct subclass, which has one with common options.

    An annotated attribute with a value is an option, a value without an annotation a new default of an inherited one.
    The common constructor gets all options, those that it does not name as further keywords.

    Attributes:
        given: the options by name, with the defaults of those that were not given.

    >>> class Base(Fields):
    ...     def __init__(self, *, size: int = 1, **own: object) -> None:
    ...         self.size, self.own = size, own
    >>> class Mine(Base):
    ...     size = 2
    ...     name: str = "a"
    >>> Mine(name="b").given, signature(Mine)
    ({'size': 2, 'name': 'b'}, <Signature (*, size: int = 2, name: str = 'a')>)
    """

    given: dict[str, Any]

    def __init_subclass__(cls, **more: Any) -> None:
        """Make the constructor."""
        super().__init_subclass__(**more)
        if Fields in cls.__bases__:
            return
        if "__init__" in vars(cls):
            raise TypeError(f"{cls.__name__}: give no __init__; options are annotated attributes with a value")
        common: Any = vars(next(base for base in cls.__mro__ if Fields in base.__bases__))["__init__"]
        inherited, values = cls.__init__, vars(cls)

        def __init__(self: Any, **options: Any) -> None:
            if unknown := options.keys() - defaults.keys():
                raise TypeError(f"{cls.__name__} has no option {min(unknown)}")
            self.given = defaults | options
            common(self, **self.given)

        hints = values.get("__annotations__", {}).items()
        own = {name: hint for name, hint in hints if name in values and not str(hint).startswith("ClassVar")}
        __init__.__annotations__ = get_type_hints(inherited) | own
        types = __init__.__annotations__ = get_type_hints(__init__, vars(sys.modules[cls.__module__]))
        first, *others = (p for p in signature(inherited).parameters.values() if p.kind is not Parameter.VAR_KEYWORD)
        defaults = {p.name: values.get(p.name, p.default) for p in others} | {name: values[name] for name in own}
        options = [Parameter(n, Parameter.KEYWORD_ONLY, default=d, annotation=types[n]) for n, d in defaults.items()]
        __init__.__signature__ = Signature([first, *options])  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[assignment, method-assign]


def check_effects(method: Fields) -> None:
    """Refuse an option that was changed although its method does not read it, by the values of its other options.

    A class of options has a class attribute ``matters``: option -> {another option: the values with which the first one
    is read}. Values are a tuple, or True for all above 0; an option of a group inside the class has a dot in its name.

    Args:
        method: whose options, and the settings among them, are looked at.

    Raises:
        UserError: names the first one, and the way out.
    """
    usual = {name: parameter.default for name, parameter in signature(type(method)).parameters.items()}
    parts: list[tuple[str, type, dict[str, Any], dict[str, Any]]] = [("model.", type(method), method.given, usual)]
    for name, value in method.given.items():
        if is_dataclass(value) and is_dataclass(usual[name]):
            parts.append((f"model.{name}.", type(value), vars(value), vars(usual[name])))
    for group, kind, values, defaults in parts:
        matters = {name: others for base in kind.__mro__ for name, others in vars(base).get("matters", {}).items()}
        for name, other, read in ((key, *condition) for key in matters for condition in matters[key].items()):
            first, _, inside = other.partition(".")
            actual = attrgetter(inside)(values[first]) if inside else values[first]
            value = values[name]
            if name not in defaults or value == defaults[name] or (actual > 0 if read is True else actual in read):
                continue
            nearest = "above 0" if read is True else next(one for one in read if one is not None)
            raise UserError(
                f"{group}{name}: {value} has no effect with {group}{other} {actual}; leave it out, or give "
                f"{group}{other} {nearest}"
            )
