"""The command ``factorize``: compress a fine-tuned model without training, and export it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lit_compress.cli.by_block import check_budget, factorize_by_block
from lit_compress.cli.exporting import print_choices
from lit_compress.cli.fitting import decide, settle_budget, warn_missed
from lit_compress.cli.one_shot import factorize_model, load_model
from lit_compress.cli.options import CommandLine
from lit_compress.cli.recipes import inferred_task
from lit_compress.cli.words import Line
from lit_compress.export.folder import check_out
from lit_compress.export.table import print_table
from lit_compress.stages.distil import NO_RECOVERY, Recovery
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.tables import print


def factorize(
    model: str, out: str, *, method: str | None = None, by_block: Literal["float32"] | None = None,
    refine: int | None = None, distil: int | None = None, distil_texts: str | None = None,
    distil_rate: float | None = None, line: Line,
) -> None:  # fmt: skip
    """Factorize a fine-tuned model at once, without training, and export it.

    Args:
        model: folder or hub name of a model fine-tuned on the task.
        out: folder to write, a full export.
        method: another method that compresses in one shot: LLMPruner (heads and neurons are removed by first-order
            scores, --model.prune.examples 10), SliceGPT (hidden states keep their first principal directions), SVD, or
            one of your own, mypackage.Mine.
        by_block: for a model larger than memory: one block at a time is in memory, states between blocks are on disk in
            float32 (in OUT.by_block); the same command continues after a kill.
        refine: train every compressed block for so many steps to give the dense block's outputs, without labels, on the
            calibration texts, e.g. 100.
        distil: train the whole compressed model for so many steps to give the dense model's logits and hidden states,
            without labels, on the training texts, e.g. 100.
        distil_texts: file of texts for --distil in place of the training texts.
        distil_rate: learning rate of --distil, default 0.0001.
        line: further options.
    """
    report = run_factorize(model, out, line, Recovery(refine, distil, distil_texts, distil_rate), by_block)
    print_table(report)
    if (loss := report["calibration"]) and loss["estimated_loss"] is not None:
        estimated, measured = (f"{loss[f'{name}_loss']:.2g}" for name in ("estimated", "measured"))
        print(f"added to the loss of an example: {estimated} estimated, {measured} measured on dev rows")
    if refined := report["refined"]:
        print(f"refined: {refined['steps']} steps of every block, {refined['texts']:,} texts")
    if distilled := report.get("distilled"):
        print(f"distilled: {distilled['steps']} steps, {distilled['texts']:,} texts")
    print_choices(report)
    warn_missed(report)
    print(f"ship this folder: {out}")


def run_factorize(
    model: str, out: str, line: Line, recovery: Recovery = NO_RECOVERY,
    by_block: Literal["float32"] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Factorize a fine-tuned model, export it to ``out`` and return the report.

    Args:
        model: folder or name.
        out: folder to write.
        line: options of the model, the data and the export.
        recovery: how the compressed model is trained.
        by_block: precision of the states on disk; None: the whole model is in memory.

    Raises:
        UserError: an option, the model, the data or ``out`` cannot be used.
    """
    if line.last("trainer.precision") and recovery.distil is None:
        raise UserError("trainer.precision: factorize reads it with --distil only; leave it out")
    if inferred_task(line) is None:
        raise UserError("data.task: it is missing; name the task of the model, e.g. --data.task sst2, or --data.path")
    cli = CommandLine(replace(line, values={**line.values, "model.backbone": model}), "factorize")
    current_device()  # refuses one that is not here before anything is loaded
    place = Path(out).expanduser()
    check_out(place)
    parts = cli.ready()
    recovery = replace(recovery, precision=parts.trainer.get("precision"))
    kinds, budget = parts.method.kinds, parts.method.budget
    speed = budget is not None and budget.kind == "speedup"
    if by_block:
        check_budget(budget)
        if kinds:
            raise UserError("--by_block: retrain.removes 'auto' needs the whole model in memory; nearest: structures")
        parts = settle_budget(cli)
        work = place, parts.method, parts.data, cli.dump(), parts.storage.choices
        return factorize_by_block(*work, recovery)
    settle_budget(cli, known=not (kinds and speed))
    tried, timed = decide(cli, load_model(parts.method.backbone, parts.method)) if kinds else (None, None)
    parts = cli.build()
    work = place, parts.method, parts.data, cli.dump(), parts.storage.choices
    return factorize_model(*work, recovery, tried, timed)
