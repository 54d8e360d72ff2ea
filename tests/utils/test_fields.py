"""Options of a method are its annotated attributes: what is one, what is not, and what a constructor refuses."""

from __future__ import annotations

from typing import ClassVar

import pytest

from lit_compress.methods import SVD


class Mine(SVD):
    usual_density = 0.3
    allocation = "global"
    name: str = "mine"
    kind: ClassVar[str] = "no option"


def test_attributes_with_a_value_are_options_and_defaults():
    method = Mine(name="other")
    assert (method.name, method.given["name"], method.density, method.rule.allocation) == (
        "other",
        "other",
        0.3,
        "global",
    )
    assert "kind" not in method.given and SVD().given["allocation"] == "uniform"
    with pytest.raises(TypeError, match="Mine has no option kind"):
        Mine(kind="x")


def test_a_constructor_of_its_own_is_refused():
    with pytest.raises(TypeError, match="Own: give no __init__; options are annotated attributes with a value"):
        type("Own", (SVD,), {"__init__": lambda self: None})
