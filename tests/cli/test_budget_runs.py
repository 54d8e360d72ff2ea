"""Budgets from the command line to the report; the command that only plans."""

import json
import re
import shutil

import pytest
from mistakes import fails
from tiny import read_rows, write_backbone, write_rows
from transformers import AutoModel

from lit_compress.__main__ import main
from lit_compress.models.files import stored_dtype
from lit_compress.run.folder import Run


def own(short_run, *stages):
    """Return the options of a short run for a method with these stages."""
    pairs = zip(short_run[::2], short_run[1::2], strict=True)
    kept = [pair for pair in pairs if not pair[0].startswith("--model.retrain") or "retrain" in stages]
    more = [("--model.dense.epochs", "1")]
    for stage in stages:
        more += [(f"--model.{stage}.epochs", "2"), (f"--model.{stage}.learning_rate", "1e-3")]
    return [word for pair in (*kept, *more) for word in pair]


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    ("method", "asked", "options"),
    [
        ("SVD", "size=32kB", ("--export.dtype", "bfloat16")),
        ("SecondOrder", "params=11k", ("--export.vocabulary", "data")),
        ("SP3", "flops=0.5", ("--model.prune.tokens", "200")),
    ],
)
def test_a_run_meets_its_budget(method, asked, options, short_run, tmp_path, capsys):
    stage = "prune" if method == "SP3" else "retrain"
    args = ["--model", method, *own(short_run, stage), "--model.budget", asked, *options]
    main(["fit", *args, "--run_dir", str(tmp_path / "run"), "--trainer.logger", "false"])
    said, found = capsys.readouterr().out, report_of(tmp_path / "run")["budget"]
    assert found["asked"] == asked and found["met"] and -0.06 < found["off"] <= 1e-9
    assert found["density"] == Run(tmp_path / "run").density(asked)
    assert f"budget {asked}" in said and "met" in said
    if method == "SVD":  # a finished run is continued, exported again in the same form and not solved again
        main(["fit", *args, "--run_dir", str(tmp_path / "run"), "--trainer.logger", "false", "--ckpt_path", "last"])
        main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
        assert report_of(tmp_path / "out")["budget"] == found
        other = [word if word != asked else "size=50kB" for word in args]
        line = fails(capsys, "fit", *other, "--run_dir", tmp_path / "run", "--ckpt_path", "last")
        assert "model.budget was size=32kB, now size=50kB" in line


def test_a_run_of_a_float16_model_is_exported_in_float16(short_run, tiny_backbone, tmp_path):
    """And again; the dense model counts in that dtype as well. A program is of float32."""
    shutil.copytree(tiny_backbone, tmp_path / "half")
    AutoModel.from_pretrained(tmp_path / "half").half().save_pretrained(tmp_path / "half")
    args = ["--model", "SVD", *own(short_run, "retrain"), "--model.backbone", str(tmp_path / "half")]
    main(["fit", *args, "--model.density", "0.5", "--run_dir", str(tmp_path / "run"), "--trainer.logger", "false"])
    main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    main(["export", str(tmp_path / "run"), str(tmp_path / "program"), "--format", "onnx"])
    dense = (tmp_path / "run" / "dense" / "net" / "model.safetensors").stat().st_size
    for folder, dtype in (("run/export", "float16"), ("out", "float16"), ("program", "float32")):
        report = report_of(tmp_path / folder)
        assert report["dtype"] == stored_dtype(tmp_path / folder) == dtype
        assert report["dense"]["bytes"] == pytest.approx(dense / 2, rel=0.1)


def test_a_missed_budget_is_said_and_the_run_is_kept(run, tiny_data, tmp_path, capsys, monkeypatch):
    """Here the search is wrong on purpose."""
    monkeypatch.setattr("lit_compress.cli.fitting.solve", lambda job: 0.8)
    words = ["factorize", str(run / "dense" / "net"), str(tmp_path / "out"), "--data.task", "sst2", "--data.path",
             str(tiny_data), "--weighting", "none", "--data.validation_examples", "8"]  # fmt: skip
    with pytest.warns(UserWarning, match=r"budget params=12k: missed, .* above it; ask for less"):
        main([*words, "--budget", "params=12k"])
    assert report_of(tmp_path / "out")["budget"]["met"] is False
    assert "missed" in capsys.readouterr().out


