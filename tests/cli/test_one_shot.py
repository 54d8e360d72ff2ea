"""factorize through the command line: a fine-tuned model in, an export out."""

from __future__ import annotations

import json

import pytest
import torch
from mistakes import fails, rewrite
from safetensors.torch import load_file

from lit_compress.__main__ import main
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net
from lit_compress.utils import progress


def test_factorize_writes_a_full_export(words, tmp_path):
    model, data = words
    options = ["--rank", "5", "--weighting", "fisher", "--fisher_examples", "20"]
    lines = (f"{name.removeprefix('--')}: {value}\n" for name, value in zip(data[::2], data[1::2], strict=True))
    (tmp_path / "data.yaml").write_text("tasks: {sst2: {" + ", ".join(lines) + "}}")  # a recipe with one row
    main(["factorize", *model, str(tmp_path / "out"), "--config", str(tmp_path / "data.yaml"), *options])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["method"] == "FWSVD" and list(report["stages"]) == ["dense", "compressed"]
    assert report["compressed"]["density"] < 0.7 and report["export_difference"] <= 1e-5
    assert {
        "config.json",
        "model.safetensors",
        "structure.json",
        "README.md",
        "modeling_compressed.py",
        "tokenizer.json",
    } <= {p.name for p in (tmp_path / "out").iterdir()}
    net = load_net(tmp_path / "out")
    ranks = {net.get_submodule(s.name).rank for s in find_sites(net) if hasattr(net.get_submodule(s.name), "rank")}
    assert ranks == {5}


def test_default_is_kfac_with_one_budget_and_says_what_it_did(words, run, tmp_path, capsys, monkeypatch):
    """The report has the settings of the calibration; the budget is that of all matrices; biases have changed."""
    monkeypatch.setattr(progress, "_noted", set())
    model, data = words
    line = ["factorize", *model, str(tmp_path / "out"), *data, "--density", "0.5"]
    line += ["--data.validation_examples", "30"]
    main([*line, "--calibration_examples", "40"])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    settings = report["config"]["model"]["init_args"]
    assert (settings["retrain"]["weighting"], settings["allocation"]) == ("kfac", "global")
    found = report["calibration"]
    assert found["examples"] == 40
    assert {k: found[k] for k in ("weighting", "labels", "removes")} == {
        "weighting": "kfac", "labels": "exact", "removes": "components"
    }  # fmt: skip
    said = capsys.readouterr()
    assert "(30 of 40 rows)\n" in said.out and "calibration: 40 of 100 training examples are read" in said.err
    assert 0.45 < report["compressed"]["density"] <= 0.5
    old, new = load_net(run / "dense" / "net"), load_net(tmp_path / "out")
    ranks = {s.name: rank for s in find_sites(new) if (rank := getattr(new.get_submodule(s.name), "rank", None))}
    assert report["method"] == "SecondOrder" and len({*ranks.values()}) > 1
    name = next(iter(ranks))
    assert not torch.equal(old.get_submodule(name).bias, new.get_submodule(name).bias)


def test_hidden_states_are_sliced_as_fit_does_without_training(words, run, tmp_path):
    model, data = words
    line = ["--model.prune.examples", "40", "--density", "0.7", "--round_to", "4"]
    main(["factorize", *model, str(tmp_path / "out"), *data, "--method", "SliceGPT", *line])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["method"] == "SliceGPT" and report["calibration"] is None
    assert 0.5 < report["compressed"]["density"] <= 0.7 and report["export_difference"] <= 1e-5
    main(["fit", "--model", "SliceGPT", "--model.teacher", *model, "--model.backbone", *model, *data,
          "--model.prune.examples", "40", "--model.density", "0.7", "--model.round_to", "4",
          "--trainer.accelerator", "cpu", "--trainer.logger", "false", "--run_dir", str(tmp_path / "run")])  # fmt: skip
    net, same = load_net(tmp_path / "out"), load_net(tmp_path / "run" / "export").state_dict()
    assert net.config.hidden_size == 32 and all(
        torch.equal(value, same[name]) for name, value in net.state_dict().items()
    )


@pytest.mark.parametrize(
    "given",
    [["--density", "0.5"], ["--method", "SliceGPT", "--density", "0.7", "--model.prune.examples", "40"]],
    ids=["SecondOrder", "SliceGPT"],
)
def test_unlabelled_texts_are_enough(given, words, tiny_data, tmp_path, capsys):
    """Labels are drawn, or not read: without those of the training rows comes the same export; FWSVD needs them."""
    model, data = words
    folder = tmp_path / "texts"
    folder.mkdir()
    rows = [json.loads(line) for line in (tiny_data / "train.jsonl").read_text().splitlines()]
    (folder / "train.jsonl").write_text("".join(json.dumps({"sentence": row["sentence"]}) + "\n" for row in rows))
    (folder / "validation.jsonl").write_text((tiny_data / "validation.jsonl").read_text())
    unlabelled = [str(folder) if word == str(tiny_data) else word for word in data]
    for name, source in (("a", data), ("b", unlabelled)):
        main(["factorize", *model, str(tmp_path / name), *source, *given])
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
    if "SliceGPT" not in given:
        line = fails(capsys, "factorize", *model, tmp_path / "c", *unlabelled, "--weighting", "fisher")
        assert "train.jsonl' has no column 'label'" in line and "factorize by SecondOrder, SVD or SliceGPT" in line


