"""Whole blocks that are removed in rounds, each followed by a refinement: the row ``rounds`` of run.py.

The best removal of a refined model is another than that of the dense one. So a third of the blocks that are to go is
chosen by measured divergence, on the texts that choose whole blocks otherwise; the rest is refined; and the next third
is chosen among the refined blocks. In every refinement a block learns what the dense model has behind the last block
that it replaces, for a third of the steps of a single refinement.
"""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoder.texts import JUDGES
from lit_compress.calibration.walk import calibration_parts
from lit_compress.models.shorten import shorten, stack_lengths
from lit_compress.stages.blocks import BlockLosses
from lit_compress.stages.compression import CALIBRATION_SEED
from lit_compress.stages.refinement import refine_net

ROUNDS = 3


def in_rounds(dense: Any, data: Any, texts: Any, kind: Any, density: float, steps: int) -> tuple[Any, dict[str, Any]]:
    """Return the model whose blocks were removed in rounds, and facts about it.

    Args:
        dense: the decoder.
        data: gives the texts that choose.
        texts: batches of the texts that refine.
        kind: the type of the task.
        density: share of the blocks that is left.
        steps: of every block, in all rounds together.
    """
    start, net, told = time.process_time(), copy.deepcopy(dense), list[dict[str, Any]]()
    ((path, (_, total)),) = stack_lengths(net).items()
    rows, kept = calibration_parts(kind, texts, None), list(range(total))
    for turn in range(1, ROUNDS + 1):
        count = total - round((total - int(density * total + 0.005)) * turn / ROUNDS)
        judges = data.calibration_dataloader(JUDGES, CALIBRATION_SEED, "prune.examples")
        chosen = BlockLosses({path: count}).answer(net, judges, kind, None)[path]
        shorten(net, {path: chosen})
        kept = [kept[number] for number in chosen]
        with tempfile.TemporaryDirectory() as states:
            behind, device = [*kept[1:], total], torch.device("cpu")
            refined = refine_net(dense, net, kind, rows, steps // ROUNDS, Path(states), device, behind)
        told.append({"kept": kept, **refined})
        print(f"round {turn}: {count} blocks, {kept}", flush=True)
    seconds = time.process_time() - start  # of the choices as well
    facts = {"file_density": len(kept) / total, "seconds": 0.0, "refine_seconds": seconds}
    return net, {"rounds": told, "refined": told[-1], **facts}
