"""Mean gradients and mean squares: one example after the other; rows that fill up; nothing is left behind."""

from __future__ import annotations

import pytest
import torch
from in_memory import mean_gradients
from tiny import make_batch, make_net

from lit_compress.models.sites import find_sites
from lit_compress.utils.errors import UserError


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_gradients_are_means_over_examples(family):
    """Of ALBERT the gradients of one matrix are summed over its uses before they are squared."""
    net = make_net(family, initializer_range=0.2).double().train()
    names = [site.name for site in find_sites(net)][::3]
    batch = make_batch(5, 9)
    full = {name: torch.cat([column, column[:1]]) for name, column in batch.items()}
    full["index"][-1] = -1
    found = mean_gradients(net, [full], "classification", names, squares=True)
    assert net.training and all(p.grad is None and p.requires_grad for p in net.parameters())
    net.eval()
    for name in names:
        weight, total, squares = net.get_parameter(f"{name}.weight"), 0, 0
        for i in range(5):
            real = batch["attention_mask"][i].bool()  # without padding
            output = net(input_ids=batch["input_ids"][i : i + 1, real]).logits
            loss = torch.nn.functional.cross_entropy(output, batch["labels"][i : i + 1])
            (gradient,) = torch.autograd.grad(loss, weight)
            total, squares = total + gradient, squares + gradient**2
        assert torch.allclose(found[name].mean, total / 5, atol=1e-10)
        assert torch.allclose(found[name].squares, squares / 5, atol=1e-10)
    assert mean_gradients(net, [batch], "classification", names)[names[0]].squares is None


def test_what_cannot_be_used():
    net, name = make_net("bert"), "bert.encoder.layer.0.output.dense"
    with pytest.raises(UserError, match=r"^calibration: there are no examples"):
        mean_gradients(net, [], "classification", [name])
    with torch.no_grad():
        net.classifier.weight.fill_(float("inf"))
    with pytest.raises(UserError, match=f"^calibration: gradients at '{name}' are inf or NaN"):
        mean_gradients(net, [make_batch()], "classification", [name])
