"""The tables of `pruning_speed.py`."""

from __future__ import annotations

from typing import Any

from common import load, origin, percent, spread, table

MACHINERY = """## Pruning while training: scores, selection, zeroing

Mean of an interval of 10 optimizer steps / one dense fine-tuning step of MiniLM-L6-H384 (32 x 128 tokens), in %; goal:
at most {goal}. `final`: at the final density, where LoSparse and ITP select after every step. One thread.
"""

GAIN = """## Compact LoSparse layers: factors and kept rows against the dense matrix

One thread, 32 x 128 tokens, processor time, factors of 0.05, random rows. Share of ideal: speed-up x density, in %
(goal {goal}). `layers`: all matrices of the blocks; `net`: the whole forward, where attention, GELU and LayerNorm stay
as they are. BERT-base with 2 of its blocks.
"""

LIMIT = """A single layer / its dense matrix, by the share of its parameters that it stores (above 0.7 it is merged):
"""


def machinery(result: dict[str, Any]) -> list[str]:
    """Show each method's share of a step, and its state."""
    rows = []
    for method, state in result["state"].items():
        cells = [result["ratio"][f"{method} {phase}"] for phase in ("ramp", "final")]
        shown = [f"{percent(c['median'])} ({percent(c['min'])} - {percent(c['max'])})" for c in cells]
        by_row = state["floats per neuron"] < 10
        size = (
            f"{state['floats per neuron']:.2f} floats per neuron"
            if by_row
            else f"{state['bytes per weight']:.1f} bytes per weight"
        )
        rows.append([method, *shown, size])
    goal = percent(result["goals"]["machinery"])
    return [MACHINERY.format(goal=f"{goal} %"), table(["method", "ramp", "final", "state"], rows)]


def gain(results: list[dict[str, Any]]) -> list[str]:
    """Show speed-ups by density."""
    densities = list(results[0]["ratio"])
    header = ["", *(word for d in densities for word in (f"{d}: speed-up", "share of ideal"))]
    rows = [
        [
            r["name"].replace("-", ", ", 1),
            *(w for d in densities for w in (spread(r["ratio"][d]), percent(r["share of ideal"][d]))),
        ]
        for r in results
    ]
    return [GAIN.format(goal=percent(results[0]["goals"]["ideal"])), table(header, rows)]


def limit(result: dict[str, Any]) -> list[str]:
    """Show how single layers that keep much compare with dense ones."""
    names = [key.rsplit(", ", 1) for key in result["ratio"]]
    shares = list(dict.fromkeys(share for _, share in names))
    rows = [
        [layer, *(spread(result["ratio"][f"{layer}, {share}"]) for share in shares)]
        for layer in dict.fromkeys(layer for layer, _ in names)
    ]
    return [LIMIT, table(["out x in", *shares], rows)]


def sections() -> list[str]:
    """Return all tables."""
    found = {r["name"]: r for r in load("pruning_speed")}
    lines = machinery(found["machinery-minilm-l6-h384"])
    lines += gain([r for name, r in found.items() if name.startswith(("layers", "net"))])
    lines += limit(found["limit"])
    return [*lines, origin(found["limit"], "pruning_speed.py", 1)]
