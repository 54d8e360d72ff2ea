"""One compression in several passes is that of one pass; an error of the first process ends all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from tiny import make_net

from lit_compress.data.datamodule import DataModule
from lit_compress.stages.compression import Compression, compress
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.units import weighted
from lit_compress.stages.weighting import Weighted
from lit_compress.utils.errors import UserError

CPU = torch.device("cpu")


@pytest.mark.parametrize("removes", ["components", "structures"])
def test_several_passes_change_nothing(removes, tiny_data, tiny_backbone, monkeypatch, capsys):
    """Models whose sums are more than a pass may have: the same choice, and the same tensors."""
    data = DataModule("sst2", str(tiny_backbone), str(tiny_data))
    data.setup("fit")
    net = make_net("bert", "sst2", dropout=0.0, initializer_range=0.2).eval()
    settings = Weighted(weighting="kfac", calibration_examples=30, removes=removes, labels="exact")
    rule = settings.rule(RankRule(0.4, allocation="global"))

    def made() -> dict[str, torch.Tensor]:
        small, loss = compress(net, weighted(settings, rule), data.record, data, CPU, keep=True)
        return small.state_dict() | {"loss": torch.tensor(loss)}

    whole, dense = made(), net.state_dict()
    monkeypatch.setattr("lit_compress.stages.calibration.MOST_BYTES", 40_000)
    monkeypatch.setattr("lit_compress.utils.progress._noted", set())
    parts = made()
    assert " passes over the examples, the sums of all matrices are too large" in capsys.readouterr().err
    assert whole.keys() == parts.keys()
    assert any(name not in dense or dense[name].shape != value.shape for name, value in whole.items() if name != "loss")
    for name, value in whole.items():
        assert value.shape == parts[name].shape and torch.allclose(value, parts[name], rtol=1e-3, atol=1e-4), name


class Broken(Compression):
    """Finds something that cannot be used, which only the process sees that looks for it."""

    def measure(self, net: Any, names: Any, statistics: Any) -> Iterator[Any]:
        yield (), {"x": torch.zeros(1)}
        raise UserError("broken: a weight is not finite")


def _compress(rank: int, folder: str) -> None:
    said = "nothing"
    try:
        compress(make_net("bert"), Broken(), None, None, CPU, shared=True)  # type: ignore[arg-type]
    except UserError as error:
        said = str(error)
    Path(f"{folder}/{rank}.txt").write_text(said)


@pytest.mark.slow
def test_no_process_waits_for_one_that_has_stopped(tmp_path):
    processes.on_ranks(_compress, tmp_path)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["broken: a weight is not finite"] * 2
