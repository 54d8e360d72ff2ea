"""Write a finished run as a folder that loads where this package is not installed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.budget import density
from lit_compress.condense import round_widths
from lit_compress.errors import UserError
from lit_compress.evaluation import evaluate
from lit_compress.export.card import card
from lit_compress.export.check import check_export
from lit_compress.export.fuse import MERGE, compact, fuse, merged
from lit_compress.export.modelling import MODULE, write_model
from lit_compress.export.program import Format, check_format, write_program
from lit_compress.export.report import Measured, build_report
from lit_compress.families import find_sites
from lit_compress.progress import track
from lit_compress.runs import Run, write_json
from lit_compress.surgery import atomic_folder, load_net

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.methods import Method


def export_run(
    run: Run, out: Path, method: Method, data: DataModule, form: Format = "hf", round_to: int | None = None
) -> dict[str, Any]:
    """Export the last stage's net of ``run`` to ``out`` and return the report, which stands there too.

    The folder appears only when its logits, reloaded in another process, are those of the run's net.

    Args:
        run: a finished run.
        out: folder to write; an earlier export there is replaced.
        method: whose stages they are.
        data: for the dev metric of the exported net.
        form, round_to: as :func:`write_export`.

    Raises:
        UserError: a stage is not finished; ``out`` holds something else; a check fails.
    """
    done, stages = (
        run.finished(),
        ["dense", *(stage.name for stage in method.stages() if stage.name != "dense")],
    )
    missing = [name for name in stages if name not in done]
    if missing:
        raise UserError(
            f"export: stage {missing[0]} of '{run.folder}' is not finished; continue it with fit --ckpt_path last"
        )
    key = f"val/{data.record.metrics[0]}"
    *before, last = [
        Measured(load_net(run.net(name)), run.net(name), done[name]["metric"][key], done[name]["initial"].get(key))
        for name in stages
    ]
    nets = dict(zip(stages, before, strict=False))
    return write_export(out, last.net, nets, type(method).__name__, data, run.config(), last.initial, form, round_to)


def write_export(
    out: Path,
    net: PreTrainedModel,
    before: dict[str, Measured],
    method: str,
    data: DataModule,
    config: dict[str, Any],
    initial: float | None = None,
    form: Format = "hf",
    round_to: int | None = None,
) -> dict[str, Any]:
    """Write ``net``, fused, as a folder that loads by itself; return the report, which stands there too.

    Args:
        out: folder to write; an earlier export there is replaced.
        net: what is exported.
        before: stage -> net it was made from; the first is dense.
        method: name of the method.
        data: for the dev metric of the exported net.
        config: of the run.
        initial: dev metric of the net before it was retrained, if it was.
        form: ``onnx`` and ``torch`` also write the net as one program (program.py).
        round_to: multiple that narrow hidden states and feed-forward networks are filled up to, with zeros.

    Raises:
        UserError: ``out`` holds something else; a check fails; packages of ``form`` are missing;
            nothing is there to round.
    """
    check_format(form)
    if out.exists() and any(out.iterdir()) and not (out / "structure.json").is_file():
        raise UserError(f"export: '{out}' holds something that is not an export; give an empty or new folder")
    task = replace(data.record, length=min(data.record.length, data.max_length))  # nothing longer is ever read
    with atomic_folder(out) as temporary:
        small = compact(net)
        kept, dense = density(small), merged(small)
        net = fuse(small)
        write_model(net if round_to is None else round_widths(copy.deepcopy(net), round_to), temporary)
        data.tokenizer.save_pretrained(temporary)
        for _ in track([0], "check the export in another process"):
            difference = check_export(net, temporary)
        exported = load_net(temporary)
        metric = evaluate(exported, data)[f"val/{task.metrics[0]}"]
        nets = {**before, "compressed": Measured(exported, temporary, metric, initial, kept)}
        report = build_report(task, method, nets, config)
        report["export_difference"] = difference
        report["round_to"] = round_to
        report["ordinary"] = not (temporary / f"{MODULE}.py").exists()
        report["merged"] = {"above": MERGE, "sites": len(find_sites(net)), "matrices": dense}
        if form != "hf":
            for _ in track([0], f"write and check {form}"):
                report["program"] = write_program(exported, data.tokenizer, temporary, form)
        write_json(temporary / "report.json", report)
        (temporary / "README.md").write_text(card(report, task))
    return report
