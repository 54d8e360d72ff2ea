"""What LoSparse, ITP and the unstructured scores cost while training, and what compact layers gain afterwards.

    python -m benchmarks.pruning.speed [--rounds 7] [--only machinery layers net limit] [--shapes bert-base]

machinery: scores, selection and zeroing of one optimizer step (the mean of an interval of 10, in the ramp and at the
final density), as a share of a dense fine-tuning step at 32 x 128 tokens; bytes of the state they keep.
layers: every site's forward at 32 x 128 tokens, factors and rows beside the dense matrix; `limit` does the same for
single shapes up to density 0.9 and says where they stop being faster. net: the whole forward. Factors get 0.05, rows
are those that a random score keeps. Random weights; BERT-base has 2 of its 12 equal blocks.

Everything takes turns in one process on one thread and is measured in processor time (the machine has other users); a
ratio is of the medians, its range that of the rounds. Writes benchmarks/pruning/results/speed/*.json.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks import common
from benchmarks.speed.run import step_of
from benchmarks.timing import BATCH, BERT_BASE, LENGTH, MINILM, make_folder, random_batch, store
from lit_compress.export.fuse import fuse
from lit_compress.layers import LowRankSparseLinear
from lit_compress.methods.base import Method
from lit_compress.methods.baselines import FirstOrder, Magnitude
from lit_compress.methods.itp import ITP
from lit_compress.methods.losparse import LoSparse
from lit_compress.methods.platon import PLATON
from lit_compress.models.accounting import dense_site_params, stored_density
from lit_compress.models.sites import find_sites, size_at
from lit_compress.models.storage import load_net
from lit_compress.models.surgery import factorize
from lit_compress.numerics.masks import select_rows
from lit_compress.numerics.ranks import rank_for_density
from lit_compress.utils.timing import in_turns

DENSITIES, LOW_RANK = (0.1, 0.2, 0.3), 0.05
GOALS = {"machinery": 0.05, "ideal": 0.85, "floats per neuron": 1, "bytes per weight": 4}
BLOCKS = {MINILM: 6, BERT_BASE: 2}
SHAPES, SHARES = ((384, 384), (1536, 384), (384, 1536), (768, 768), (3072, 768)), (0.6, 0.7, 0.8, 0.9)  # of the limit


def take_turns(variants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of every variant in every round; one more round before warms up."""
    with torch.inference_mode():
        times = in_turns(list(variants.values()), rounds, warm_up=1, clock=time.process_time)
    return {name: [ms / 1000 for ms in record] for name, record in zip(variants, times, strict=True)}


def over(above: list[float], below: list[float]) -> dict[str, float]:
    """Return above / below: of the medians, and the range over rounds."""
    found = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": median(above) / median(below), "min": min(found), "max": max(found)}


def machinery(shape: str, rounds: int) -> dict[str, Any]:
    """Time what the pruning stages do around an optimizer step, and count what they remember."""
    with tempfile.TemporaryDirectory() as work:
        make_folder(shape, Path(work))
        dense = step_of("dense", Path(work), "32", "cpu")
        variants: dict[str, Callable[[], Any]] = {}
        state: dict[str, dict[str, float]] = {}
        kinds: list[type[Method]] = [LoSparse, ITP, Magnitude, FirstOrder, PLATON]
        for kind in kinds:
            method = kind(backbone="unused", density=0.2)
            stage = method.stages()[-1]
            method.prepare(stage, 0, Path(work), None)
            method.configure_model()
            stage.set_total_steps(1000)
            for parameter in method.net.parameters():
                parameter.grad = 1e-3 * torch.randn_like(parameter)
            size = sum(buffer.nbytes for buffer in stage.buffers())
            weights = [m.sparse if hasattr(m, "sparse") else m.weight for m in _sites(method.net)]
            state[kind.__name__] = {
                "bytes": size,
                "floats per neuron": size / 4 / sum(len(w) for w in weights),
                "bytes per weight": size / sum(w.numel() for w in weights),
            }
            for phase, at in (("ramp", 401), ("final", 901)):
                variants[f"{kind.__name__} {phase}"] = _interval(stage, method.net, at)
        seconds: dict[str, list[float]] = {name: [] for name in ("dense", *variants)}
        for round_ in range(rounds + 1):
            for name in seconds:
                start = time.process_time()
                if name == "dense":
                    dense()
                else:
                    variants[name]()
                if round_:
                    seconds[name].append((time.process_time() - start) / (1 if name == "dense" else 10))
    return {"seconds": seconds, "ratio": {v: over(seconds[v], seconds["dense"]) for v in variants}, "state": state}


def _interval(stage: Any, net: nn.Module, at: int) -> Callable[[], None]:
    def run() -> None:
        for step in range(at, at + 10):
            stage.before_step(net)
            stage.after_step(net, step)

    return run


