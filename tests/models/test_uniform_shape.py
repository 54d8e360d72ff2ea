"""As many heads and neurons in every layer: counts that a configuration takes, and the ordinary net of these sizes."""

import pytest
import torch
from helpers import logits, net_of
from tiny import TINY, VARIANTS

from lit_compress.export.fuse import compact
from lit_compress.export.modelling import ordinary_net
from lit_compress.models.accounting import stored_density
from lit_compress.models.cut import cut_units
from lit_compress.models.shapes import without_values
from lit_compress.models.storage import save_net
from lit_compress.models.uniform_shape import even_counts, uniform_groups
from lit_compress.utils.errors import UserError

OF_HEADS = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text")  # a head has a width of its own


@pytest.mark.parametrize("family", [*TINY, "qwen3-sliding", "bart-uneven", "t5-gated", "modernbert-biases"])
def test_every_family_is_an_ordinary_net_of_other_sizes(family, tmp_path):
    """The library's own class loads it, with the logits of the net that was cut; any head or neuron may be kept."""
    kind, settings = VARIANTS.get(family, (family, {}))
    net, generator = net_of(kind, torch.float32, **settings), torch.Generator().manual_seed(0)
    counts = even_counts(net, 0.7)
    units = {part.last: group.units for group in uniform_groups(net) for part in group.parts}
    cut_units(net, {name: torch.randperm(units[name], generator=generator) < count for name, count in counts.items()})
    small = compact(net)
    assert 0.65 < stored_density(small) <= 0.7
    assert any("o_proj" in name for name in counts) == (kind in OF_HEADS)
    ordinary = ordinary_net(small)
    ordinary.config.architectures = [type(net).__name__]
    save_net(ordinary, tmp_path)
    again = type(net).from_pretrained(tmp_path)
    assert torch.allclose(logits(again), logits(net), atol=1e-5)
    assert (ordinary.get_input_embeddings().weight is getattr(ordinary.get_output_embeddings(), "weight", None)) == (
        net.get_input_embeddings().weight is getattr(net.get_output_embeddings(), "weight", None)
    )


def test_what_differs_from_layer_to_layer_is_not_ordinary():
    net = net_of("llama", torch.float32)
    assert ordinary_net(compact(net)) is not None
    first, *_ = (name for name in even_counts(net, 0.6) if "down_proj" in name)
    cut_units(net, {first: torch.arange(64) < 40})
    assert ordinary_net(compact(net)) is None
    net = net_of("bert", torch.float32)
    cut_units(net, {f"bert.encoder.layer.{i}.attention.output.dense": torch.arange(4) < 2 for i in range(2)})
    assert ordinary_net(compact(net)) is None  # its heads are as many as the width of hidden states says
    net = net_of("qwen3", torch.float32)
    cut_units(net, {name: torch.zeros(64, dtype=torch.bool) for name in even_counts(net, 0.6) if "down_proj" in name})
    assert ordinary_net(compact(net)) is None  # no configuration has 0 neurons


def test_counts_are_even_and_valid():
    """Llama's configuration wants a divisor of the width; key/value groups go whole, and neurons fill the budget."""
    net = net_of("llama", torch.float32, num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    heads, neurons = uniform_groups(net, 8)
    assert heads.counts == (1, 2, 4) and neurons.counts == (8, 16, 24, 32, 40, 48, 56, 64)
    small = without_values(lambda: net_of("llama", torch.float32))
    units = {part.last: group.units for group in uniform_groups(small, 8) for part in group.parts}
    cut_units(small, {name: torch.arange(units[name]) < count for name, count in even_counts(small, 0.5, 8).items()})
    assert 0.4 < stored_density(small) <= 0.5
    with pytest.raises(UserError, match=r"density: 0\.01 cannot be reached with model\.shape uniform.* is 0\.1"):
        even_counts(net, 0.01)
