"""A Llama in another basis of its residual stream: exact at full width, smaller when directions are left out.

SP3 (Hu et al. 2024, section 3.5) for RMSNorm before the blocks, with one group: every block reads and writes the same
stream, so one orthogonal U and one width for all of it leave a stock net:

    x' = U^T x;  embeddings E U;  what reads: W diag(gamma) U;  what writes: U^T W
    rms(x) = x / sqrt(|x|^2 / d + eps) commutes with U; over k kept directions torch divides by k:
    its weight is sqrt(d / k), its epsilon eps d / k

Queries and keys are not projected: a projection before the rotary embedding changes the scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_compress.errors import UserError
from lit_compress.projections import principal_axes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def stream_gram(net: PreTrainedModel, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """Return the sum of x x^T over all real tokens of the stream wherever a norm reads it, [d, d] float64.

    Args:
        net: a Llama; in evaluation mode while it runs.
        batches: ``input_ids`` and ``attention_mask`` [batch, length].
    """
    norms = _norms(net)
    d, training = net.config.hidden_size, net.training
    gram = torch.zeros(d, d, dtype=torch.float64, device=net.device)
    mask = torch.empty(0)

    def add(_: nn.Module, args: tuple[Tensor]) -> None:
        tokens = args[0][mask].double()
        gram.addmm_(tokens.mT, tokens)

    handles = [norm.register_forward_pre_hook(add) for norm in norms]
    net.eval()
    try:
        for batch in batches:
            mask = batch["attention_mask"].bool().to(net.device)
            net(input_ids=batch["input_ids"].to(net.device), attention_mask=batch["attention_mask"].to(net.device))
    finally:
        for handle in handles:
            handle.remove()
        net.train(training)
    return gram.cpu()


@torch.no_grad()
def rotate(net: PreTrainedModel, axes: Tensor, width: int | None = None) -> PreTrainedModel:
    """Return a stock Llama whose stream has the directions ``axes``, the first ``width`` of them.

    At full width its logits are those of ``net``. Input and output embeddings are no longer tied.

    Args:
        net: a Llama with a language-model head.
        axes: U [d, d], orthonormal columns; e.g. ``principal_axes(stream_gram(...))[0]``.
        width: directions that stay; None for all.

    Raises:
        UserError: another architecture, or ``width`` is not in 1 .. d.
    """
    _norms(net)
    config, d = type(net.config).from_dict(net.config.to_dict()), net.config.hidden_size
    k = d if width is None else width
    if not 1 <= k <= d:
        raise UserError(f"width: {k} is not in 1 to {d}; nearest valid {min(max(k, 1), d)}")
    config.hidden_size, config.tie_word_embeddings = k, False
    config.head_dim = getattr(net.config, "head_dim", None) or d // net.config.num_attention_heads
    config.rms_norm_eps = net.config.rms_norm_eps * d / k
    small = type(net)(config).to(net.dtype)
    basis = axes.double()[:, :k]
    state = {name: value.double() for name, value in net.state_dict().items()}
    new = {}
    for name, value in state.items():
        if name.endswith("embed_tokens.weight"):
            new[name] = value @ basis
        elif ".o_proj." in name or ".down_proj." in name:  # weight or bias
            new[name] = basis.mT @ value
        elif name.endswith("norm.weight"):
            new[name] = torch.full((k,), (d / k) ** 0.5)
        elif name.endswith(".weight"):
            new[name] = value * state[_norm_before(name)] @ basis
        else:
            new[name] = value
    small.load_state_dict({name: value.to(net.dtype) for name, value in new.items()})
    return small.train(net.training)


def _norm_before(name: str) -> str:
    """Return the name of the weight of the norm that the Linear ``name`` reads."""
    block, attention, _ = name.partition(".self_attn.")
    if attention:
        return f"{block}.input_layernorm.weight"
    block, ffn, _ = name.partition(".mlp.")
    return f"{block}.post_attention_layernorm.weight" if ffn else "model.norm.weight"


def _norms(net: PreTrainedModel) -> list[nn.Module]:
    """Return the norms of a Llama.

    Raises:
        UserError: it is none.
    """
    if net.config.model_type != "llama":
        raise UserError(f"model.backbone: '{net.config.model_type}' cannot be rotated; llama can")
    base = net.base_model
    pairs = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in base.layers]
    return [*(norm for pair in pairs for norm in pair), base.norm]


def stream_axes(net: PreTrainedModel, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """Return U [d, d] of the stream on ``batches``, by falling energy."""
    return principal_axes(stream_gram(net, batches))[0]
