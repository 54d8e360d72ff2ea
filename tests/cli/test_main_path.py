"""The path most people come on: a fine-tuned model and a CSV, without a config file."""

from __future__ import annotations

import csv
import json
import random
import warnings

import pytest
import yaml
from mistakes import factorized, fails, rewrite
from tiny import WORDS, make_net
from transformers import AutoTokenizer

from lit_compress.__main__ import main
from lit_compress.cli.fitting import run_fit
from lit_compress.cli.lines import read_line
from lit_compress.cli.options import CommandLine
from lit_compress.data.sources import CUSTOM
from lit_compress.run.callbacks import Checkpoints

QUICK = ["--data.batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false",
         "--trainer.logger", "false", "--model.prune.epochs", "1", "--model.retrain.epochs", "1"]  # fmt: skip


@pytest.fixture(autouse=True)
def _exports_are_not_opened(monkeypatch):
    """In another process, which takes seconds: tests of the export do it."""
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)


@pytest.fixture
def reviews(tmp_path):
    """A CSV with the columns review and stars."""
    rng = random.Random(0)
    with (tmp_path / "reviews.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["review", "stars"])
        for i in range(80):
            rows.writerow([" ".join([*rng.choices(WORDS, k=6), ("bad", "great")[i % 2]]), ("bad", "good")[i % 2]])
    return tmp_path / "reviews.csv"


@pytest.fixture
def model(tmp_path, tiny_backbone):
    """A folder with a model whose head names the classes of the CSV."""
    net = make_net("bert")
    net.config.id2label, net.config.label2id = {0: "BAD", 1: "GOOD"}, {"BAD": 0, "GOOD": 1}
    net.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_backbone).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def command(model, reviews, run, *extra):
    return ["fit", "--model", "LPAF", "--model.backbone", str(model), "--data.path", str(reviews),
            "--data.custom.text", "review", "--data.custom.label", "stars",
            "--run_dir", str(run), *QUICK, *extra]  # fmt: skip


def test_a_model_fine_tuned_on_the_labels_is_the_teacher(model, reviews, tmp_path, capsys, monkeypatch):
    """The run does not score another version of the table: the split by its rows would be another."""
    main(command(model, reviews, tmp_path / "run"))
    assert f"'{model}' is fine-tuned on these labels (bad, good): it is the teacher" in capsys.readouterr().err
    records = json.loads((tmp_path / "run" / "stages.json").read_text())
    trained = {record["name"]: record["steps"] > 0 for record in records}
    assert trained == {"dense": False, "prune": True, "retrain": True} and records[0]["teacher"] == str(model)
    capsys.readouterr()
    main(["evaluate", str(tmp_path / "run")])
    said, moved = capsys.readouterr().out, tmp_path / "moved.csv"
    reviews.rename(moved)
    main(["evaluate", str(tmp_path / "run"), "--data.path", str(moved)])
    assert capsys.readouterr().out == said
    main(["evaluate", str(tmp_path / "run" / "dense" / "net"), "--data.path", str(moved)])
    assert "val/rows 8 of 8\n" in capsys.readouterr().out
    moved.rename(reviews)
    words = "training rows would be scored; give both as they were"
    assert words in fails(capsys, "evaluate", tmp_path / "run", "--data.split_seed", "7")
    rewrite(reviews, reviews.read_text() + "new words,good\n")
    for target in ("", "dense/net", "retrain/net"):
        assert words in fails(capsys, "evaluate", tmp_path / "run" / target)
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, "evaluate", tmp_path / "run", "--data.path", reviews.name)
    main(["predict", str(tmp_path / "run")])
    (texts := tmp_path / "texts.csv").write_text("review\na great film\n")
    rewrite(reviews, '{"a line": "of JSON"}\n')
    line = fails(capsys, "predict", tmp_path / "run", "--data.path", texts, "--output", reviews)
    assert "is a file that is read; give another" in line and "of JSON" in reviews.read_text()


def test_a_factorized_model_scores_the_dev_rows_of_a_table_that_was_moved(model, reviews, tmp_path, capsys):
    words = ("--data.custom.text", "review", "--data.custom.label", "stars")
    factorized(model, tmp_path / "small", "--data.path", reviews, *words)
    moved = reviews.rename(tmp_path / "moved.csv")
    main(["evaluate", str(tmp_path / "small"), "--data.path", str(moved)])
    assert "val/rows 8 of 8\n" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [(), ("--model.dense.epochs", "1")])
