"""The user's own files: columns by name, labels found, one file split; and whole runs on every kind of task."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_compress.__main__ import main
from lit_compress.data.datamodule import DataModule
from lit_compress.tasks import KINDS
from lit_compress.tasks.records import TASKS, Custom, get_task, task_name
from lit_compress.utils.errors import UserError


def _module(backbone, path, **options):
    custom = {key: options.pop(key) for key in ("kind", "text", "label", "labels") if key in options}
    return DataModule("custom", backbone, str(path), batch_size=4, custom=Custom(**custom), **options)


def _write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


REVIEWS = [{"review": f"film {i} good", "other": "bad", "stars": ["low", "high", "none"][i % 3]} for i in range(40)]


def test_columns_by_name_and_labels_in_order(tmp_path, backbone):
    dm = _module(backbone, _write(tmp_path / "a.jsonl", REVIEWS), text=["review", "other"], label="stars")
    assert dm.record.labels == ("high", "low", "none") and dm.record.metrics == ("accuracy", "macro_f1")
    dm.setup("fit")
    rows = dm._split("train").rows
    assert rows.column_names == ["review", "other", "stars"]
    for row in rows:
        assert dm.record.labels[row["stars"]] == REVIEWS[int(row["review"].split()[1])]["stars"]


@pytest.mark.parametrize("form", ["plain", "brackets", "yaml", "yaml list"])
def test_one_text_column_needs_no_brackets(tmp_path, tiny_backbone, form):
    """On the command line and in a config; what is stored is read again alike."""
    from lit_compress.cli.options import CommandLine

    file, given = _write(tmp_path / "a.jsonl", REVIEWS), []
    if form.startswith("yaml"):
        text = "[review]" if form.endswith("list") else "review"
        (tmp_path / "mine.yaml").write_text(f"data: {{custom: {{text: {text}}}}}\n")
        given = ["--config", str(tmp_path / "mine.yaml")]
    else:
        given = ["--data.custom.text", "[review]" if form == "brackets" else "review"]
    words = ["--model", "SVD", "--data.task", "custom", "--data.path", str(file), "--data.custom.label", "stars"]
    cli = CommandLine([*words, "--model.backbone", str(tiny_backbone), *given], "fit")
    assert cli.build().data.record.text == ("review",)
    assert cli.dump()["data"]["custom"]["text"] == ("review" if form in ("plain", "yaml") else ["review"])


def test_the_same_file_read_with_other_settings(tmp_path, backbone):
    """What was read before is in the cache: other class numbers, and answers that are now needed."""
    file = _write(tmp_path / "a.jsonl", REVIEWS)
    for labels in (["high", "low", "none"], ["none", "low", "high"]):
        dm = _module(backbone, file, text=["review"], label="stars", labels=labels)
        dm.setup("fit")
        assert all(
            labels[row["stars"]] == REVIEWS[int(row["review"].split()[1])]["stars"] for row in dm._split("train").rows
        )
    rows = [{"question": "a", "context": "b c", "answers": "c" if i % 2 else ""} for i in range(10)]
    file = _write(tmp_path / "qa.jsonl", rows)
    _module(backbone, file, kind="span_qa", null_threshold=0.0, max_length=32).setup("fit")
    with pytest.raises(UserError, match="row 1: the question has no answer"):
        _module(backbone, file, kind="span_qa", max_length=32).setup("fit")


def test_one_file_is_split_in_one_way_for_all_seeds(tmp_path, backbone):
    file = _write(tmp_path / "a.jsonl", REVIEWS)

    def texts(**seeds):
        dm = _module(backbone, file, text=["review"], label="stars", **seeds)
        dm.setup("fit")
        dm.setup("test")
        return {name: set(dm._split(name).rows["review"]) for name in ("train", "validation", "test")}

    parts = texts(seed=1)
    assert {name: len(part) for name, part in parts.items()} == {"train": 32, "validation": 4, "test": 4}
    assert set().union(*parts.values()) == {row["review"] for row in REVIEWS}
    assert texts() == texts(seed=2) == parts != texts(split_seed=1)


def test_a_test_file_is_left_alone(tmp_path, backbone):
    _write(tmp_path / "train.jsonl", REVIEWS)
    _write(tmp_path / "test.jsonl", REVIEWS[:3])
    dm = _module(backbone, tmp_path, text=["review"], label="stars")
    dm.setup("fit")
    dm.setup("test")
    assert [len(dm._split(name).rows) for name in ("train", "validation", "test")] == [36, 4, 3]


def test_predict_reads_all_of_a_single_file(tmp_path, backbone):
    rows = [{"review": row["review"]} for row in REVIEWS]
    labels = ["high", "low"]
    dm = _module(backbone, _write(tmp_path / "a.jsonl", rows), text=["review"], label="stars", labels=labels)
    assert dm.prediction_texts["review"][:] == [row["review"] for row in rows]


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet"])
def test_formats(tmp_path, backbone, form):
    rows = {"text": ["good", "bad, film", "the"], "label": [2, 1, 2]}
    if form == "parquet":
        pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    else:
        frame = datasets.Dataset.from_dict(rows).to_pandas()
        frame.to_csv(tmp_path / f"train.{form}", sep="," if form == "csv" else "\t", index=False)
    _write(tmp_path / "dev.jsonl", [{"text": "good", "label": 2}])
    dm = _module(backbone, tmp_path)
    dm.setup("fit")
    assert dm.record.labels == ("1", "2") and dm._split("train").rows["label"][:] == [1, 0, 1]


@pytest.mark.parametrize("single", [True, False], ids=["one set", "with splits"])
def test_a_saved_dataset_brings_the_names_of_its_classes(tmp_path, backbone, single):
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["pos", "neg"]))
    rows = datasets.Dataset.from_dict({"text": ["good", "bad"] * 20, "label": [0, 1] * 20}, features=features)
    (rows if single else datasets.DatasetDict(train=rows, validation=rows)).save_to_disk(str(tmp_path / "set"))
    dm = _module(backbone, tmp_path / "set")
    assert dm.record.labels == ("pos", "neg")  # their order, not the alphabet's
    dm.setup("fit")
    train = dm._split("train").rows
    assert len(train) == (32 if single else 40)
    assert all((row["text"] == "good") == (row["label"] == 0) for row in train)


def test_hub_files_in_parquet_bring_them_too(shared, backbone):
    dm = _module(backbone, shared / "data" / "conll2003", kind="tagging", label="ner_tags")
    assert dm.record.labels == TASKS["conll2003"].labels and dm.record.metrics == ("entity_f1",)


def test_tags_without_entities_are_scored_by_word(tmp_path, backbone):
    file = _write(tmp_path / "a.jsonl", [{"words": "the film", "pos": "DET NOUN"}] * 10)
    dm = _module(backbone, file, kind="tagging", text=["words"], label="pos")
    assert dm.record.labels == ("DET", "NOUN") and dm.record.metrics == ("word_accuracy",)
    dm.setup("fit")
    assert dm._split("train").rows[0] == {"words": ["the", "film"], "pos": [0, 1]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_survives_as_text(kind):
    record = next(task for task in TASKS.values() if task.kind == kind)
    assert get_task(task_name(record)) == record and task_name(record) == record.name
    from dataclasses import replace

    own = replace(record, name="custom", labels=("ü", "b"))
    assert get_task(task_name(own)) == own


# ---------------------------------------------------------------- whole runs on real rows


def _take(shared, tmp_path, name, rows, to=None):
    """Copy the first rows of every split."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "validation"):
        table = pq.read_table(shared / "data" / name / f"{split}.parquet").slice(0, rows)
        pq.write_table(table, folder / f"{split}.parquet")
    return folder


