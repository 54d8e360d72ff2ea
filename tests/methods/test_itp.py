"""ITP inside a real fit: the rows of W itself, and what is left of the net."""

from __future__ import annotations

import pytest
import torch
from tiny import make_batch

from lit_compress.methods import ITP
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net
from lit_compress.stages.rows import RowPruning


def itp(density=0.3):
    return ITP(backbone="unused", density=density, prune=RowPruning(epochs=2, learning_rate=3e-3, interval=3))


def layers(net):
    return {site.name: net.get_submodule(site.name) for site in find_sites(net)}


def logits(net):
    batch = make_batch()
    with torch.no_grad():
        return net.eval()(input_ids=batch["input_ids"] % 20, attention_mask=batch["attention_mask"]).logits


def test_prunes_the_weight_itself(dense):
    method = itp()
    method.prepare(method.stages()[-1], 0, dense, None)
    method.configure_model()
    assert torch.equal(logits(method.net), logits(load_net(dense)))
    for layer, linear in zip(layers(method.net).values(), layers(load_net(dense)).values(), strict=True):
        assert layer.rank == 0 and layer.left is None and torch.equal(layer.sparse, linear.weight)
    method.stage.set_total_steps(100)
    assert method.stage.budget.final == pytest.approx(0.3, abs=1e-4)
