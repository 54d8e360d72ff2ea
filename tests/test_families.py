"""Every Linear of the blocks is a site; nothing else is."""

import pytest
from tiny import TINY, make_net
from torch import nn

from lit_compress.errors import UserError
from lit_compress.families import blocks, find_sites


@pytest.mark.parametrize("family", TINY)
def test_sites_are_all_linears_of_the_blocks(family):
    """Invariant 10: embeddings, pooler and head are untouched."""
    net = make_net(family)
    inside = {
        f"{name}.{path}"
        for *_, name, block in blocks(net)
        for path, module in block.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert {site.name for site in find_sites(net)} == inside
    outside = {name for name, m in net.named_modules() if isinstance(m, nn.Linear)} - inside
    assert all("pooler" in name or "classifier" in name for name in outside)


@pytest.mark.parametrize("family", TINY)
def test_roles_have_the_right_shapes(family):
    net = make_net(family)
    for site in find_sites(net):
        linear = net.get_submodule(site.name)
        shape = {"up": (64, 32), "down": (32, 64)}.get(site.role, (32, 32))
        assert (linear.out_features, linear.in_features) == shape
        assert f".{site.layer}." in site.name


def test_base_model_alone_has_sites_too():
    net = make_net("bert").base_model
    assert find_sites(net)[0].name == "encoder.layer.0.attention.self.query"


def test_unknown_architecture_is_one_line():
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model("electra", vocab_size=50, embedding_size=8, hidden_size=8, num_hidden_layers=1,
                                  num_attention_heads=1, intermediate_size=8)  # fmt: skip
    with pytest.raises(UserError, match=r"'electra' is not supported; .*bert"):
        find_sites(AutoModelForSequenceClassification.from_config(config))
