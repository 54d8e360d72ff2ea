"""Layers: its options, and what is refused."""

import pytest

from lit_compress.methods import Layers
from lit_compress.stages.blocks import KeptBlocks
from lit_compress.utils.errors import UserError
from lit_compress.utils.fields import check_effects


def test_the_density_of_a_budget_is_a_limit():
    for budget, exact in ((None, False), ("size=2MB", True)):
        (stage,) = Layers(teacher="x", density=None if budget else 0.33, budget=budget).stages()
        assert stage.compression.exact == exact and stage.compression.density == (0.5 if budget else 0.33)
    (stage,) = Layers(teacher="x", blocks=2).stages()
    assert (stage.compression.blocks, stage.compression.keeps_all, stage.compression.density) == (2, False, 1.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"blocks": 0}, "model.blocks: 0 is below 1, the smallest valid value"),
        ({"blocks": 2, "density": 0.5}, "model.blocks 2, model.density 0.5: only one"),
        ({"blocks": 2, "budget": "params=5M"}, "model.blocks 2, model.budget params=5M: only one"),
    ],
)
def test_two_sizes_are_refused(options, text):
    with pytest.raises(UserError, match=text):
        Layers(**options)


def test_a_number_of_blocks_does_not_say_how_many_sublayers_are_kept():
    with pytest.raises(UserError, match=r"model\.blocks: 2 has no effect with model\.prune\.parts sublayers; leave it"):
        check_effects(Layers(blocks=2, prune=KeptBlocks(choice="measured", parts="sublayers")))
