"""Where the time of an export of SP3 goes, next to CoFi's at the same number of weights.

    python -m benchmarks.sp3.where [--rounds 20]

MiniLM-L6-H384 with random weights and the widths of SP3's model of SST-2 at 6 %, and a model of CoFi's form with as
many weights and hidden dimensions as CoFi's model of the same cell. `with room` is the form of earlier exports, in
which zeros make room for the next hidden state. The models take turns; the clock is the processor time of the process.
Writes benchmarks/sp3/results/where/*.json.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import torch

from benchmarks import common, timing
from lit_compress.models.accounting import count_params, flops, random_inputs
from lit_compress.utils.timing import in_turns, pinned, speedup, summary

WIDTHS = "sst2-pca-0.06-1"  # the result with the widths of every layer
SHAPES = ((1, 25), (32, 128))
HIDDEN, HEADS, NEURONS = 312, (4, 0, 3, 3, 0, 0), (0, 160, 0, 0, 100, 120)  # of CoFi's form


def sp3_nets() -> dict[str, Any]:
    """Return the model with the widths of :data:`WIDTHS`, with room for the next hidden states and as exported."""
    from lit_compress.export.fuse import fuse
    from lit_compress.models.projected.gates import GATES, GateSlots, gate_shapes
    from lit_compress.models.projected.projections import fold_projections, identity_bases, insert_projections

    table = json.loads((common.results("sp3") / f"{WIDTHS}.json").read_text())["widths"]
    net = timing.random_bert(timing.MINILM).eval()
    insert_projections(net, identity_bases(net), GATES)
    hidden = [0.75, *(row[f"hidden_{part}"] for row in table for part in ("attention", "ffn"))]
    fractions = {
        "hidden": hidden, "qk": [r["qk"] for r in table], "vo": [r["vo"] for r in table],
        "heads": [r["heads"] for r in table], "neurons": [r["ffn"] for r in table],
        "attention_layer": [float(r["heads"] > 0) for r in table], "ffn_layer": [float(r["ffn"] > 0) for r in table],
    }  # fmt: skip
    z = {
        name: torch.stack([(torch.arange(units) < round(f * units)).float() for f in fractions[name]])
        for name, (_, units) in gate_shapes(net, GATES).items()
    }
    copies = net.config.num_attention_heads
    GateSlots(net, GATES).set({n: v.repeat(1, copies if n in ("qk", "vo") else 1) for n, v in z.items()})
    folded = fold_projections(net).eval()
    return {"SP3 with room": folded, "SP3": fuse(folded)}


def cofi_net() -> Any:
    """Return a model of CoFi's form."""
    from lit_compress.methods.cofi.gates import gated_size, possible_gates
    from lit_compress.models.cut import close_empty_sublayers, cut_closed

    net = timing.random_bert(timing.MINILM).eval()
    left = {"hidden": (HIDDEN,), "heads": HEADS, "neurons": NEURONS}
    z = {
        name: torch.stack([(torch.arange(units) < n).float() for n in left[name]])
        if name in left
        else torch.ones(groups, units)
        for name, (groups, units) in gated_size(net, possible_gates(net)).shapes.items()
    }
    cut_closed(net, close_empty_sublayers(z))
    return net.eval()


def measure(batch: int, length: int, rounds: int) -> dict[str, Any]:
    """Time all models at one shape."""
    nets = {"dense": timing.random_bert(timing.MINILM).eval(), **sp3_nets(), "CoFi": cofi_net()}
    runs = {name: partial(net, **random_inputs(net, batch, length)) for name, net in nets.items()}
    with pinned(1):
        times = in_turns(list(runs.values()), rounds, warm_up=2, clock=time.process_time)
        kinds = {name: timing.shares(run, min(rounds, 12)) for name, run in runs.items() if name != "dense"}
    found: dict[str, Any] = {}
    for (name, net), record in zip(nets.items(), times, strict=True):
        residual = sum(w.numel() for m in net.modules() if hasattr(m, "counted_weights") for w in m.counted_weights())
        found[name] = {
            "milliseconds": summary(record), "faster": vars(speedup(times[0], record)),
            "flops": flops(net, length, batch), "weights": count_params(net).sites, "residual_weights": residual,
            "kinds": kinds.get(name),
        }  # fmt: skip
    return {"nets": found, "batch": batch, "length": length, "rounds": rounds}


def main() -> None:
    """Measure what is missing."""
    options = common.parser("sp3/where", __doc__, rounds=20).parse_args()
    torch.set_num_threads(options.threads)
    for batch, length in SHAPES:
        name = f"{batch}x{length}"
        if not (options.results / f"{name}.json").exists():
            rounds = options.rounds if batch > 1 else 5 * options.rounds
            timing.store(options, name, measure(batch, length, rounds), threads=options.threads)


if __name__ == "__main__":
    main()
