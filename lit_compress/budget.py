"""One accounting for every method: parameters, density, FLOPs, bytes, latency; all measured on the net itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lit_compress.families import Site, embedding_params, find_sites
from lit_compress.layers import NarrowNorm, StreamBlock

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Params:
    """Stored parameters: weights of the sites and of residual paths (no biases), all but the embeddings, all."""

    sites: int
    non_embedding: int
    total: int


def weights(module: nn.Module) -> list[torch.Tensor]:
    """Return what counts as weights of a site: its parameters without the bias. An index is a buffer, not a weight."""
    return [p for name, p in module.named_parameters(recurse=False) if name != "bias"]


def counted_weights(net: PreTrainedModel) -> list[torch.Tensor]:
    """Return the stored weights of the sites, and of matrices that a net needs for its residual paths; each once."""
    found = [w for site in find_sites(net) for w in weights(net.get_submodule(site.name))]
    found += [m.weight for m in net.modules() if isinstance(m, NarrowNorm) and m.weight is not None]
    turns = [getattr(m, name, None) for m in net.modules() if isinstance(m, StreamBlock) for name in ("middle", "end")]
    found += [turn.weight for turn in turns if turn is not None]
    return list({id(w): w for w in found}.values())


def dense_site_params(net: PreTrainedModel) -> int:
    """Return the number of weights the sites of ``net`` have before compression: sum of in x out."""
    dense = _dense(net)
    modules = {id(module): module for site in find_sites(dense) if (module := dense.get_submodule(site.name))}
    return sum(module.weight.numel() for module in modules.values())  # type: ignore


def dense_sizes(net: PreTrainedModel) -> dict[str, int]:
    """Return {site: in x out before compression}, from the configuration: a layer may have lost heads or neurons."""
    return {name: layer.weight.numel() for name, layer in dense_layers(net).items()}


def dense_layers(net: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return {site: the Linear before compression}, without values."""
    dense = _dense(net)
    return {site.name: dense.get_submodule(site.name) for site in find_sites(dense)}  # type: ignore[misc]


def dense_sites(net: PreTrainedModel) -> list[Site]:
    """Return the sites that ``net`` had before sub-layers were taken out."""
    return find_sites(_dense(net))


def _dense(net: PreTrainedModel) -> PreTrainedModel:
    with torch.device("meta"):
        return type(net)(net.config)  # type: ignore[call-arg]


def count_params(net: PreTrainedModel) -> Params:
    """Count stored parameters; a shared one counts once, a stored zero counts like any other."""
    sites, total = sum(w.numel() for w in counted_weights(net)), sum(p.numel() for p in net.parameters())
    return Params(sites, total - sum(p.numel() for p in embedding_params(net)), total)


def density(net: PreTrainedModel) -> float:
    """Return remaining / original parameters of the sites; zeros in a weight do not remain."""
    return sum(int(torch.count_nonzero(p)) for p in counted_weights(net)) / dense_site_params(net)


def stored_density(net: PreTrainedModel) -> float:
    """Return stored / original parameters of the sites, without looking at the values."""
    return count_params(net).sites / dense_site_params(net)


def flops(net: PreTrainedModel, length: int, batch: int = 1) -> int:
    """Return the floating-point operations of one forward (2 per multiply-add) on ``batch`` x ``length`` tokens.

    A net that writes text after it has read one is given a quarter as many tokens of that, all at once.
    """
    from torch.utils.flop_counter import FlopCounterMode

    was, attention = net.training, net.config._attn_implementation
    net.eval()
    net.set_attn_implementation("eager")  # the counter knows every plain matmul, not every fused kernel
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net(**random_inputs(net, batch, length))
    finally:
        net.set_attn_implementation(attention)
        net.train(was)
    return int(counter.get_total_flops())


def random_inputs(net: PreTrainedModel, batch: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return texts [batch, length] of random tokens as ``net`` takes them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, net.config.vocab_size, (batch, length), generator=generator).to(net.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if net.config.is_encoder_decoder:
        ids[:, -1] = net.config.eos_token_id  # a class is read from there
        if net.can_generate():
            inputs["decoder_input_ids"] = ids[:, : max(1, length // 4)]
    return inputs


def latency(
    nets: Sequence[PreTrainedModel], length: int, batch: int = 1, threads: int = 1, repeats: int = 30
) -> list[dict[str, Any]]:
    """Time one forward of each net, interleaved, in milliseconds.

    Interleaving makes the machine's drift hit all nets alike; threads are pinned because more of them than
    free cores gives noise, not numbers.

    Returns:
        For each net: median, p10, p90, batch, length, threads.
    """
    pinned = torch.get_num_threads()
    torch.set_num_threads(threads)
    times: list[list[float]] = [[] for _ in nets]
    try:
        with torch.inference_mode():
            for repeat in range(repeats + 5):
                for net, record in zip(nets, times, strict=True):
                    inputs = random_inputs(net, batch, length)
                    start = time.perf_counter()
                    net(**inputs)
                    if net.device.type == "cuda":
                        torch.cuda.synchronize()
                    if repeat >= 5:  # the first rounds warm caches up
                        record.append(1000 * (time.perf_counter() - start))
    finally:
        torch.set_num_threads(pinned)
    shared = {"batch": batch, "length": length, "threads": threads}
    return [{"median": median(t), "p10": quantiles(t, n=10)[0], "p90": quantiles(t, n=10)[-1], **shared} for t in times]


def measure(net: PreTrainedModel, length: int) -> dict[str, Any]:
    """Return density, parameters and FLOPs of ``net`` as the report stores them."""
    return {"density": density(net), "params": asdict(count_params(net)), "flops": flops(net, length)}
