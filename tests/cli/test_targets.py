"""validate, test and predict on whatever holds a net; what cannot be evaluated, or written, is said before the work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import datasets
import pytest
import yaml
from mistakes import configure, fails
from safetensors.torch import load_file, save_file

import lit_compress as lc
from lit_compress.__main__ import main
from lit_compress.cli.lines import read_line
from lit_compress.cli.options import CommandLine
from lit_compress.cli.targets import parse_stored
from lit_compress.cli.words import Line
from lit_compress.run.folder import Run
from lit_compress.utils import progress
from lit_compress.utils.errors import UserError


@pytest.fixture
def data(tiny_data):
    return ["--data.task", "sst2", "--data.path", str(tiny_data)]


def value(capsys, *args):
    capsys.readouterr()
    main([str(arg) for arg in args])
    return float(capsys.readouterr().out.split()[1])


def other_labels(tiny_data, folder):
    """The data under the names of another task, in its columns: RTE's."""
    folder.mkdir()
    for path in tiny_data.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{"sentence1": row["sentence"], "sentence2": "a film", "label": row["label"]} for row in rows]
        (folder / path.name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_any_fine_tuned_model_is_evaluated(run, model, data, capsys, tmp_path):
    """Before and after in the same words: the dense net with and without its run gives what the run measured."""
    expected = json.loads((run / "report.json").read_text())["dense"]["metric"]
    assert value(capsys, "validate", model, *data) == pytest.approx(expected, abs=1e-6)
    assert value(capsys, "validate", run / "dense" / "net") == pytest.approx(expected, abs=1e-6)
    assert value(capsys, "validate", run / "retrain" / "net") == value(capsys, "validate", run)
    out = tmp_path / "new" / "p.jsonl"
    main(["predict", str(model), *data, "--output", str(out)])
    assert json.loads(out.read_text().splitlines()[0])["label"] in ("negative", "positive")


def test_one_saved_dataset_is_read_as_a_file_is(model, tiny_data, capsys, tmp_path):
    """All of its rows; the data of the net itself keeps its splits, and a note says how many rows they have."""
    rows = [json.loads(line) for line in (tiny_data / "train.jsonl").read_text().splitlines()][:30]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    data = ["--data.task", "sst2", "--data.path", str(tmp_path / "saved")]
    out = tmp_path / "p.jsonl"
    main(["predict", str(model), *data, "--output", str(out)])
    assert [json.loads(line)["sentence"] for line in out.read_text().splitlines()] == [row["sentence"] for row in rows]
    capsys.readouterr()
    main(["validate", str(model), *data])
    assert "val/rows 30 of 30\n" in capsys.readouterr().out
    main(["factorize", str(model), str(tmp_path / "small"), *data, "--density", "0.5", "--weighting", "none"])
    assert "3 of 30 rows are its validation split" in capsys.readouterr().err
    for folder, count in ((tmp_path / "saved", 3), (tmp_path / "other", 29)):
        if not folder.exists():
            datasets.Dataset.from_list(rows[1:]).save_to_disk(folder)
        main(["validate", str(tmp_path / "small"), "--data.path", str(folder)])
        assert f"val/rows {count} of {count}\n" in capsys.readouterr().out


def test_a_model_of_the_users_own_task_names_the_classes(model, tiny_data, capsys, tmp_path):
    """Without training rows: its configuration does."""
    texts = tmp_path / "texts.csv"
    texts.write_text("text\na great film\na dull plot\n")
    out = tmp_path / "p.jsonl"
    main(["predict", str(model), "--data.path", str(texts), "--output", str(out)])  # a file is of the user's own task
    assert {json.loads(line)["label"] for line in out.read_text().splitlines()} <= {"negative", "positive"}


def test_labels_are_in_the_order_of_the_trained_head(model, tiny_data, capsys, tmp_path):
    """However the data writes them: names, numbers of the head, numbers of a table with another order."""
    configure(model, id2label={0: "Negative", 1: "Positive"}, label2id={"Negative": 0, "Positive": 1})
    rows = [json.loads(line) for line in (tiny_data / "train.jsonl").read_text().splitlines()]
    texts, labels = [row["sentence"] for row in rows], [row["label"] for row in rows]
    names, scores = ["negative", "positive"], []
    table = datasets.ClassLabel(names=["positive", "negative"])
    for number, (own, kind) in enumerate([
        (labels, datasets.Value("int64")), ([names[i] for i in labels], datasets.Value("string")),
        ([1 - i for i in labels], table),
    ]):  # fmt: skip
        features = datasets.Features(text=datasets.Value("string"), label=kind)
        made = datasets.Dataset.from_dict({"text": texts, "label": own}, features=features)
        made.save_to_disk(place := tmp_path / str(number))
        data = ["--data.task", "custom", "--data.path", place]
        scores.append(value(capsys, "validate", model, *data))
        main(
            ["factorize", str(model), str(tmp_path / "out"), *map(str, data), "--density", "0.9", "--weighting", "none"]
        )
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["config"]["data"]["custom"]["labels"] == ["Negative", "Positive"]
    assert scores[0] == scores[1] == scores[2]
    for others in (["bad", "good"], ["negative", "1"]):  # a name is no number of the head
        made = made.cast_column("label", datasets.ClassLabel(names=others))
        made.save_to_disk(place := tmp_path / others[0])
        line = fails(capsys, "validate", model, "--data.task", "custom", "--data.path", place)
        assert f"'label' has the classes {', '.join(others)}, the labels are Negative, Positive; name both" in line


def test_what_is_no_target_is_one_line(model, data, capsys, tmp_path):
    assert "no folder '/nowhere'; give a run folder, an export or a model" in fails(capsys, "validate", "/nowhere")
    assert "name what it was fine-tuned on, e.g. --data.task sst2" in fails(capsys, "validate", model)
    (tmp_path / "empty").mkdir()
    assert "is neither a run (config.yaml)" in fails(capsys, "test", tmp_path / "empty", *data)
    path = model / "model.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if "classifier" not in k}, path, metadata={"format": "pt"})
    assert "is not fine-tuned, it has no 'classifier.bias'" in fails(capsys, "validate", model, *data)


@pytest.mark.parametrize("target", ["", "export", "dense/net", "model"])
def test_a_head_of_another_task_is_refused(target, run, model, tiny_data, capsys, tmp_path):
    folder = model if target == "model" else run / target
    other = other_labels(tiny_data, tmp_path / "rte")
    line = fails(capsys, "validate", folder, "--data.task", "rte", "--data.path", other)
    assert "has the labels negative, positive; rte has entailment, not_entailment" in line
    line = fails(capsys, "validate", folder, "--data.task", "stsb", "--data.path", other)
    assert "has 2 labels, stsb has 1" in line
    line = fails(capsys, "validate", folder, "--data.task", "conll2003", "--data.path", other)
    assert "is for classification, task 'conll2003' is tagging" in line
    if target == "export":  # whose card would have the other labels
        program = ("export", folder, tmp_path / "out", "--format", "onnx", "--data.path", other, "--data.task")
        assert "has the labels negative, positive; rte has" in fails(capsys, *program, "rte")
        assert "has 2 labels, stsb has 1" in fails(capsys, *program, "stsb")


def test_the_same_labels_on_other_data_are_no_mistake(run, tiny_data, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_noted", set())
    task = ["--data.task", "custom", "--data.custom.text", "[sentence]", "--data.custom.labels", "[negative, positive]"]
    main(["validate", str(run), *task, "--data.path", str(tiny_data)])
    said = capsys.readouterr()
    assert "was trained on sst2, not on custom" in said.err and "val/accuracy" in said.out


def test_results_of_others_are_not_replaced(run, model, data, capsys, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    net = other / "export"
    line = f"export: '{net}' is the result of a run; give another folder"
    for source in (run, run / "export"):
        assert line in fails(capsys, "export", source, net)
    assert line in fails(capsys, "factorize", model, net, *data)
    with pytest.raises(UserError, match="is the result of a run"):
        lc.load(run).save_pretrained(net)
    weights = (net / "model.safetensors").read_bytes()
    line = f"--output: '{net / 'model.safetensors'}' holds something that is not a prediction; give another file"
    assert line in fails(capsys, "predict", run, "--output", net / "model.safetensors")
    assert (net / "model.safetensors").read_bytes() == weights
    main(["export", str(net), str(net)])
    (tmp_path / "empty").touch()
    for _ in range(2):
        main(["predict", str(other), "--output", str(tmp_path / "empty")])


def test_unwritable_places_are_refused_before_the_work(run, model, data, short_run, capsys, tmp_path, monkeypatch):
    def work(*_, **__):
        raise AssertionError("the work was begun")

    for name in ("commands.export_run", "factorizing.load_model", "commands.evaluate_net", "targets.load_net"):
        monkeypatch.setattr(f"lit_compress.cli.{name}", work)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    places = [
        (tmp_path / "file", "is a file; give a new or empty folder"),
        (tmp_path / "file" / "under", "is a file; nothing can be written under it"),
        ("/proc/nowhere/out", "cannot write to '/proc/nowhere/out'"),
        (tmp_path / "mine", "holds something that is not a"),
    ]
    for place, words in places:
        assert words in fails(capsys, "export", run, place)
        assert words in fails(capsys, "factorize", model, place, *data)
        assert words in fails(capsys, "fit", "--model", "SVD", *short_run, "--run_dir", place)
    files = [
        (tmp_path / "mine", "output: '", "is a folder; give a file"),
        (tmp_path / "file" / "p.jsonl", "output: '", "is a file; nothing can be written under it"),
        ("/proc/p.jsonl", "output: cannot write to '/proc/p.jsonl'", "give another place"),
    ]
    for place, *words in files:
        line = fails(capsys, "predict", run, "--output", place)
        assert all(word in line for word in words), line
    assert (tmp_path / "file").read_text() == "mine" and len(list((tmp_path / "mine").iterdir())) == 1


def test_names_like_numbers_stay_text_in_a_run():
    """Of a model, a folder, a file and columns: all that is stored is read again as it was given."""
    given = {
        "model.backbone": "1e5",
        "model.teacher": "1e-6",
        "run_dir": "1e-4",
        "data.path": "0o7",
        "data.custom.label": "1e3",
    }
    args = ["--model=SVD", "--data.task=sst2", "--data.custom.text=[2e2,b]", *(f"--{k}={v}" for k, v in given.items())]
    stored = CommandLine(read_line("fit", args)).dump()
    init = stored["model"]["init_args"]
    assert [init["backbone"], init["teacher"], stored["run_dir"], stored["data"]["path"]] == [
        "1e5",
        "1e-6",
        "1e-4",
        "0o7",
    ]
    again = parse_stored(yaml.safe_load(yaml.safe_dump(stored, sort_keys=False)), Line("evaluate"), Path("1e9")).dump()
    assert again["model"]["init_args"]["backbone"] == "1e9"
    assert again["run_dir"] == "1e-4" and again["data"]["custom"] == stored["data"]["custom"]


@pytest.mark.parametrize("option", ["model.teacher", "model.backbone"])
def test_another_thing_in_place_of_a_model_is_refused_before_training(option, run, model, short_run, capsys, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    for place, words in (
        (run / "export", "is compressed already"),
        (run / "retrain" / "net", "is compressed already"),
        (model, "has no tokenizer; save it there with tokenizer.save_pretrained"),
        (run, f"{option}: '{run}' is a run, not a model; give its model, {run / 'dense' / 'net'}"),
        (tmp_path, f"{option}: '{tmp_path}' holds no config.json"),
        ("/nowhere", f"{option}: no folder '/nowhere'"),
    ):
        line = fails(capsys, "fit", "--model", "SVD", *short_run, "--run_dir", tmp_path / "new", f"--{option}", place)
        assert line.startswith(f"error: {option}: ") and words in line
    assert not (tmp_path / "new").exists()


def test_the_usual_dtype_is_that_of_the_run(run, tmp_path, monkeypatch):
    """``--dtype auto`` is the choice of the run, as without the option."""
    stored = Run(shutil.copytree(run, tmp_path / "run"))
    config = yaml.safe_load((stored.folder / "config.yaml").read_text())
    config["export"]["dtype"] = "bfloat16"
    stored.keep("config.yaml", yaml.safe_dump(config))
    asked = []

    def export_run(run, out, data, choices):
        asked.append(choices.dtype)
        raise UserError("export: enough")

    monkeypatch.setattr("lit_compress.cli.commands.export_run", export_run)
    for more in ([], ["--dtype", "auto"], ["--dtype", "float32"]):
        with pytest.raises(SystemExit):
            main(["export", str(stored.folder), str(tmp_path / "out"), *more])
    assert asked == ["bfloat16", "bfloat16", "float32"]
