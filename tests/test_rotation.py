"""A Llama in another basis: the same net, and the best smaller one that is still stock."""

from __future__ import annotations

import pytest
import torch
from tiny import make_batch, make_net

from lit_compress.errors import UserError
from lit_compress.rotation import rotate, stream_axes, stream_gram


def llama(seed=0, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes | {"intermediate_size": 48, "vocab_size": 100, "rms_norm_eps": 1e-5} | settings)
    net = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.add_((0.3 if "norm" in name else 0.1) * torch.randn_like(p))
    return net


def logits(net):
    batch = make_batch()
    with torch.no_grad():
        found = net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return found[batch["attention_mask"].bool()]


def orthogonal(d=32, seed=1):
    return torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))[0]


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("make", [orthogonal, None])
def test_another_basis_is_the_same_net(settings, make, tmp_path):
    net = llama(**settings)
    axes = make() if make else stream_axes(net, [make_batch()])
    turned = rotate(net, axes)
    assert torch.allclose(logits(turned), logits(net), atol=1e-5)
    turned.save_pretrained(tmp_path)
    again = type(net).from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(turned))


def test_fewer_directions_are_those_that_the_stream_is_projected_on():
    """The stock net of k directions = the full one with the others of every write set to zero."""
    net, axes = llama(), orthogonal()
    full, small = rotate(net, axes), rotate(net, axes, 20)
    assert type(small) is type(net) and small.config.hidden_size == 20 and small.config.head_dim == 8
    with torch.no_grad():
        full.model.embed_tokens.weight[:, 20:] = 0
        for layer in full.model.layers:
            layer.self_attn.o_proj.weight[20:] = 0
            layer.mlp.down_proj.weight[20:] = 0
    assert torch.allclose(logits(small), logits(full), atol=1e-5)


def test_a_stream_of_low_rank_loses_nothing():
    """With the data's own axes; with others it does."""
    net, basis = llama(), orthogonal(seed=5)[:, :12].float()
    with torch.no_grad():
        low = basis @ basis.T
        net.model.embed_tokens.weight.copy_(net.model.embed_tokens.weight @ low)
        for layer in net.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.copy_(low @ linear.weight)
    axes = stream_axes(net, [make_batch(16, 12)])
    assert torch.allclose(logits(rotate(net, axes, 12)), logits(net), atol=1e-4)
    assert (logits(rotate(net, orthogonal(), 12)) - logits(net)).abs().max() > 1e-2


def test_the_gram_is_that_of_real_tokens_at_every_norm():
    net, batch, seen = llama(), make_batch(), []
    norms = [*(n for layer in net.model.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)),
             net.model.norm]  # fmt: skip
    handles = [norm.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for norm in norms]
    logits(net)
    for handle in handles:
        handle.remove()
    tokens = torch.cat([x[batch["attention_mask"].bool()] for x in seen]).double()
    assert torch.allclose(stream_gram(net.train(), [batch]), tokens.T @ tokens, rtol=1e-6)
    assert net.training and not any(norm._forward_pre_hooks for norm in norms)


def test_what_cannot_be():
    with pytest.raises(UserError, match="'bert' cannot be rotated; llama can"):
        rotate(make_net("bert"), orthogonal())
    with pytest.raises(UserError, match="width: 40 is not in 1 to 32; nearest valid 32"):
        rotate(llama(), orthogonal(), 40)