def test_plan_shows_what_would_be_built(short_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["plan", "--model", "SVD", *short_run, "--model.budget", "params=15k"])
    said = capsys.readouterr().out
    for words in ("budget params=15k: density 0.4", "32x32 r", "total parameters", "retrain 2 epochs = 26 steps",
                  "out x in of every matrix; r: rank"):  # fmt: skip
        assert words in said
    assert not list(tmp_path.iterdir())


def test_a_plan_counts_the_vocabulary_that_is_left(short_run, tmp_path, capsys, monkeypatch):
    """Of 100 rows 26 are left; a tokenizer that cannot be cut is told before anything is trained."""
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--model", "SVD", "--model.density", "0.5", *short_run]
    main(words)
    whole = int(re.search(r"total parameters .*? ([0-9,]+) │ [0-9.]+ │", capsys.readouterr().out)[1].replace(",", ""))
    main([*words, "--export.vocabulary", "data"])
    said = capsys.readouterr().out
    assert f"{whole - 74 * 32:,}" in said
    folder = write_backbone(tmp_path / "opt", "opt", "sst2")
    assert "WordLevel cannot be cut" in fails(capsys, *words, "--model.backbone", folder, "--export.vocabulary", "data")


def test_a_budget_with_the_vocabulary_of_texts_without_labels(run, tiny_data, tmp_path):
    rows = read_rows(tiny_data / "train.jsonl")
    write_rows(tmp_path, train=[{"sentence": row["sentence"]} for row in rows])
    shutil.copy(tiny_data / "validation.jsonl", tmp_path)
    words = ["factorize", str(run / "dense" / "net"), str(tmp_path / "out"), "--data.task", "sst2", "--data.path",
             str(tmp_path), "--budget", "params=12k", "--vocabulary", "data"]  # fmt: skip
    main(words)
    report = report_of(tmp_path / "out")
    assert report["budget"]["met"] and report["vocabulary"]["changed"] == 0
    main(["export", str(tmp_path / "out"), str(tmp_path / "program"), "--format", "onnx", "--dtype", "int8"])
    assert report_of(tmp_path / "program")["program"]["examples"] == 100


def test_a_budget_takes_the_place_of_what_a_recipe_says(short_run, tmp_path, capsys, monkeypatch):
    """Not of what is typed beside it."""
    short = [*own(short_run, "prune"), "--model.prune.tokens", "200"]
    monkeypatch.setattr("lit_compress.cli.fitting.solve", lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["plan", "--config", "sp3_sst2.yaml", *short, "--model.budget", "flops=0.4"])
    line = fails(capsys, "plan", "--config", "sp3_sst2.yaml", *short, "--model.budget", "flops=0.4", "--model.density",
                 "0.1")  # fmt: skip
    assert "model.budget flops=0.4" in line and "model.density 0.1" in line


def test_mistakes_are_one_line_before_any_training(tiny_backbone, tiny_data, tmp_path, capsys):
    line = ("fit", "--model", "FWSVD", "--model.backbone", tiny_backbone, "--data.task", "sst2", "--data.path",
            tiny_data, "--run_dir", tmp_path / "run", "--model.budget")  # fmt: skip
    said = fails(capsys, *line, "size=10kB")
    assert said.startswith("error: model.budget: 'size=10kB'") and "--export.embeddings int8 or " in said
    for option, value in (("density", "0.3"), ("rank", "4"), ("rank_ratio", "0.5")):
        said = fails(capsys, *line, "params=9k", f"--model.{option}", value)
        assert f"model.budget params=9k, model.{option} {value}: only one of them" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_finished_run_with_the_speed_of_a_program_of_integers_is_shown_again(short_run, tmp_path, capsys):
    args = ["fit", "--model", "SecondOrder", *own(short_run), "--run_dir", str(tmp_path / "run"), "--trainer.logger",
            "false", "--model.retrain.epochs", "0", "--model.retrain.calibration_examples", "24", "--ckpt_path", "last",
            "--model.budget", "speedup=1x@openvino-int8,1x8"]  # fmt: skip
    main(args)
    made = report_of(tmp_path / "run")
    capsys.readouterr()
    main(args)
    assert report_of(tmp_path / "run") == made and made["program"]["dtype"] == "int8"
