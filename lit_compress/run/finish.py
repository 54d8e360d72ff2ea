"""The end of the work: its export."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lit_compress.data.datamodule import DataModule
from lit_compress.data.sources import divided
from lit_compress.export.card import license_of
from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.folder import Export, write_export
from lit_compress.export.report import Measured
from lit_compress.models.backbones import resolve
from lit_compress.models.budget import parse_budget
from lit_compress.models.files import net_bytes
from lit_compress.models.outline import file_bytes
from lit_compress.models.sites import Model
from lit_compress.run.folder import Run
from lit_compress.run.job import Job


def one_shot(
    job: Job, net: Model, dense: Model, scores: Mapping[str, float], config: dict[str, Any], more: dict[str, Any]
) -> Export:
    """Return the export of ``net``, made of ``dense`` without training; ``more`` are fields of the report."""
    method, data = job.method, job.data
    size = net_bytes(Path(resolve(method.backbone)))
    before = {"dense": Measured.by(scores, dense, size, data.record)}
    budget = (method.budget, method.density) if method.budget else None
    facts = {"divided": divided(data.record, data.place), "dev": data.dev_contents()}
    more = more | {"license": license_of(method.backbone), "data": facts}
    return Export(net, before, type(method).__name__, data, config, None, more, budget)


def export_run(run: Run, out: Path, data: DataModule, choices: Choices = AS_IS) -> dict[str, Any]:
    """Export the model of the last stage of ``run`` to ``out``, as :func:`write_export`; return the report.

    Raises:
        UserError: ``out`` has other files; a check fails.
    """
    done, config = run.finished(), run.config()
    stages, method = list(done), config["model"]
    key = f"val/{data.record.metrics[0]}"
    dtype = getattr(torch, done["dense"].get("dtype", "float32"))  # of the teacher's own files

    def measured(name: str) -> Measured:
        net, entry = run.dense if name == "dense" else run.load(run.net(name)), done[name]
        size = entry.get("bytes") or file_bytes(copy.deepcopy(net).to(dtype))  # of a teacher that was given
        return Measured(net, size, entry["metric"][key], entry["initial"].get(key))

    *before, last = map(measured, stages)
    nets = dict(zip(stages, before, strict=False))
    known = {"calibration": done[stages[-1]].get("calibration"), "data": run.facts()}
    known |= {"license": done["dense"].get("license")}
    more = {name: value for name, value in known.items() if value}
    asked = parse_budget(method["init_args"].get("budget"))
    budget = (asked, run.density(asked.asked) or 1.0) if asked else None
    name = method["class_path"].rpartition(".")[2]
    source = Export(last.net, nets, name, data, config, last.initial, more, budget)
    return write_export(out, source, choices)
