"""Data sets of the hub: by name, with a revision, and the folders of downloaded ones."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import as_a_new_process
from mistakes import fails

from lit_compress.data.datamodule import DataModule
from lit_compress.data.sources import has_split, load_split_files
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

ROWS = {"sentence": ["good one", "bad one", "so warm", "dull"] * 10, "label": [1, 0, 1, 0] * 10, "idx": list(range(40))}
CARD = """---
license: other
configs:
- config_name: other
  data_files: other.csv
- config_name: {name}
  data_files:
  - split: train
    path: {name}/train-*
  - split: validation
    path: {name}/validation-*
---
# rows
"""


def parquet(rows):
    made = pa.BufferOutputStream()
    pq.write_table(pa.table(rows), made)
    return made.getvalue().to_pybytes()


def glue(rows=ROWS):
    part = {name: values[:20] for name, values in rows.items()}, {name: values[20:] for name, values in rows.items()}
    return {
        "README.md": CARD.format(name="sst2").encode(), "other.csv": b"a,b\n1,2\n",
        "sst2/train-00000-of-00002.parquet": parquet(part[0]), "sst2/train-00001-of-00002.parquet": parquet(part[1]),
        "sst2/validation-00000-of-00001.parquet": parquet(part[0]),
    }  # fmt: skip


def test_a_task_reads_its_configuration_of_the_hub(hub, tiny_backbone):
    commit = hub.add("nyu-mll/glue", glue(), kind="datasets")
    data = DataModule("sst2", str(tiny_backbone))
    data.setup("fit")
    assert data.train_size() == 40 and data.validation_size() == 20
    assert not hub.asked("other.csv") and hub.asked(f"resolve/{commit}/sst2/train-00000-of-00002.parquet")
    assert not has_split(get_task("sst2"), None, "test")
    number = len(hub.asked())
    again = DataModule("sst2", str(tiny_backbone), revision=commit)
    assert again.fingerprint() == data.fingerprint() and len(hub.asked()) == number
    line = "'sst2' split 'train' row 1"
    hub.add("nyu-mll/glue", glue(ROWS | {"label": [7] * 40}), kind="datasets", revision="broken")
    with pytest.raises(UserError, match=f"data.task: {line}"):
        DataModule("sst2", str(tiny_backbone), revision="broken").setup("fit")


@pytest.mark.parametrize("given", ["me/rows", "me/rows@main", "folder"])
def test_a_data_set_of_anybody(given, hub, tmp_path, tiny_backbone):
    """Its name, or the folder of a download."""
    files = {"README.md": b"# rows\n", "data/train-00000-of-00001.parquet": parquet(ROWS),
             "data/test-00000-of-00001.parquet": parquet(ROWS)}  # fmt: skip
    hub.add("me/rows", files, kind="datasets")
    if given == "folder":
        for name, content in files.items():
            (tmp_path / "rows" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "rows" / name).write_bytes(content)
        given = str(tmp_path / "rows")
    named = load_split_files(get_task("sst2"), DataModule("sst2", str(tiny_backbone), given).path, ["train", "test"])
    assert len(named["train"]) == len(named["test"]) == 40
    from lit_compress.tasks.records import Custom

    own = DataModule("custom", str(tiny_backbone), given, custom=Custom(text="sentence"))
    own.setup("fit")
    assert own.record.labels == ("0", "1") and own.train_size() == 36 and own.validation_size() == 4


@pytest.mark.parametrize("given", ["me/glue", "folder"])
def test_one_of_several_configurations_is_chosen(given, hub, tmp_path, tiny_backbone, capsys):
    """Without a choice nothing is downloaded, and one line names all; a run keeps the choice."""
    from lit_compress.tasks.records import Custom

    files = glue()
    hub.add("me/glue", files, kind="datasets")
    if given == "folder":
        for name, content in files.items():
            (tmp_path / "rows" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "rows" / name).write_bytes(content)
        given = str(tmp_path / "rows")
    words = ["fit", "--model", "SVD", "--model.backbone", str(tiny_backbone), "--data.path", given]
    line = fails(capsys, *words, "--data.task", "custom", "--data.custom.text", "sentence")
    assert f"data.path: '{given}' has several configurations: other, sst2; choose one with --data.task custom " in line
    assert line.endswith("--data.custom.configuration other") and not hub.asked(".parquet")
    own = DataModule("custom", str(tiny_backbone), given, custom=Custom(text="sentence", configuration="sst2"))
    own.setup("fit")
    assert own.train_size() == 40 and own.validation_size() == 20
    with pytest.raises(UserError, match="several configurations: other, sst2, none is called 'sst'"):
        DataModule("custom", str(tiny_backbone), given, custom=Custom(text="sentence", configuration="sst"))


def test_files_called_by_their_splits_are_read_as_in_any_folder(hub, tiny_backbone):
    hub.add("me/rows", {"train.csv": b"text,label\n" + b"a,x\nb,y\n" * 20, "README.md": b""}, kind="datasets")
    data = DataModule("custom", str(tiny_backbone), "me/rows")
    data.setup("fit")
    assert data.record.labels == ("x", "y")


def test_the_converted_tables_of_a_script(hub, tiny_backbone):
    hub.add("nyu-mll/glue", {"glue.py": b"", "README.md": b"# x"}, kind="datasets")
    tables = {"sst2/train/0000.parquet": parquet(ROWS), "sst2/validation/0000.parquet": parquet(ROWS),
              "cola/train/0000.parquet": parquet({"a": [1]})}  # fmt: skip
    hub.add("nyu-mll/glue", tables, kind="datasets", revision="refs/convert/parquet")
    data = DataModule("sst2", str(tiny_backbone))
    data.setup("fit")
    assert data.train_size() == 40 and not hub.asked("cola/train")


@pytest.mark.parametrize("layout", ["files", "repository"])
def test_the_test_split_of_mnli(layout, tmp_path, tiny_backbone, capsys):
    rows = {"premise": ["one"] * 12, "hypothesis": ["good"] * 12, "label": [0, 1, 2] * 4, "idx": list(range(12))}
    for split in ("train", "validation_matched", "validation_mismatched", "test_matched"):
        if layout == "files":
            lines = (json.dumps({name: values[i] for name, values in rows.items()}) for i in range(12))
            (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        else:
            (tmp_path / f"{split}-00000-of-00001.parquet").write_bytes(parquet(rows))
    data = DataModule("mnli", str(tiny_backbone), str(tmp_path))
    data.setup("predict")
    assert data.predicted == "test" and len(data.prediction_texts) == 12
    assert "test_matched" in capsys.readouterr().err


def test_what_cannot_be_read_is_one_line(hub, tiny_backbone, capsys, tmp_path):
    hub.add("me/pictures", {"a.png": b"x", "README.md": b""}, kind="datasets")
    hub.add("me/several", glue() | {"README.md": CARD.format(name="a").encode()}, kind="datasets")
    hub.add("me/broken", {"data/train-00000-of-00001.parquet": b"PAR1"}, kind="datasets")
    for name, words in (
        ("me/pictures", "has no tables"), ("me/several", "has several configurations"),
        ("me/nothing", "no folder and no"), ("me/broken", "is no readable parquet file"),
    ):  # fmt: skip
        as_a_new_process()
        with pytest.raises(UserError, match=f"data.path: .*{words}") as error:
            DataModule("sst2", str(tiny_backbone), name).setup("fit")
        assert str(tmp_path) not in str(error.value)
    words = ["fit", "--model", "SVD", "--model.backbone", str(tiny_backbone), "--data.path", "nowhere/rows.csv"]
    assert "no such folder or file" in fails(capsys, *words)


ELSEWHERE = [
    "/etc/passwd", "../rows.csv", "data/../../rows.csv", "~/rows.csv", "\\\\host\\rows.csv", "C:\\rows.csv",
    "http://127.0.0.1:9/rows.csv", "hf://datasets/a/b.csv", "s3://bucket/rows.csv", "file:///etc/passwd",
    "zip://rows.csv::http://127.0.0.1/a.zip", "gzip::rows.csv.gz",
]  # fmt: skip


@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize("form", ["{}", "[good.csv, {}]", "{{train: {}}}", "[{{split: train, path: [{}]}}]"])
def test_a_card_names_no_file_outside_of_its_folder(tmp_path, place, form):
    (tmp_path / "rows.csv").write_text("sentence,label\nsecret,1\n")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "good.csv").write_text("sentence,label\na,1\nb,0\n")
    for field in ("data_files", "data_dir"):
        other = f"{{config_name: other, {field}: {form.format(json.dumps(place))}}}"
        good = "{config_name: default, data_files: good.csv}"
        (folder / "README.md").write_text(f"---\nconfigs: [{other}, {good}]\n---\n")
        with pytest.raises(UserError) as error:
            load_split_files(get_task("sst2"), str(folder), ["train"])
        assert "which is not in the folder" in str(error.value)


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_no_link_leads_out_of_a_data_set(tmp_path, linked):
    secret, folder = tmp_path / "secret", tmp_path / "set"
    for path in (secret, folder / "data"):
        path.mkdir(parents=True)
    (secret / "rows.csv").write_text("sentence,label\nsecret,1\nbad,0\n")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: data/*.csv\n---\n")
    if linked == "file":
        (folder / "data" / "rows.csv").symlink_to(secret / "rows.csv")
    else:
        (folder / "data").rmdir()
        (folder / "data").symlink_to(secret)
    with pytest.raises(UserError, match=r"is a link to '.*secret/rows.csv', outside of its data set"):
        load_split_files(get_task("sst2"), str(folder), ["train"])
    (folder / "own.csv").write_text("sentence,label\na,1\nb,0\n")  # a link to a file of the folder is read
    (folder / "linked.csv").symlink_to("own.csv")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: linked.csv\n---\n")
    assert len(load_split_files(get_task("sst2"), str(folder), ["train"])["train"]) == 2
