"""How an object was made: the arguments of its constructors, read while they run."""

from __future__ import annotations

import sys
from typing import Any


def given_to(made: object) -> dict[str, Any]:
    """Return the arguments of the constructors of ``made`` that are running, called by the innermost of them.

    The outer one's value counts if it passes another one on. A constructor must not change its argument before it calls
    its base's constructor.

    >>> class Base:
    ...     def __init__(self, size=1):
    ...         self.given = given_to(self)
    >>> class Own(Base):
    ...     def __init__(self, name, **common):
    ...         super().__init__(**common)
    >>> Own("a", size=2).given
    {'size': 2, 'name': 'a'}
    """
    chosen: dict[str, Any] = {}
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__init__":
        code, values = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if not names or values.get(names[0]) is not made:
            break
        chosen |= {name: values[name] for name in names[1:] if name in values}
        frame = frame.f_back  # type: ignore[assignment]
    return chosen