RUNS = {
    "conll2003": ("LPAF", "conll2003", 48, ["--data.max_length", "32"], "labels"),
    "squad": ("FWSVD", "squad", 24, ["--data.max_length", "64", "--data.stride", "8"], "answer"),
    "squad_v2": ("LoSparse", "squad_v2", 24, ["--data.max_length", "64"], "answer"),
    "wnli": ("ITP", "glue/wnli", 48, [], "label"),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", RUNS)
def test_fit_validate_predict_on_real_rows(task, shared, tiny_backbone, tmp_path, capsys):
    """A tiny random net: what counts is that every command goes through, and that their numbers agree."""
    method, name, rows, options, answer = RUNS[task]
    source = ["--data.task", task, "--data.path", str(_take(shared, tmp_path, name, rows)), *options]
    given = ["--model.backbone", str(tiny_backbone), "--trainer.accelerator", "cpu", "--data.batch_size", "8",
             "--trainer.enable_progress_bar", "false", "--model.dense.epochs", "1"]  # fmt: skip
    prune = ["--model.prune.epochs", "4"] if method != "FWSVD" else []
    retrain = ["--model.retrain.epochs", "1"] if method in ("LPAF", "FWSVD") else []
    if method in ("LoSparse", "ITP"):
        given = given[:-2]
    run = tmp_path / "run"
    main(["fit", "--model", method, "--model.density", "0.5", *source, *given, *prune, *retrain, "--run_dir", str(run)])
    report = json.loads((run / "report.json").read_text())
    assert report["metric"]["name"] == TASKS[task].metrics[0] and report["compressed"]["kept"] <= 0.5
    capsys.readouterr()
    main(["validate", str(run)])
    values = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    assert float(values[f"val/{TASKS[task].metrics[0]}"]) == pytest.approx(report["compressed"]["metric"], abs=1e-6)
    main(["predict", str(run), "--output", str(tmp_path / "p.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(lines) == rows and all(answer in line for line in lines)


@pytest.mark.slow
def test_fit_validate_predict_on_a_csv_of_ones_own(tiny_backbone, tmp_path, capsys):
    """One file; its labels are in the export, and later commands use those whatever their data holds."""
    names = ["great", "bad"]
    lines = ["review,stars", *(f"{name} {name} {name},{name}" for name in names * 30)]
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
    run, data = tmp_path / "run", ["--data.path", str(tmp_path / "mine.csv")]
    main(["fit", "--model", "SVD", "--model.density", "0.5", "--model.backbone", str(tiny_backbone), "--data.task",
          "custom", "--data.custom.text", "[review]", "--data.custom.label", "stars", *data, "--data.batch_size", "8",
          "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--model.dense.epochs", "8",
          "--model.dense.learning_rate", "3e-3", "--model.retrain.epochs", "1", "--run_dir", str(run)])  # fmt: skip
    config = json.loads((run / "export" / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "great"}
    assert json.loads((run / "report.json").read_text())["compressed"]["metric"] > 0.9
    (tmp_path / "new.csv").write_text("review\ngreat great great\nbad bad bad\n")
    main(["predict", str(run / "export"), "--data.path", str(tmp_path / "new.csv"), "--output", str(tmp_path / "p")])
    found = [json.loads(line) for line in (tmp_path / "p").read_text().splitlines()]
    assert [line["label"] for line in found] == ["great", "bad"]
    capsys.readouterr()
    main(["validate", str(run)])
    assert float(dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())["val/accuracy"]) > 0.9
