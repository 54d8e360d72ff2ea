"""What is checked before a run starts: roundings and shapes that a method has."""

import pytest
from tiny import make_net

from lit_compress import methods
from lit_compress.run.settle import check_sizes
from lit_compress.utils.errors import UserError


def test_what_can_be_rounded():
    """Every method that chooses ranks or widths; the others, and numbers that are none, are refused in one line."""
    able, names = set(), {*methods.__all__} - {"Method"}
    for name in names:
        try:
            check_sizes(getattr(methods, name)(task="sst2", round_to=8))
            able.add(name)
        except UserError as error:
            assert str(error).startswith(f"model.round_to: {name} chooses no ranks or widths")
    assert names - able == {"BlockMovement", "ITP", "Movement", "Magnitude", "FirstOrder", "PLATON", "Layers",
                            "Theseus"}  # fmt: skip
    with pytest.raises(UserError, match=r"model\.round_to: 0 is below 1"):
        check_sizes(methods.CoFi(task="sst2", round_to=0))


def test_whose_layers_can_have_one_shape():
    """FWSVD's can with the weightings that remove structures; its other settings are refused by the stage."""
    able, names = set(), {*methods.__all__} - {"Method"}
    for name in names:
        try:
            check_sizes(getattr(methods, name)(task="sst2", shape="uniform"))
            able.add(name)
        except UserError as error:
            assert str(error).startswith("model.shape: 'uniform' is for heads and neurons that go at once, which ")
    assert able == {"SecondOrder", "FWSVD", "LLMPruner"}
    with pytest.raises(UserError, match=r"model\.shape: 'uniform' .* 'components' makes factors; nearest: structures"):
        methods.SecondOrder(task="sst2", shape="uniform").stages()[-1].check(make_net())