def _sites(net: Any) -> list[Any]:
    return [net.get_submodule(site.name) for site in find_sites(net)]


def pruned(dense: Any, density: float) -> Any:
    """Return ``dense`` as LoSparse leaves it: factors, and the rows of S that a random score keeps."""
    import copy

    net = copy.deepcopy(dense)
    ranks = {s.name: rank_for_density(LOW_RANK, *net.get_submodule(s.name).weight.shape) for s in find_sites(net)}
    factorize(net, ranks, None, LowRankSparseLinear)
    sparse = [layer.sparse for layer in _sites(net)]
    factors = sum(layer.rank * (layer.in_features + layer.out_features) for layer in _sites(net))
    generator = torch.Generator().manual_seed(0)
    scores = [torch.rand(len(w), generator=generator) for w in sparse]
    keep = select_rows(scores, [w.shape[1] for w in sparse], round(density * dense_site_params(dense)) - factors)
    with torch.no_grad():
        for weight, rows in zip(sparse, keep, strict=True):
            weight.masked_fill_(~rows[:, None], 0.0)
    return fuse(net)


def gain(shape: str, rounds: int, whole: bool) -> dict[str, Any]:
    """Time compact sites, or whole nets, at every density against the dense ones."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as work:
        make_folder(shape, Path(work), num_hidden_layers=BLOCKS[shape])
        dense = load_net(Path(work))
    nets = {"dense": dense, **{f"{density}": pruned(dense, density) for density in DENSITIES}}
    if whole:
        batch = random_batch(dense, "cpu")
        del batch["labels"]
        seconds = take_turns({name: partial(net, **batch) for name, net in nets.items()}, rounds)
    else:  # site after site, so that one site's variants are neighbours in time
        seconds = {name: [0.0] * rounds for name in nets}
        for site in find_sites(dense):
            x = torch.randn(BATCH, LENGTH, size_at(dense, site.name)[1])
            times = take_turns({name: partial(net.get_submodule(site.name), x) for name, net in nets.items()}, rounds)
            seconds = {name: [a + b for a, b in zip(seconds[name], times[name], strict=True)] for name in nets}
    densities = {name: stored_density(net) for name, net in nets.items() if name != "dense"}
    speedup = {name: over(seconds["dense"], seconds[name]) for name in densities}
    share = {name: speedup[name]["median"] * densities[name] for name in densities}
    return {"seconds": seconds, "density": densities, "ratio": speedup, "share of ideal": share}


def limit(rounds: int) -> dict[str, Any]:
    """Time single layers that keep most of their parameters, with and without factors, against the dense matrix."""
    ratio: dict[str, dict[str, float]] = {}
    for out, inner in SHAPES:
        linear, x = nn.Linear(inner, out), torch.randn(BATCH, LENGTH, inner)
        variants: dict[str, Callable[[], Any]] = {"dense": partial(linear, x)}
        for rank in (0, rank_for_density(LOW_RANK, out, inner)):
            for share in SHARES:
                layer = LowRankSparseLinear.from_factors(linear, torch.randn(out, rank), torch.randn(rank, inner))
                layer.sparse = nn.Parameter(layer.sparse.detach().clone())  # rank 0 shares the dense weight
                rows = round((share * out * inner - rank * (out + inner)) / inner)
                with torch.no_grad():
                    layer.sparse[torch.randperm(out)[rows:]] = 0
                small = layer.fuse()
                variants[f"{out} x {inner}, rank {rank}, {share}"] = partial(small, x)
        seconds = take_turns(variants, rounds)
        ratio |= {name: over(times, seconds["dense"]) for name, times in seconds.items() if name != "dense"}
    return {"ratio": ratio}


def main() -> None:
    """Measure what was asked for and store it."""
    parts = ("machinery", "layers", "net", "limit")
    options = common.parser("pruning/speed", __doc__, rounds=7, only=parts, shapes=tuple(BLOCKS)).parse_args()
    torch.set_num_threads(options.threads)
    setting = {"threads": options.threads, "rounds": options.rounds, "batch": BATCH, "length": LENGTH,
               "low_rank": LOW_RANK, "clock": "processor"}  # fmt: skip

    def keep(name: str, value: dict[str, Any]) -> None:
        store(options, name, value, goals=GOALS, setting=setting)

    if "machinery" in options.only:
        keep(f"machinery-{MINILM}", machinery(MINILM, options.rounds))
    if "limit" in options.only:
        keep("limit", limit(options.rounds))
    for shape in options.shapes:
        for kind in ("layers", "net"):
            if kind in options.only:
                keep(f"{kind}-{shape}", gain(shape, options.rounds, kind == "net"))


if __name__ == "__main__":
    main()
