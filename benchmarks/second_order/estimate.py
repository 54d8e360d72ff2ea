"""The estimated loss of a compression under the Kronecker-factored Fisher information."""

from __future__ import annotations

from typing import Any


def estimated_loss(net: Any, compression: Any, measured: Any) -> float:
    """Return the estimated addition to an example's loss: half of the costs of all that goes.

    Args:
        net: the dense model.
        compression: to ranks, or of heads and neurons.
        measured: its measurements of all matrices.
    """
    from lit_compress.stages.units import UnitRemoval

    plan = compression.plan(net, measured)
    if isinstance(compression, UnitRemoval):
        units = compression.units(net, measured)
        losses = [units[name].path.loss((~kept).sum()[None]) for name, kept in plan.items() if not kept.all()]
    else:
        left_out = {
            name: measured[f"{name}.sigma"][rank:] for name, rank in plan.items() if f"{name}.sigma" in measured
        }
        losses = [sigma.square().sum() for sigma in left_out.values()]
    return sum(map(float, losses)) / 2
