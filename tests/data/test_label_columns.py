"""Labels with a column of 0 and 1 each, as in Jigsaw's comments: in all formats; what cannot be meant is one line."""

import csv
import json
import random

import pytest
from datasets import Dataset
from mistakes import fails, predicted
from tiny import WORDS, write_bert

import lit_compress as lc
from lit_compress.__main__ import main
from lit_compress.data.custom import custom_task
from lit_compress.data.readers import Place
from lit_compress.data.sources import load_split_files
from lit_compress.tasks.records import Custom
from lit_compress.utils.errors import UserError

NAMES = ["toxic", "severe_toxic", "insult"]
KIND = ["--data.custom.kind", "multi_label", "--data.custom.text", "comment_text"]
COLUMNS = ["--data.custom.label", json.dumps(NAMES)]


def rows_of(count, seed=0):
    """Rows as Jigsaw has them; a label is on if one of its words is in the text."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        words = rng.choices(WORDS, k=rng.randint(2, 9))
        on = {name: int(WORDS[i] in words or WORDS[i + 3] in words) for i, name in enumerate(NAMES)}
        rows.append({"id": f"{number:04x}", "comment_text": " ".join(words), **on})
    return rows


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def settings(label=NAMES, labels=None, kind="multi_label"):
    return Custom(kind, text="comment_text", label=label, labels=labels)


def labels_in(file, **asked):
    """Return the record of a file, and the labels of its rows as names."""
    task = custom_task(settings(**asked), Place(str(file)))
    rows = load_split_files(task, Place(str(file), whole=True), ["train"])["train"]
    return task, [[task.labels[number] for number in on] for on in rows[task.label]]


def expected(rows):
    return [[name for name in NAMES if row[name]] for row in rows]


def write(form, folder, rows):
    """Write rows in a format."""
    file = folder / f"data.{form}"
    if form == "csv":
        return write_csv(file, rows)
    if form == "parquet":
        Dataset.from_list(rows).to_parquet(file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    return file


WRITTEN = [(0, 1), (0.0, 1.0), (False, True), ("0", "1"), ("0.0", "1.0"), ("False", "True")]


@pytest.mark.parametrize(
    ("form", "values"), [("csv", (0, 1)), ("parquet", (0, 1)), *(("jsonl", pair) for pair in WRITTEN)]
)
def test_0_and_1_however_they_are_written(tmp_path, form, values):
    """The labels are named by the columns."""
    rows = rows_of(20)
    file = write(form, tmp_path, [row | {name: values[row[name]] for name in NAMES} for row in rows])
    task, found = labels_in(file)
    assert task.labels == task.label_columns == tuple(NAMES) and found == expected(rows)


def test_columns_that_are_named_choose_and_order_the_labels(tmp_path):
    file = write("parquet", tmp_path, rows_of(20))
    assert custom_task(settings(label=["insult", "toxic"]), Place(str(file))).labels == ("insult", "toxic")
    order = ["insult", "toxic", "severe_toxic"]
    task, found = labels_in(file, label=NAMES, labels=order)
    assert task.labels == tuple(order) and found == [sorted(on, key=order.index) for on in expected(rows_of(20))]


def test_blanks_around_the_name_of_a_column_are_left_out(tmp_path):
    rows = [{f" {key}" if key in NAMES else key: value for key, value in row.items()} for row in rows_of(12)]
    task, found = labels_in(write_csv(tmp_path / "data.csv", rows), label=[f" {name}" for name in NAMES])
    assert task.labels == tuple(NAMES) and found == expected(rows_of(12))


# settings, the change of row 5, the format, the line
REFUSED = [
    ({"label": ["toxic"]}, {}, "csv", r"data.custom.label: \[toxic\]: name two or more, each once"),
    ({"label": ["toxic", "toxic"]}, {}, "csv", "name two or more, each once"),
    ({"kind": "classification"}, {}, "csv", "kind classification has one label column; several of 0 and 1 are for"),
    ({"label": ["toxic", "insullt"]}, {}, "csv", "has no column 'insullt'; did you mean 'insult'"),
    ({"label": None}, {}, "csv", r"no column 'labels'.*; a 0 or 1 for each label: --data.custom.label '\[COL"),
    ({"labels": ["a", "b", "c"]}, {}, "csv", r"data.custom.labels: a, b, c: labels with a column each are called like"),
    ({}, {"insult": None}, "csv", "row 5: 'insult' is null; give 0 or 1"),
    ({}, {"insult": None}, "parquet", "row 5: 'insult' is null; give 0 or 1"),
    ({}, {"insult": 2}, "csv", "row 5: 'insult' is '2'; give 0 or 1"),
    ({}, {"insult": -1}, "jsonl", "row 5: 'insult' is -1; give 0 or 1"),
    ({}, "insult", "jsonl", "row 5 has no 'insult'"),
]


@pytest.mark.parametrize(("asked", "change", "form", "line"), REFUSED)
def test_it_is_refused_in_one_line(tmp_path, asked, change, form, line):
    rows = rows_of(12)
    rows[4] = rows[4] | change if isinstance(change, dict) else {k: v for k, v in rows[4].items() if k != change}
    with pytest.raises(UserError, match=line):
        labels_in(write(form, tmp_path, rows), **asked)


def test_one_object_of_0_and_1_a_row_is_the_same(tmp_path):
    """As nested columns: ``{"text": ..., "labels": {"toxic": 1, "insult": 0}}``."""
    rows = rows_of(12)
    nested = [{"comment_text": row["comment_text"], "labels": {name: row[name] for name in NAMES}} for row in rows]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, nested)))
    task, found = labels_in(tmp_path / "data.jsonl", label=None)
    assert sorted(task.labels) == sorted(NAMES) and list(map(sorted, found)) == list(map(sorted, expected(rows)))


@pytest.mark.slow
def test_a_model_of_another_order_is_measured_in_its_order(tmp_path, capsys):
    """The columns bring the names, so that the order of the model's labels does not matter to them."""
    (data := tmp_path / "data").mkdir()
    write_csv(data / "train.csv", rows_of(48))
    write_csv(data / "validation.csv", rows_of(24, 1))
    task = custom_task(settings(labels=[*reversed(NAMES)]), Place(str(data)))
    model = write_bert(tmp_path / "model", task, dropout=0.0, initializer_range=0.3)
    main(["validate", str(model), *KIND, *COLUMNS, "--data.path", str(data)])
    found = capsys.readouterr().out.split(" (")[0]
    scores = lc.evaluate(str(model), data=Dataset.from_list(rows_of(24, 1)), text="comment_text", label=NAMES)
    assert f"micro_f1 {scores['micro_f1']:.6f}" in " ".join(found.split())
    config = json.loads((model / "config.json").read_text())
    names = {number: name.upper() for number, name in config["id2label"].items()}
    (model / "config.json").write_text(json.dumps(config | {"id2label": names}))  # another case is the same column
    main(["validate", str(model), *KIND, *COLUMNS, "--data.path", str(data)])
    assert capsys.readouterr().out.split(" (")[0] == found
    (model / "config.json").write_text(json.dumps(config))
    unscored = [row | dict.fromkeys(NAMES, -1) for row in rows_of(5)]  # as the test set of the competition
    test = write_csv(tmp_path / "test.csv", unscored)
    lines = predicted(model, tmp_path / "p", *KIND, "--data.path", test)
    assert len(lines) == 5 and lines[0]["id"] == "0000" and list(lines[0]["probabilities"]) == [*reversed(NAMES)]
    wrong = ["--data.custom.labels", json.dumps(NAMES)]
    line = fails(capsys, "factorize", model, tmp_path / "out", *KIND, *COLUMNS, *wrong, "--data.path", data)
    assert "leave --data.custom.labels out" in line and not (tmp_path / "out").exists()
