"""validate, test, predict and export on a run and its export: they agree, and nothing of the user's is lost."""

from __future__ import annotations

import json
import shutil

import pytest
from mistakes import fails, rewrite

from lit_compress.__main__ import main


def test_validate_run_and_export_agree_with_the_report(run, capsys):
    report = json.loads((run / "report.json").read_text())
    for target in (run, run / "export"):
        capsys.readouterr()
        main(["validate", str(target)])
        said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert list(said) == ["val/accuracy", "val/rows", "val/accuracy_low95", "val/accuracy_high95"]
        assert float(said["val/accuracy"]) == pytest.approx(report["compressed"]["metric"], abs=1e-6)
        assert said["val/rows"] == "40 of 40"
        assert float(said["val/accuracy_low95"]) < float(said["val/accuracy"]) < float(said["val/accuracy_high95"])


def test_test_needs_labels(run, capsys, tmp_path, tiny_data):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    shutil.copy(data / "validation.jsonl", data / "test.jsonl")
    main(["test", str(run), "--data.path", str(data)])
    assert capsys.readouterr().out.startswith("test/accuracy ")
    (data / "test.jsonl").write_text('{"sentence": "a film", "label": -1}\n')
    assert "labels" in fails(capsys, "test", run, "--data.path", data)


@pytest.mark.parametrize("target", ["", "export"])
def test_predict_writes_text_label_probability(run, target, tmp_path, tiny_data):
    out = tmp_path / "p.jsonl"
    main(["predict", str(run / target), "--output", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [json.loads(line) for line in (tiny_data / "validation.jsonl").read_text().splitlines()]
    assert [line["sentence"] for line in lines] == [row["sentence"] for row in rows]
    assert all(line["label"] in ("negative", "positive") and 0.5 <= line["probability"] <= 1 for line in lines)


def test_a_limit_on_validation_examples_is_no_limit_on_predictions(run, tmp_path, capsys, tiny_data):
    """What fit was given holds for validate, not for predict, which takes it when it is given to itself."""
    folder, out = tmp_path / "export", tmp_path / "p.jsonl"
    shutil.copytree(run / "export", folder)
    report = json.loads((folder / "report.json").read_text())
    report["config"]["data"]["validation_examples"] = 7
    rewrite(folder / "report.json", json.dumps(report))

    def said(command, *args):
        main([command, str(folder), *args])
        return capsys.readouterr().out

    assert said("predict", "--output", str(out)) == f"predicted 40 of 40 rows of split validation: {out}\n"
    every = out.read_text().splitlines()
    assert said("predict", "--output", str(out), "--data.validation_examples", "6").startswith("predicted 6 of 40 rows")
    assert set(out.read_text().splitlines()) < set(every)
    one = ("--output", str(out), "--data.path", str(tiny_data / "validation.jsonl"))
    assert said("predict", *one, "--data.validation_examples", "6").startswith("predicted 6 of 40 rows")
    stored = said("validate")
    assert float(stored.split()[1]) * 7 == pytest.approx(round(float(stored.split()[1]) * 7), abs=1e-5)
    assert "val/rows 7 of 40\n" in stored
    assert stored != said("validate", "--data.validation_examples", "null")
    words = "data.validation_examples: 41 is more than there are; the largest is 40"
    assert words in fails(capsys, "validate", folder, "--data.validation_examples", "41")


def test_predict_keeps_ids_and_given_labels(run, tmp_path):
    """Also labels that are no classes: nothing is scored."""
    rows = ["id,sentence,label", ",a warm film,", "7,a great film,1", "x,a dull film,unknown"]
    (tmp_path / "test.csv").write_text("\n".join(rows) + "\n")
    main(["predict", str(run), "--data.path", str(tmp_path / "test.csv"), "--output", str(tmp_path / "p.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert list(lines[1]) == ["id", "sentence", "given", "label", "probability"]
    assert [(line.get("id"), line["sentence"], line.get("given")) for line in lines] == [
        (None, "a warm film", None), ("7", "a great film", "positive"), ("x", "a dull film", "unknown")
    ]  # fmt: skip


def test_output_may_stand_anywhere_and_is_no_file_that_is_read(run, tmp_path, capsys, tiny_data):
    for args in (
        ["--output", "OUT", "RUN"],
        ["RUN", "--output=OUT"],
        ["RUN", "--data.eval_batch_size", "8", "--output", "OUT"],
    ):
        out = tmp_path / "new" / "folder" / "p.jsonl"
        main(["predict", *(arg.replace("OUT", str(out)).replace("RUN", str(run)) for arg in args)])
        assert len(out.read_text().splitlines()) == 40
        out.unlink()
    data = tmp_path / "mine.jsonl"
    shutil.copy(tiny_data / "validation.jsonl", data)
    folder = shutil.copytree(tiny_data, tmp_path / "data")
    for out, path in ((data, data), (folder / "train.jsonl", folder), (folder / "validation.jsonl", folder)):
        before = out.read_bytes()
        line = fails(capsys, "predict", run, "--output", out, "--data.path", path)
        assert "is a file that is read; give another" in line and out.read_bytes() == before


def test_validate_and_test_read_all_of_a_file_that_fit_has_not_seen(run, tmp_path, capsys, tiny_data):
    shutil.copy(tiny_data / "validation.jsonl", tmp_path / "mine.jsonl")
    for command, prefix in (("validate", "val"), ("test", "test")):
        main([command, str(run), "--data.path", str(tmp_path / "mine.jsonl")])
        assert f"{prefix}/rows 40 of 40\n" in capsys.readouterr().out


def test_an_export_of_the_words_of_the_data(run, tmp_path, capsys):
    """It is evaluated with its own tokenizer, and says how much of the vocabulary is left."""
    main(["export", str(run), str(tmp_path / "out"), "--vocabulary", "data"])
    said = capsys.readouterr().out
    assert "26 of 100 pieces are left; 0 of 100 training inputs and 0 of 40 dev inputs have other pieces" in said
    main(["validate", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert capsys.readouterr().out.splitlines()[0] == f"val/accuracy {report['compressed']['metric']:.6f}"


@pytest.mark.parametrize(
    "option",
    [
        ("--data.validation_examples", "30"),
        ("--data.max_length", "8"),
        ("--model.teacher", "x"),
        ("--seed_everything", "3"),
    ],
)
def test_a_run_is_exported_on_its_own_data(option, run, tmp_path, capsys):
    """The models of its stages were measured on these rows, as they were read."""
    words = "is for an export; a run is measured on its own data"
    assert words in fails(capsys, "export", run, tmp_path / "out", *option)


def test_a_run_is_exported_on_the_dev_rows_that_measured_it(run, tmp_path, capsys, tiny_data):
    """Else its report would compare a metric on these with one on other rows; elsewhere the same rows are as good."""
    data, moved = shutil.copytree(tiny_data, tmp_path / "data"), shutil.copytree(run, tmp_path / "run")
    rewrite(config := moved / "config.yaml", config.read_text().replace(str(tiny_data), str(data)))
    main(["export", str(moved), str(tmp_path / "same")])
    first, *rows = (data / "validation.jsonl").read_text().splitlines()
    other = json.loads(first)
    (data / "validation.jsonl").write_text("\n".join([json.dumps(other | {"label": 1 - other["label"]}), *rows]) + "\n")
    line = fails(capsys, "export", moved, tmp_path / "other")
    assert line.endswith("have changed since they were measured; give the same")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("same", [False, "unknown", True])
def test_integers_are_measured_on_the_rows_of_the_report(same, run, tmp_path, capsys, tiny_data):
    """Else the metric of the program is compared with that of the model on other rows."""
    data = shutil.copytree(tiny_data, tmp_path / "data")
    rows = [json.loads(line) for line in (data / "validation.jsonl").read_text().splitlines()]
    other = [row if same is True else row | {"label": 1 - row["label"]} for row in rows]
    (data / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    line = ["export", run / "export", tmp_path / "out", "--format", "onnx", "--dtype", "int8", "--data.path", data]
    if same == "unknown":  # of an earlier version: the metric is compared
        line[1] = shutil.copytree(run / "export", tmp_path / "old")
        report = json.loads((line[1] / "report.json").read_text())
        del report["data"]["dev"]
        rewrite(line[1] / "report.json", json.dumps(report))
    if same is not True:
        words = "give the rows it was measured on" if same else "was measured on other dev rows; give those"
        assert words in fails(capsys, *line)
        return
    main(list(map(str, line)))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert abs(report["program"]["metric"] - report["compressed"]["metric"]) < 0.2
    main(["evaluate", str(tmp_path / "out"), "--data.path", str(data)])
    assert "its weights in float are read; report.json has the metric of its program" in capsys.readouterr().err
