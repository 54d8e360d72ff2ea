"""How much of the FLOPs that low rank saves becomes time: blocks of BERT-base as factors, in every runtime.

    python -m benchmarks.speed.low_rank [--rounds 7] [--threads 1]

Random weights, two blocks, 32 texts of 128 tokens. PyTorch, compiled or not, ONNX Runtime, and OpenVINO if it is
installed: all models in all runtimes take turns within a round; the clock is the processor time of the process, so that
other processes count for little. Writes benchmarks/speed/results/low_rank/*.json.
"""

from __future__ import annotations

import copy
import tempfile
import time
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, timing
from lit_compress.export.bench import BenchedNet, Settings
from lit_compress.export.fuse import fuse
from lit_compress.export.modelling import write_model
from lit_compress.export.runtimes import RUNTIMES, placed
from lit_compress.models.accounting import flops, random_inputs, stored_density
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import factorize
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.timing import in_turns, pinned, speedup, summary

SCRIPT = "speed/low_rank"
DENSITIES = (0.16, 0.25, 0.5)
# a right factor for every matrix; one for query, key and value; ranks that are multiples of 16, too
FORMS: dict[str, dict[str, Any]] = {
    "factors": {}, "stacked": {"stacked": True}, "stacked, round_to 16": {"stacked": True, "round_to": 16},
}  # fmt: skip
RUN_IN = ("eager", "compiled", "onnx", "openvino")
LAYERS, VOCABULARY = 2, 1000


def low_rank(net: Any, rule: RankRule) -> Any:
    """Return a copy of ``net`` with random factors of the rule's ranks, as it is exported."""
    small = copy.deepcopy(net)

    def factors(name: str, weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale = weight.std() / rank**0.5  # outputs as large as those of the matrix
        return scale**0.5 * torch.randn(len(weight), rank), scale**0.5 * torch.randn(rank, weight.shape[1])

    return fuse(factorize(small, rule.allocate(small), factors, stacks=rule.stacks(small)))


def measure(rounds: int, threads: int) -> dict[str, Any]:
    """Time all models in all runtimes, in turns."""
    dense = timing.random_bert(num_hidden_layers=LAYERS, vocab_size=VOCABULARY).eval()
    nets = {"dense": dense}
    nets |= {
        f"{form} {density}": low_rank(dense, RankRule(density, **rule))
        for form, rule in FORMS.items()
        for density in DENSITIES
    }
    settings, runs = Settings(threads=threads), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, net in nets.items():
            place = Path(folder) / name
            place.mkdir()
            write_model(net, place)
            source = BenchedNet("net", place, settings, place)
            inputs = placed(source.inputs(timing.BATCH, timing.LENGTH), "cpu")
            for runtime in (name for name in RUN_IN if all(map(find_spec, RUNTIMES[name].packages))):
                loaded = source.load(RUNTIMES[runtime])
                runs[name, runtime] = partial(loaded, inputs)
        with pinned(threads):
            times = dict(
                zip(runs, in_turns(list(runs.values()), rounds, warm_up=1, clock=time.process_time), strict=True)
            )
    whole, rows = flops(dense, timing.LENGTH, timing.BATCH), []
    for (name, runtime), record in times.items():
        gain = asdict(speedup(times["dense", runtime], record))
        rows.append({
            "net": name, "runtime": runtime, "density": stored_density(nets[name]), "milliseconds": summary(record),
            "flop_ratio": whole / flops(nets[name], timing.LENGTH, timing.BATCH), "over_dense": gain,
        })  # fmt: skip
    return {"times": rows, "batch": timing.BATCH, "length": timing.LENGTH, "layers": LAYERS, "rounds": rounds}


def rest(rounds: int, threads: int) -> dict[str, Any]:
    """Time in PyTorch what low rank does not touch: the dense model without its matrices."""
    dense = timing.random_bert(num_hidden_layers=LAYERS, vocab_size=VOCABULARY).eval()
    bare = copy.deepcopy(dense)
    for site in find_sites(dense):  # zeros without a product; everything else stays
        layer = bare.get_submodule(site.name)
        layer.forward = lambda x, width=layer.out_features: x.new_zeros(*x.shape[:-1], width)
    runs = [partial(net, **random_inputs(net, timing.BATCH, timing.LENGTH)) for net in (dense, bare)]
    with pinned(threads):
        whole, left = in_turns(runs, rounds, warm_up=1, clock=time.process_time)
    return {"rest": timing.ratio(left, whole), "milliseconds": {"dense": summary(whole), "rest": summary(left)}}


def main() -> None:
    """Measure what is missing."""
    options = common.parser(SCRIPT, __doc__, rounds=7).parse_args()
    torch.set_num_threads(options.threads)
    settings = (options.rounds, options.threads)
    parts = {timing.BERT_BASE: lambda: measure(*settings), "rest": lambda: rest(*settings)}
    for name, part in parts.items():
        if not (options.results / f"{name}.json").exists():
            timing.store(options, name, part(), threads=options.threads)


if __name__ == "__main__":
    main()
