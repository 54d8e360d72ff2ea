"""The model card of an export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache

from lit_compress.export.modelling import REFUSAL
from lit_compress.export.report import of_program
from lit_compress.export.table import choice_lines, counted, markdown, speed_line
from lit_compress.models.backbones import resolve
from lit_compress.models.files import net_bytes, stored_dtype
from lit_compress.models.own_code import read_settings
from lit_compress.models.sites import Model
from lit_compress.models.surgery import describe
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import card_fields, write_json
from lit_compress.utils.hub import can_be_a_repository
from lit_compress.utils.manifest import write_manifest
from lit_compress.utils.tables import as_code, escaped

LEAST = "5.0"  # version of transformers that loads an export: earlier ones read other tokenizers, and wider attentions
HERE = "."  # as the code of a card calls its folder
TEMPLATE = Path(__file__).with_name("card.md.jinja")


def model_name(backbone: str) -> str:
    """Return how others know a backbone: its name on the hub, else the name of its folder or run."""
    folder = Path(backbone).expanduser()
    if not folder.is_dir():
        return backbone.partition("@")[0]
    given = str(read_settings(folder / "config.json").get("_name_or_path") or "")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        return given
    folder = folder.resolve()
    return folder.parent.parent.name if folder.name == "net" else folder.name


def license_of(backbone: str) -> str:
    """Return the licence that the card of a backbone names, in its folder or the hub's cache; else ``unknown``."""
    name, _, revision = backbone.partition("@")
    folder = Path(backbone).expanduser()
    try:
        cached = None if folder.is_dir() else try_to_load_from_cache(name, "README.md", revision=revision or None)
        path = cached if isinstance(cached, str) else folder / "README.md"
        return str(card_fields(Path(path)).get("license") or "unknown")
    except (OSError, ValueError, UserError):
        return "unknown"


def origin_of(backbone: str, teacher: str | None) -> dict[str, Any]:
    """Return the ``license`` of a backbone, and the ``dtype`` of its files, or a teacher's with their ``bytes``."""
    given, record = teacher or backbone, {"license": license_of(backbone)}
    folder = Path(resolve(given))
    return record | {"dtype": stored_dtype(folder)} | ({"bytes": net_bytes(folder)} if teacher else {})


def card(report: dict[str, Any], task: Task, factors: bool) -> str:
    """Return the text of the README.md of an export; ``factors``: matrices were replaced by factors."""
    report = of_program(report)
    model, kind, hub = report["config"]["model"]["init_args"], task_type(task), task.hub or (task.name, None)
    name, (given, _, revision) = model_name(model["backbone"]), model["backbone"].partition("@")
    commit = revision if name == given else None
    result = EvalResult(
        task_type=kind.pipeline, dataset_type=hub[0], dataset_name=task.name, dataset_config=hub[1],
        dataset_split=task.validation[0], metric_type=report["metric"]["name"],
        metric_value=report["compressed"]["metric"], metric_args={"n": report["metric"]["rows"]},
    )  # fmt: skip
    data = ModelCardData(
        model_name=f"{name.rpartition('/')[2]}-{task.name}-{report['method'].lower()}",
        base_model=name if can_be_a_repository(name) else None,
        license=report.get("license", "unknown"), datasets=[hub[0]] if task.hub else None, library_name=kind.library,
        pipeline_tag=kind.pipeline, tags=["lit_compress", report["method"], "compressed"], eval_results=[result],
    )  # fmt: skip
    made = ModelCard.from_template(
        data, str(TEMPLATE), report=report, task=task, kind=kind, name=name, commit=commit, factors=factors,
        here=HERE, least=LEAST, refusal=REFUSAL, rows=counted(report), table=markdown(report), speed=speed_line(report),
        chosen=choice_lines(report), plain=escaped, code=as_code,
    )  # fmt: skip
    return f"{made}\n"


def write_report_and_card(folder: Path, report: dict[str, Any], task: Task, net: Model) -> None:
    """Write ``report.json``, ``README.md`` and, as the last file, ``manifest.json`` into the folder of an export."""
    report["manifest"] = True
    write_json(folder / "report.json", report)
    factors = any(spec.get("rank") for spec in describe(net).values())
    (folder / "README.md").write_text(card(report, task, factors))
    write_manifest(folder)
