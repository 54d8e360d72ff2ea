"""Evaluation of a model outside training, by loops over batches on one device: scores, predictions, divergence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lit_compress.data.batching import ResumableLoader
from lit_compress.data.checks import KEPT
from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.intervals import Interval, intervals, standard_error
from lit_compress.evaluation.metrics import CORRELATIONS, bind, build_metrics
from lit_compress.models.sites import Model
from lit_compress.tasks import task_type
from lit_compress.utils.devices import current_device, move, to_device
from lit_compress.utils.files import atomic_file
from lit_compress.utils.progress import track

ROWS = 512  # of a divergence: enough for two digits


def outputs_of(
    net: Model, data: DataModule, loader: ResumableLoader, what: str
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield the batches, each with the outputs of ``net`` on the CPU; the model stays on this process's device.

    ``what`` is the name of the progress bar.
    """
    device, kind, net = current_device(), task_type(data.record), move(net, current_device()).eval()
    for batch in track(loader, what, len(loader)):
        with torch.inference_mode():
            outputs = kind.outputs(net, to_device(batch, device), data.tokenizer).cpu()
        yield batch, outputs


def evaluate(
    net: Model, data: DataModule, split: Literal["validation", "test"] = "validation", sure: bool = False
) -> dict[str, float]:
    """Return ``val/<metric>`` of ``net`` on every validation split, as a fit logs them; or ``test/<metric>``.

    Args:
        net: on any device; it is on the CPU afterwards.
        data: of its task.
        split: which one is scored; of some tasks there are two for validation.
        sure: also return, per split, ``<split>/rows``; ``<split>/available``, of how many, if they are not one text;
            and the ends of every score's interval (evaluation/intervals.py), ``<split>/<metric>_low95`` and
            ``..._high95``.
    """
    names = ["val", *(name.replace("validation", "val") for name in data.record.validation[1:])]
    test = split == "test"
    splits = zip(["test"] if test else names, [data.test_dataloader()] if test else data.val_dataloader(), strict=False)
    values: dict[str, float] = {}
    kind = task_type(data.record)
    for prefix, loader in splits:
        metrics, texts = build_metrics(data.record, alone=True), loader.dataset.rows
        bind(metrics, texts)
        for batch, outputs in outputs_of(net, data, loader, "evaluate"):
            kind.observe(metrics, outputs, batch)
        scores = {name: float(value) for name, value in metrics.compute().items()}
        if sure:
            count, available = len(loader.dataset if kind.one_text else texts), loader.dataset.available
            bounds = intervals(metrics, scores, count)
            scores |= {"rows": count} | ({} if available is None else {"available": available})
            for name, (low, high) in bounds.items():
                scores |= {f"{name}_low95": low, f"{name}_high95": high}
        values |= {f"{prefix}/{name}": value for name, value in scores.items()}
    move(net, "cpu")
    return values


def interval_of(scores: Mapping[str, float], name: str) -> Interval | None:
    """Return the interval of a score of :func:`evaluate` with ``sure``; None if it has none."""
    low, high = (scores.get(f"{name}_{end}") for end in ("low95", "high95"))
    return None if low is None or high is None else (low, high)


def constant_answer(data: DataModule) -> dict[str, float]:
    """Return ``constant``, the first dev metric of the best constant answer, e.g. the majority class; and its error.

    It is 0 for correlations, and if constant answers make no sense. ``constant_error`` is the standard error of a model
    that knows no more, on so many rows.
    """
    record, kind = data.record, task_type(data.record)
    name, best, error = record.metrics[0], 0.0, 0.0
    if constants := kind.constants(record):
        labels = torch.cat([batch["labels"] for batch in data.val_dataloader()[0]])
    for number, outputs in enumerate(constants):
        metrics = build_metrics(record, alone=True)
        kind.observe(metrics, outputs.expand(len(labels), *outputs.shape[1:]), {"labels": labels})
        score = float(metrics.compute()[name])
        if number and score <= best:
            continue
        best = score
        if name == "matthews" or name in CORRELATIONS:  # a constant's is 0 in every sample, a random answer's is not
            error = (max(len(labels), 2) - 1) ** -0.5
        elif bounds := intervals(metrics, {name: score}, len(labels)):
            error = standard_error(bounds[name])
    return {"constant": best, "constant_error": error}


def write_predictions(net: Model, data: DataModule, path: Path) -> tuple[int, int | None]:
    """Predict every row of the ``test`` split (``validation`` if there is none), in the order of the file.

    A line holds the row's ``id`` and ``idx``, its text columns, ``given``, the label that is in the file, each if
    there is one, and the answer of the task's type: ``label`` and ``probability``, ``score``, ... A text column with
    one of these names is called e.g. ``label_text``.

    Returns:
        The number of lines written to ``path``, which appears only when complete; and of how many, None for one text.
    """
    loader, task, kind = data.predict_dataloader(), data.record, task_type(data.record)
    texts = loader.dataset.rows
    by_row: list[list[Any]] = [[] for _ in range(len(texts))]
    for batch, outputs in outputs_of(net, data, loader, "predict"):
        for number, piece in kind.pieces(task, outputs, batch):
            by_row[number].append(piece)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number, row in enumerate(texts):
            kept = json.loads(row.get(KEPT) or "{}")
            given = {"given": kept.pop("given")} if "given" in kept else {}
            answer = given | kind.answer(task, row, by_row[number])
            shown = {f"{n}_text" if n in answer else n: value for n, value in row.items() if n != KEPT}
            file.write(json.dumps(kept | shown | answer, ensure_ascii=False) + "\n")
    return len(texts), loader.dataset.available


def divergence(net: Model, dense: Model, data: DataModule) -> float:
    """Return the mean over examples of KL(dense || model), summed over the distributions of an example (e.g. tokens).

    That is the loss that ``net`` adds for labels drawn from ``dense``. For regression and vectors, half the squared
    difference of the outputs: the KL of normal distributions of variance 1 around them; for vectors 1 - cosine.

    Args:
        net, dense: the model after and before the compression; on the CPU afterwards.
        data: has the task; :data:`ROWS` rows of its first dev split are read, as ``data.sample_dataloader`` draws them.
    """
    device = current_device()
    net, dense = move(net, device).eval(), move(dense, device).eval()
    kind, total, seen = task_type(data.record), 0.0, 0
    batches = data.sample_dataloader(ROWS)
    for batch in track(batches, "compare", len(batches)):
        batch = to_device(batch, device)
        with torch.inference_mode():
            ours, theirs = (kind.logits(kind.run(n, batch), batch) for n in (net, dense))
            total += kind.divergence(ours, theirs, batch)
        seen += len(theirs)
    move(net, "cpu")
    move(dense, "cpu")
    return total / seen
