"""Whose labels a calibration takes if the user does not say."""

from __future__ import annotations

import pytest
import torch
from tiny import make_net

from lit_compress.data.datamodule import DataModule
from lit_compress.stages.calibration import collected
from lit_compress.stages.weighted_retraining import calibration_of
from lit_compress.stages.weighting import Weighted, calibration_for
from lit_compress.tasks.records import get_task

KFAC = Weighted(weighting="kfac")


@pytest.mark.parametrize(
    ("task", "expected"),
    [("sst2", "exact"), ("mrpc", "exact"), ("mnli", "drawn"), ("stsb", "drawn"), ("wiki_qa", "drawn"),
     ("stsb_embedding", "drawn"), ("conll2003", "drawn"), ("squad", "drawn"), ("xsum", "drawn"),
     ("wikitext2", "drawn")],
)  # fmt: skip
def test_two_classes_have_exact_labels(task, expected):
    record = get_task(task)
    assert KFAC.labels_of(record) == expected
    for choice in ("true", "drawn", "exact"):
        assert Weighted(weighting="kfac", labels=choice).labels_of(record) == choice


def test_the_moments_of_two_classes_have_no_noise(tiny_data, tiny_backbone):
    """Another seed draws no other labels: with all examples the moments are the same; the report says which labels."""
    data = DataModule("sst2", str(tiny_backbone), str(tiny_data))
    data.setup("fit")
    net, rows = make_net("bert", "sst2", dropout=0.0, initializer_range=0.3).eval(), data.train_size()

    def moments(seed, **settings):
        chosen = Weighted(weighting="kfac", calibration_examples=rows, calibration_seed=seed, **settings)
        ((_, found),) = collected(net, calibration_for([chosen], data), data.record, torch.device("cpu"))
        found = [*found.values()]
        return torch.stack([factors.gradients().diagonal()[:2] for factors in found])

    assert torch.allclose(moments(1), moments(2), rtol=1e-5, atol=0)
    assert not torch.allclose(moments(1, labels="drawn"), moments(2, labels="drawn"), rtol=1e-2, atol=0)
    assert calibration_of(KFAC, data, 0.0)["labels"] == "exact"
