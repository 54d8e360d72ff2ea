"""Figures of papers on any model or run: what truncation and pruning do to the matrices.

    python -m benchmarks.analysis KIND MODEL [MODEL ...] OUT --data.task NAME [--data.path DIR] [options of fit]

writes KIND.csv and KIND.png to OUT:

    truncation   drop of the dev metric without each tenth of the components (FWSVD's Figures 1, 6, 8)
    sweep        dev metric over the ratio of ranks kept (FWSVD's Figure 5)
    spectra      singular values of every matrix (LoSparse's Figure 3)
    neurons      histograms of the neurons' importance; several models (LoSparse's Figures 1, 4)
    ranks        numerical rank of every matrix; over the density for several models (LPAF's Figure 2)
    pattern      which weights of a matrix are zero; several models (LPAF's Figure 3)
    widths       fractions left in every block of SP3's models; several models (SP3's Figures 4, 6, 7)
    allocation   dev metric over the low-rank share: MODEL are finished LoSparse runs (LoSparse's Figure 6)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.analysis import pruning, truncation, widths
from benchmarks.analysis.plots import FIGURES, write_rows
from benchmarks.analysis.truncation import Decomposer, TableRows
from lit_compress.cli.factorizing import load_model
from lit_compress.cli.lines import read_line
from lit_compress.cli.options import CommandLine
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.methods.fwsvd import FWSVD
from lit_compress.models.checks import is_compressed
from lit_compress.models.storage import load_net
from lit_compress.run.folder import Run
from lit_compress.stages.compression import collected
from lit_compress.stages.low_rank import Factors
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.weighting import KRONECKER, Weighted, calibration_for
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import read_json
from lit_compress.utils.progress import silence_libraries

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule

SEVERAL = ("ranks", "neurons", "pattern", "widths", "allocation")  # of more than one model
RATIOS = tuple(i / 10 for i in range(1, 11))
WEIGHTINGS = ("none", "fisher-in", *KRONECKER)


def weighting_of(label: str, like: Weighted) -> Weighted:
    """Return the settings for ``label``: a weighting; ``fisher-in`` is FWSVD's, by inputs.

    Raises:
        UserError: there is no such weighting.
    """
    if label not in WEIGHTINGS:
        raise UserError(f"weightings: unknown '{label}'; {nearest(label, WEIGHTINGS)}")
    named: dict[str, Any] = {"weighting": label.partition("-")[0]}
    return replace(like, **named)


def decomposers(
    method: FWSVD, net: PreTrainedModel, data: DataModule, settings: Sequence[Weighted]
) -> list[Decomposer]:
    """Return a decomposer of ``net`` for each of ``settings``, after one pass over training data for all of a kind."""
    statistics: dict[str, Any] = {}
    kinds = [[s for s in settings if s.weighting == "fisher"], [s for s in settings if s.weighting in KRONECKER]]
    for same in filter(None, kinds):
        most_known = next((s for s in same if s.weighting == "kfac"), same[0])
        ((_, sums),) = collected(net, calibration_for(most_known, data), method.task, current_device(), most=inf)
        statistics |= dict.fromkeys((s.weighting for s in same), sums)
    factors = [(Factors(RankRule(), s), statistics.get(s.weighting, {})) for s in settings]
    return [lambda name, w, f=f, sums=sums: f.svd(net, [name], w, dict(sums), min(w.shape)) for f, sums in factors]  # type: ignore


def named(models: Sequence[str]) -> dict[str, tuple[Path, str]]:
    """Return {label: (folder, method)}; the label of a model of a run has the run's name."""
    found: dict[str, tuple[Path, str]] = {}
    for name in models:
        folder = Path(name).expanduser()
        run = next((p for p in list(folder.resolve().parents)[:2] if (p / "config.yaml").is_file()), None)
        label = folder.name if run is None else str(folder.resolve().relative_to(run.parent)).removesuffix("/net")
        method = "" if run is None else Run(run).config()["model"]["class_path"].rpartition(".")[2]
        found[name if label in found else label] = folder, method
    return found


def of_several(kind: str, models: Sequence[str], method: FWSVD, data: DataModule, site: str | None) -> TableRows:
    """Return the rows of an analysis of several models."""
    folders = named(models)

    def load(folder: Path) -> PreTrainedModel:
        return load_net(folder) if is_compressed(folder) else load_model(str(folder), method)

    nets = {label: load(folder) for label, (folder, _) in folders.items()}
    if kind == "ranks":
        return [row for label, net in nets.items() for row in truncation.ranks(net, label, folders[label][1])]
    if kind == "pattern":
        return pruning.pattern(nets, site)
    if kind == "widths":
        return [{"model": label, **row} for label, net in nets.items() for row in widths.width_table(net)]
    scores = {label: pruning.stored_sensitivity(folder) for label, (folder, _) in folders.items()}
    for label in (label for label, stored in scores.items() if not stored):
        batches = data.calibration_dataloader(method.retrain.fisher_examples)
        scores[label] = pruning.calibrated_sensitivity(nets[label], batches, method.kind)
    return pruning.neurons(scores, next(iter(nets.values())))


def of_one(kind: str, method: FWSVD, data: DataModule, weightings: Sequence[str], ratios: Sequence[float]) -> TableRows:
    """Return the rows of an analysis of the method's backbone."""
    settings = [weighting_of(label, method.retrain) for label in weightings]
    for ratio in ratios:
        if not 0.0 < ratio <= 1.0:
            raise UserError(f"rank_ratio {ratio} is not a fraction of the full rank; valid: above 0, at most 1")
    net, key = load_model(method.backbone, method), f"val/{data.record.metrics[0]}"
    by_label = dict(zip(weightings, decomposers(method, net, data, settings), strict=True))

    def metric(net: PreTrainedModel) -> float:
        return evaluate(net, data)[key]

    if kind == "truncation":
        return truncation.grouped_truncation(net, by_label, metric)
    if kind == "sweep":
        return truncation.rank_ratio_sweep(net, by_label, metric, ratios)
    return truncation.spectra(net, by_label)


def main(args: Sequence[str] | None = None) -> None:
    """Measure, and write the table and the figure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.analysis", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("kind", choices=FIGURES, metavar="KIND")
    parser.add_argument("model", metavar="MODEL", nargs="+", help="folder of a model fine-tuned on the task")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument("--weightings", nargs="+", default=["none", "fisher-in"], metavar="W",
                        help=", ".join(WEIGHTINGS))  # fmt: skip
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS, help="for sweep: ranks kept / ranks")
    parser.add_argument("--site", help="for pattern: name of the matrix (default the first attention output)")
    given, rest = parser.parse_known_args(args)
    silence_libraries()
    if len(given.model) > 1 and given.kind not in SEVERAL:
        parser.error(f"{given.kind} takes one model, {len(given.model)} were given; several: {', '.join(SEVERAL)}")
    try:
        if given.kind == "allocation":
            rows = pruning.allocation([read_json("allocation", Path(run) / "report.json", dict) for run in given.model])
        else:
            parts = CommandLine(
                read_line("plan", ["--model=FWSVD", f"--model.backbone={given.model[0]}", *rest])
            ).ready()
            assert isinstance(parts.method, FWSVD)
            if given.kind in SEVERAL:
                rows = of_several(given.kind, given.model, parts.method, parts.data, given.site)
            else:
                rows = of_one(given.kind, parts.method, parts.data, given.weightings, given.ratios)
    except UserError as error:
        parser.error(str(error))
    write_rows(given.kind, rows, given.out)
    print(f"{len(rows)} rows: {given.out / given.kind}.csv\nfigure: {given.out / given.kind}.png")
