"""What the report says of a model."""

from __future__ import annotations

import pytest
import torch
from tiny import make_net

from lit_compress.evaluation.intervals import wilson
from lit_compress.export.report import Measured, add_latency
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.accounting import density as non_zero
from lit_compress.numerics import rounding
from lit_compress.stages import rounded
from lit_compress.tasks.records import TASKS


def test_zeros_of_rounded_weights_were_not_removed(monkeypatch):
    monkeypatch.setattr(rounded, "GROUP", 16)
    net = make_net("llama", "plain_text")
    for value in rounded._matrices(net):
        value.data = rounding.rounded(value.data, 16)
    for density in (1.0, 0.5):
        entry = Measured(net, 1, 2.0).entry(TASKS["plain_text"], round(dense_site_params(net) / density), 9)
        assert entry["density"] == entry["stored"] == pytest.approx(density, abs=1e-4)
    assert non_zero(net) < 1


def test_a_fraction_of_rows_has_an_interval_and_other_metrics_what_was_drawn():
    net, drawn = make_net("bert", "sst2"), (0.9, 0.94)
    for task, known, ends in (("sst2", None, wilson(0.92, 872)), ("cola", drawn, drawn), ("cola", None, ())):
        assert (Measured(net, 1, 0.92, None, known).entry(TASKS[task], 9, 872)["interval"] or []) == [*ends]


def test_models_without_values_have_no_times():
    with torch.device("meta"):
        net = make_net("bert", "sst2")
    entries = [{}, {}]
    found = add_latency(entries, [net, net], TASKS["sst2"])
    assert found == {"rounds": 0, "spread": None, "steady": False, "speedup": None}
    assert [entry["latency_ms"]["median"] for entry in entries] == [None, None]
