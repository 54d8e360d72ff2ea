"""Details of a run for its page, kept when the run ends, so that a page of 200 runs takes seconds.

RUN/details.json   layers: the kept size of every matrix; curves: logged values, thinned; changes: between the answers
RUN/answers.jsonl  the first rows of the dev set with the answers of the dense and the compressed model
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.analysis.pictures import site_table
from lit_compress.evaluation.answers import answers, changes
from lit_compress.models.backbones import load_tokenizer
from lit_compress.models.storage import load_net
from lit_compress.run.curves import read_curves
from lit_compress.run.folder import Run
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of
from lit_compress.utils.manifest import check_manifest

if TYPE_CHECKING:
    from lit_compress.data.datamodule import DataModule

DETAILS, ANSWERS = "details.json", "answers.jsonl"


def keep_details(run: Run, data: DataModule) -> None:
    """Write the details of a run whose export is written: answers of two models, layers, curves.

    Args:
        run: with the models of its stages, and ``export``.
        data: of the run.
    """
    export = run.folder / "export"
    dense, small, own = load_net(run.net("dense")), load_net(export), data
    if small.config.vocab_size != dense.config.vocab_size:
        own = data.read_by(load_tokenizer(str(export), data.record))
    lines = answers([(dense, data), (small, own)])
    shown = (
        {
            "texts": line["texts"],
            "given": line["given"],
            **dict(zip(("dense", "compressed"), line["answers"], strict=True)),
        }
        for line in lines
    )
    run.keep(ANSWERS, "".join(json.dumps(line) + "\n" for line in shown))
    details = {
        "layers": site_table(small, dense),
        "changes": changes(lines, data.record.kind, data.record.labels),
        "curves": read_curves(run.folder),
    }
    run.keep(DETAILS, json.dumps(details) + "\n")


def details_of(folder: Path, look: bool = True) -> dict[str, Any]:
    """Return the details of a run or an export; if none were kept, read them from its other files.

    Args:
        folder: of a run or an export.
        look: read events and the exported model where nothing was kept, a second for each.
    """
    path = folder / DETAILS
    if path.is_file():
        check_manifest(f"'{folder}'", folder, DETAILS)
        try:
            return json_of(path)
        except ValueError:
            pass  # read again
    if not look:
        return {}
    return {"layers": _layers(folder), "curves": read_curves(folder), "changes": None}


def _layers(folder: Path) -> list[dict[str, Any]]:
    """Return the kept size of every matrix of the exported model; [] if no export can be read."""
    net = folder / "export" if (folder / "export").is_dir() else folder
    if not (net / "structure.json").is_file():
        return []
    try:
        return site_table(load_net(net))
    except UserError:
        return []  # a page of results needs no models
