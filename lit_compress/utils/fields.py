"""Classes whose annotated attributes are the options of their constructors, as those of a dataclass are."""

from __future__ import annotations

import sys
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


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
