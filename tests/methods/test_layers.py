"""Layers: its density, and a budget's."""

from lit_compress.methods import Layers


def test_the_density_of_a_budget_is_a_limit():
    for budget, exact in ((None, False), ("size=2MB", True)):
        (stage,) = Layers(teacher="x", density=None if budget else 0.33, budget=budget).stages()
        assert stage.compression.exact == exact and stage.compression.density == (0.5 if budget else 0.33)