def test_labels_in_another_order_are_a_warning(extra, model, reviews, tmp_path, monkeypatch, capsys):
    """The head would be trained anew from exchanged answers."""
    monkeypatch.setattr("lit_compress.cli.fitting.run_stages", lambda *args: None)
    monkeypatch.setattr("lit_compress.cli.fitting._report", lambda run, cli: None)
    path = model / "config.json"
    labels = {"id2label": {0: "GOOD", 1: "BAD"}, "label2id": {"GOOD": 0, "BAD": 1}}
    path.write_text(json.dumps(json.loads(path.read_text()) | labels))
    with pytest.warns(
        UserWarning, match=r"order \(GOOD, BAD\) than the data \(bad, good\): .*; as --model.teacher too"
    ):
        run_fit(read_line("fit", command(model, reviews, tmp_path / "run", *extra)[1:]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        words = command(model, reviews, tmp_path / "other", *extra, "--model.teacher", str(model))
        capsys.readouterr()
        run, _ = run_fit(read_line("fit", words[1:]))
    assert ("model.dense.epochs: not used, since model.teacher is given" in capsys.readouterr().err) == bool(extra)
    assert run.config()["data"]["custom"]["labels"] == ["GOOD", "BAD"]


def test_a_resumed_run_keeps_the_dense_stage_that_it_began(model, reviews, tmp_path, capsys, monkeypatch):
    """Earlier versions fine-tuned such a model first: a run that one of them stopped there goes on as it was begun."""
    save, args = Checkpoints._save, command(model, reviews, tmp_path / "run", "--checkpoint_every", "2")

    def stop(self, trainer, name, weights_only=False):
        save(self, trainer, name, weights_only)
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("lit_compress.cli.fitting.finetuned_on", lambda backbone, task: False)
        patch.setattr(Checkpoints, "_save", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            main(args)
    main([*args, "--ckpt_path", "last"])
    assert "it is the teacher" not in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "stages.json").read_text())[0]
    assert record["name"] == "dense" and record["steps"] > 0 and "teacher" not in record


def test_a_resumed_run_keeps_its_teacher(model, reviews, tmp_path, capsys):
    """Also where the model has gone: it was copied into the run."""
    args = command(model, reviews, tmp_path / "run")
    main(args)
    (tmp_path / "run" / "report.json").unlink()
    records = json.loads((tmp_path / "run" / "stages.json").read_text())
    rewrite(tmp_path / "run" / "stages.json", json.dumps(records[:1]))
    capsys.readouterr()
    main([*args, "--ckpt_path", "last"])
    assert "it is the teacher" not in capsys.readouterr().err  # was said when the run began
    assert json.loads((tmp_path / "run" / "stages.json").read_text())[0] == records[0]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["init_args"]["teacher"] == str(model)


def test_a_resumed_run_with_other_labels_of_its_calibration_is_refused(model, reviews, tmp_path, capsys, monkeypatch):
    """Earlier versions had an option for them, mostly null; a finished run is read all the same."""
    args = command(model, reviews, tmp_path / "run")
    args = ["SecondOrder" if word == "LPAF" else word.replace("prune", "retrain") for word in args]
    main(args)
    path, asked = tmp_path / "run" / "config.yaml", []
    config = yaml.safe_load(path.read_text())
    monkeypatch.setattr("lit_compress.cli.fitting.run_stages", lambda job, *_, **__: asked.append(job))
    for labels in (None, "drawn"):
        config["model"]["init_args"]["retrain"]["labels"] = labels
        rewrite(path, yaml.safe_dump(config))
        if labels is None:
            main([*args, "--ckpt_path", "last"])
    assert len(asked) == 1
    assert "labels: 'drawn' was removed in version 0.3; see 'Removed'" in fails(capsys, *args, "--ckpt_path", "last")
    main(["evaluate", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ({0: "BAD", 1: "GOOD"}, ["--model.dense.epochs", "1"]),
        ({0: "GOOD", 1: "BAD"}, []),  # the head could answer anything
        ({0: "LABEL_0", 1: "LABEL_1"}, []),
    ],
)
def test_other_labels_or_options_of_the_dense_stage_fine_tune_it_first(
    names, options, model, reviews, tmp_path, monkeypatch
):
    jobs = []
    monkeypatch.setattr("lit_compress.cli.fitting.run_stages", lambda job, *_: jobs.append(job))
    monkeypatch.setattr("lit_compress.cli.fitting._report", lambda *_: None)
    config = json.loads((model / "config.json").read_text()) | {"id2label": names}
    rewrite(model / "config.json", json.dumps(config))
    run_fit(read_line("fit", command(model, reviews, tmp_path / "run", *options)[1:]))
    assert [job.method.teacher for job in jobs] == [None]


@pytest.mark.parametrize(
    ("options", "task"),
    [
        (["--model", "SVD", "--data.path", "FILE"], CUSTOM),
        (["--model", "SVD", "--data.custom.text", "review"], CUSTOM),
        (["--config", "lpaf.yaml", "--data.path", "FILE", "--data.custom.text", "review"], CUSTOM),
        (["--config", "lpaf_sst2.yaml", "--data.path", "FILE"], "sst2"),
        (["--model", "SVD", "--data.path", "FILE", "--data.task", "cola"], "cola"),
        (["--model", "SVD"], "sst2"),
    ],
)
def test_a_file_or_columns_of_ones_own_mean_a_task_of_ones_own(options, task, reviews):
    parsed = CommandLine(read_line("fit", [str(reviews) if word == "FILE" else word for word in options]))
    assert parsed.config.data.task == task


def test_without_a_method_it_is_second_order_compression(model, reviews, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lit_compress.utils.progress._noted", set())
    line = ["--model.backbone", str(model), "--data.path", str(reviews), "--data.custom.text", "review"]
    config = CommandLine(read_line("fit", [*line, "--data.custom.label", "stars"])).config
    assert config.model.class_path == "lit_compress.methods.SecondOrder"
    assert "note: model: SecondOrder, the default" in capsys.readouterr().err
    assert (
        CommandLine(read_line("fit", [*line, "--model", "SVD"])).config.model.class_path == "lit_compress.methods.SVD"
    )
    assert "default" not in capsys.readouterr().err


def test_a_run_builds_its_method_and_its_data_once(run, counts):
    assert counts == {"data": 1, "parsed": 1}
