"""Options of a method are its annotated attributes: what is one, what is not, and what a constructor refuses."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from typing import ClassVar

import pytest

from lit_compress import methods
from lit_compress.methods import FWSVD, SVD, Layers, SecondOrder
from lit_compress.methods.base import Distillation
from lit_compress.methods.second_order import KroneckerWeighted
from lit_compress.stages.blocks import KeptBlocks
from lit_compress.stages.weighting import Weighted
from lit_compress.utils.errors import UserError
from lit_compress.utils.fields import check_effects


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


@pytest.mark.parametrize(
    ("method", "settings", "line"),
    [
        (
            FWSVD,
            {"retrain": Weighted(weighting="kfac", fisher_examples=9)},
            "model.retrain.fisher_examples: 9 has no effect with model.retrain.weighting kfac; leave it out, or give "
            "model.retrain.weighting fisher",
        ),
        (SVD, {"distillation": Distillation(alpha=0.0, temperature=3.0)},
         "model.distillation.temperature: 3.0 has no effect with model.distillation.alpha 0.0; leave it out, or give "
         "model.distillation.alpha above 0"),
        (SecondOrder, {"allocation": "uniform", "retrain": KroneckerWeighted(removes="structures")},
         "model.allocation: uniform has no effect with model.retrain.removes structures; leave it out, or give "
         "model.retrain.removes components"),
        (Layers, {"prune": KeptBlocks(examples=20)},
         "model.prune.examples: 20 has no effect with model.prune.choice even; leave it out, or give "
         "model.prune.choice measured"),
    ],
)  # fmt: skip
def test_a_changed_option_that_is_not_read_is_refused(method, settings, line):
    with pytest.raises(UserError) as error:
        check_effects(method(backbone="unused", density=0.5, **settings))
    assert str(error.value) == line


def test_options_that_are_read_or_at_their_default_pass():
    """SecondOrder masks padding by default, also if a user turns the comparison of hidden states off."""
    check_effects(FWSVD(backbone="unused", retrain=Weighted(fisher_examples=9)))
    check_effects(SecondOrder(backbone="unused", distillation=Distillation(mask_padding=True, relative=True)))


def test_every_condition_names_options_that_there_are():
    for name in set(methods.__all__) - {"Method"}:
        given = inspect.signature(getattr(methods, name)).parameters
        kinds = {type(p.default): vars(p.default).keys() for p in given.values() if is_dataclass(p.default)}
        for kind, options in {**kinds, getattr(methods, name): given.keys()}.items():
            for base in kind.__mro__:
                for option, others in vars(base).get("matters", {}).items():
                    assert {option, *(other.partition(".")[0] for other in others)} <= options
