"""`python -m benchmarks.analysis`: fine-tuned models or runs in, a table and a figure out."""

import csv
import json

import pytest
from mistakes import fit
from tiny import make_net

from benchmarks.analysis.measure import main
from benchmarks.analysis.widths import width_table
from lit_compress.__main__ import main as run_command
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net


@pytest.fixture(scope="module")
def run(short_run, tmp_path_factory):
    """A finished SVD run."""
    folder = tmp_path_factory.mktemp("analysis") / "run"
    run_command(fit(short_run, folder))
    return folder


@pytest.fixture
def analyze(tiny_data, tmp_path):
    """Return a function that analyzes models and returns the rows of the table."""

    def measured(kind, *words):
        data = ["--data.task", "sst2", "--data.path", str(tiny_data), "--data.batch_size", "8"]
        main([kind, *map(str, words), *data])
        assert (tmp_path / "out" / f"{kind}.png").stat().st_size > 1000
        return list(csv.DictReader((tmp_path / "out" / f"{kind}.csv").open()))

    return measured


@pytest.mark.parametrize("kind", ["truncation", "sweep", "spectra", "ranks"])
def test_a_table_and_a_figure_are_written(kind, run, analyze, tmp_path):
    weightings = ["--weightings", "none", "fisher-in", "kfac", "inputs"]
    rows = analyze(kind, run / "dense" / "net", tmp_path / "out", *weightings, "--ratios", "0.5", "1.0")
    assert len(rows) == {"truncation": 40, "sweep": 8, "spectra": 4 * 12 * 32, "ranks": 12}[kind]


def test_several_models_side_by_side(run, analyze, tmp_path):
    """Models of a run are called by it; neurons without stored scores are calibrated on the training data."""
    models = run / "dense" / "net", run / "export"
    rows = analyze("ranks", *models, tmp_path / "out")
    assert {(row["model"], row["method"]) for row in rows} == {("run/dense", "SVD"), ("run/export", "SVD")}
    factors = {row["rank"] for row in rows if row["model"] == "run/export"}
    assert factors == {"8", "10"}  # of 32 x 32 and of 32 x 64, half of each
    site = find_sites(load_net(run / "export"))[1].name
    rows = analyze("pattern", *models, tmp_path / "out", "--site", site)
    assert len(rows) == 128 and {row["site"] for row in rows} == {site}
    rows = analyze("neurons", models[0], tmp_path / "out", "--model.retrain.fisher_examples", "20")
    assert len(rows) == 2 * (5 * 32 + 64) and all(float(row["importance"]) > 0 for row in rows)


def test_allocation_of_finished_runs(tmp_path):
    for name, share in (("a", 0.05), ("b", 0.1)):
        (tmp_path / name).mkdir()
        init = {"density": 0.2, "prune": {"low_rank": share}}
        report = {"task": "sst2", "method": "LoSparse", "config": {"model": {"init_args": init}},
                  "compressed": {"metric": 0.8, "density": 0.2}, "dense": {"metric": 0.9}}  # fmt: skip
        (tmp_path / name / "report.json").write_text(json.dumps(report))
    main(["allocation", str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "out")])
    assert len((tmp_path / "out" / "allocation.csv").read_text().splitlines()) == 3


def test_mistakes_are_told(run, tiny_data, tmp_path, capsys):
    net, out, data = str(run / "dense" / "net"), str(tmp_path / "out"), ["--data.task=sst2", f"--data.path={tiny_data}"]
    for words, said in (
        (["sweeep", net, out, *data], "invalid choice: 'sweeep'"),
        (["sweep", net, out, *data, "--weightings", "fisher-inn"], "did you mean 'fisher-in'?"),
        (["sweep", net, out, *data, "--ratios", "2"], "rank_ratio 2.0 is not a fraction"),
        (["sweep", net, net, out, *data], "sweep takes one model, 2 were given"),
        (["pattern", net, out, *data, "--site", "x"], "site: no 'x' in run/dense"),
        (["allocation", str(tmp_path), out], "report.json"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("family", "task", "cross"), [("bert", "sst2", False), ("bart", "xsum", True)])
def test_a_dense_model_has_all_its_widths(family, task, cross):
    rows = width_table(make_net(family, task))
    kinds = ("attention", "ffn", "cross") if cross else ("attention", "ffn")
    assert {f"hidden_{kind}" for kind in kinds} <= {*rows[-1]} and ("qk_cross" in rows[-1]) == cross
    assert all(value == 1 for row in rows for name, value in row.items() if name != "layer")