def test_a_small_vocabulary_and_a_small_table(words, tmp_path, capsys):
    """Matrices, table and tokenizer in one command; the rank of the table is not decided twice."""
    model, data = words
    line = ["factorize", *model, str(tmp_path / "out"), *data, "--density", "0.5", "--vocabulary", "data"]
    main([*line, "--embeddings", "int8"])
    said, report = capsys.readouterr().out, json.loads((tmp_path / "out" / "report.json").read_text())
    assert "vocabulary: 26 of 100 pieces are left" in said and "embeddings: int8, 936 of 3,328 bytes" in said
    assert report["compressed"]["density"] <= 0.5 and report["export_difference"] <= 1e-5
    assert "scope: this option was removed in version 0.3" in fails(capsys, *line, "--scope", "all")


def test_mistakes_are_one_line(words, run, tmp_path, capsys):
    model, data = words
    out = str(tmp_path / "out")
    fisher = ["--weighting", "fisher"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "structure.json").write_text("{}")
    of_another = {"config": {"model": {"init_args": {"backbone": "another"}}}}
    (tmp_path / "other" / "report.json").write_text(json.dumps(of_another))
    for line, text in [
        (["factorize", *model], "OUT: it is missing"),
        (["factorize", *model, out], "data.task: it is missing"),
        (["factorize", str(tmp_path / "nowhere"), out, *data], "no folder"),
        (["factorize", str(run), out, *data], f"is a run, not a model; give its model, {run / 'dense/net'}"),
        (["factorize", str(run / "export"), out, *data], "is compressed already"),
        (["factorize", *model, out, *data, "--rank_ratio", "1.5"], "model.rank_ratio: 1.5 is not in (0, 1]"),
        (["factorize", *model, out, *data, "--rank", "99"], "model.rank: 99 makes no matrix smaller"),
        (["factorize", *model, out, *data, "--rank", "3", "--density", "0.5"], "only one of them"),
        (["factorize", *model, out, *data, *fisher, "--axis", "both"], "axis: this option was removed in version 0.3"),
        (
            ["factorize", *model, out, *data, *fisher, "--fisher_examples", "101"],
            "fisher_examples: 101 is more than there are",
        ),
        (
            ["factorize", *model, out, *data, "--fisher_examples", "9"],
            "fisher_examples: 9 has no effect with model.retrain.weighting",
        ),
        (["factorize", *model, out, *data, "--calibration_examples", "101"], "calibration_examples: 101 is more than"),
        (["factorize", *model, out, *data, "--labels", "true"], "labels: this option was removed in version 0.3; see"),
        (["factorize", *model, out, *data, "--method", "SliceGPT", "--density", "0.01"], "cannot be reached by slices"),
        (
            ["factorize", *model, out, *data, "--method", "SliceGPT", "--model.prune.examples", "101"],
            "prune.examples: 101 is more than there are; the largest is 100",
        ),
        (["factorize", *model, str(tmp_path / "mine"), *data], "holds something that is not an export"),
        (["factorize", *model, str(run / "dense/net"), *data], "holds something that is not an export"),
        (["factorize", *model, str(tmp_path / "other"), *data], "holds an export of 'another'; give another folder"),
        (["factorize", *model, out, "--data.task", "mnli", *data[2:]], "has 2 labels, mnli has 3"),
    ]:
        assert text in fails(capsys, *line), line
    assert not (tmp_path / "out").exists() and (tmp_path / "mine" / "thesis.txt").exists()


# over 10 s: four programs are written, each checked in another process
def test_export_takes_an_export(words, tmp_path, capsys):
    """Its folder with a program beside the same weights; another program takes the place of the first."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model, data = words
    small, again = tmp_path / "small", tmp_path / "again"
    main(["factorize", *model, str(small), *data, "--budget", "size=80kB"])
    main(["export", str(small), str(again), "--format", "onnx"])
    (again / "model.pt2").write_bytes(b"a program of version 0.2")
    main(["export", str(again), str(again), "--format", "onnx"])
    assert (again / "model.safetensors").read_bytes() == (small / "model.safetensors").read_bytes()
    old, new = (json.loads((folder / "report.json").read_text()) for folder in (small, again))
    assert new["compressed"] == old["compressed"] and new["program"]["format"] == "onnx"
    assert new["budget"]["reached"] == new["program"]["bytes"] != old["budget"]["reached"] == old["compressed"]["bytes"]
    assert "model.onnx" in (again / "README.md").read_text() and not (again / "model.pt2").exists()
    ids = torch.randint(5, 20, (2, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        expected = load_net(small)(**inputs).logits
    session = onnxruntime.InferenceSession(again / "model.onnx")
    (found,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
    assert torch.allclose(torch.from_numpy(found), expected, atol=1e-4)
    main(["export", str(again), str(tmp_path / "copy")])
    assert {p.name for p in (tmp_path / "copy").iterdir()} == {p.name for p in again.iterdir()}
    for folder in (small, again):  # whatever the tiny nets score, this one has lost
        report = json.loads((folder / "report.json").read_text())
        report["dense"]["metric"] = report["compressed"]["metric"] + 0.02
        rewrite(folder / "report.json", json.dumps(report))
    for more in ((), ("--format", "onnx")):
        line = fails(capsys, "export", small, tmp_path / "x", "--max_drop", "1.5", *more)
        assert "2.00 points, more than --max_drop 1.5" in line and not (tmp_path / "x").exists()
    main(["export", str(small), str(tmp_path / "kept"), "--max_drop", "2.5"])
    line = fails(capsys, "export", small, tmp_path / "x", "--embeddings", "int8")
    assert "--embeddings int8 changes the weights" in line
    more = ("--dtype", "int8", "--data.path", tmp_path / "no")  # from which ranges are read
    line = fails(capsys, "export", small, tmp_path / "x", "--format", "onnx", *more)
    assert "no such folder" in line and not (tmp_path / "x").exists()
