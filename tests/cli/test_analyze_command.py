"""analyze through the command line: fine-tuned models or runs in, a table and a figure out."""

from __future__ import annotations

import csv
import json

import pytest
from mistakes import fails

from lit_compress.__main__ import main
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net
from lit_compress.utils import progress


@pytest.mark.parametrize("kind", ["truncation", "sweep", "spectra", "ranks"])
def test_analyze_writes_table_and_figure(kind, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_noted", set())
    model, data = words
    weightings = ["--weightings", "none", "fisher-in", "kfac", "inputs"]
    main(["analyze", kind, *model, str(tmp_path / "out"), *data, *weightings, "--ratios", "0.5", "1.0"])
    rows = list(csv.DictReader((tmp_path / "out" / f"{kind}.csv").open()))
    assert len(rows) == {"truncation": 40, "sweep": 8, "spectra": 4 * 12 * 32, "ranks": 12}[kind]
    said = capsys.readouterr()
    assert f"{len(rows)} rows" in said.out
    assert ("analyze: dev accuracy is measured on 40 of 40 rows" in said.err) == (kind in ("truncation", "sweep"))
    assert ("calibration: 100 of 100 training examples are read" in said.err) == (kind != "ranks")
    if kind == "sweep":
        some = ["--data.validation_examples", "30", "--data.train_examples", "60", "--fisher_examples", "20"]
        main(["analyze", kind, *model, str(tmp_path / "out"), *data, "--ratios", "1.0", *some])  # replaces the earlier
        said = capsys.readouterr().err
        assert "measured on 30 of 40 rows" in said and "data.train_examples: 60 of 100 train rows are read" in said
        assert "calibration: 20 of 60 training examples are read" in said
        assert len((tmp_path / "out" / "sweep.csv").read_text().splitlines()) == 3


def test_several_models_side_by_side(words, run, tmp_path):
    """Nets of a run are called by it; neurons without stored scores are calibrated on the training data."""
    _, data = words
    models = [str(run / "dense" / "net"), str(run / "export")]
    main(["analyze", "ranks", *models, str(tmp_path / "out"), *data])
    rows = list(csv.DictReader((tmp_path / "out" / "ranks.csv").open()))
    assert {(row["model"], row["method"]) for row in rows} == {("run/dense", "SVD"), ("run/export", "SVD")}
    main(["analyze", "pattern", *models, str(tmp_path / "out"), *data])
    site = find_sites(load_net(run / "export"))[1].name
    main(["analyze", "pattern", *models, str(tmp_path / "out"), *data, "--site", site])
    rows = list(csv.DictReader((tmp_path / "out" / "pattern.csv").open()))
    assert len(rows) == 128 and {row["site"] for row in rows} == {site}
    main(["analyze", "neurons", models[0], str(tmp_path / "out"), *data, "--fisher_examples", "20"])
    rows = list(csv.DictReader((tmp_path / "out" / "neurons.csv").open()))
    assert len(rows) == 2 * (5 * 32 + 64) and all(float(row["importance"]) > 0 for row in rows)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} >= {".csv", ".png"}


def test_allocation_of_finished_runs(tmp_path, capsys):
    for name, share in (("a", 0.05), ("b", 0.1)):
        (tmp_path / name).mkdir()
        init = {"density": 0.2, "prune": {"low_rank": share}}
        report = {"task": "sst2", "method": "LoSparse", "config": {"model": {"init_args": init}},
                  "compressed": {"metric": 0.8, "density": 0.2}, "dense": {"metric": 0.9}}  # fmt: skip
        (tmp_path / name / "report.json").write_text(json.dumps(report))
    main(["analyze", "allocation", str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "out")])
    assert "2 rows" in capsys.readouterr().out and (tmp_path / "out" / "allocation.png").is_file()
    line = ["analyze", "allocation", str(tmp_path / "a"), str(tmp_path), str(tmp_path / "out")]
    assert "no finished run (report.json)" in fails(capsys, *line)
    assert "required: OUT" in fails(capsys, *line[:3])


def test_ranks_of_a_factorized_net(words, run, tmp_path):
    """The rank that the export's factors have, whatever stands at a site."""
    _, data = words
    main(["analyze", "ranks", str(run / "export"), str(tmp_path / "out"), *data])
    rows = list(csv.DictReader((tmp_path / "out" / "ranks.csv").open()))
    assert {row["rank"] for row in rows} == {"8", "10"}  # of 32 x 32 and of 32 x 64, half of each
