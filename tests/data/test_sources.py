"""Where the rows of a split come from: folders, single files, saved sets, the hub; what is not there is one line."""

import json

import datasets
import pytest
from contents import jsonl, own, parquet, sst2
from hub import as_a_new_process
from mistakes import fails

from lit_compress.data.custom import custom_task
from lit_compress.data.datamodule import DataModule
from lit_compress.data.readers import Place
from lit_compress.data.sources import load_split_files, sources_at
from lit_compress.tasks.records import Custom, get_task
from lit_compress.utils import progress
from lit_compress.utils.errors import UserError

SST2, MNLI = get_task("sst2"), get_task("mnli")
PAIRS = jsonl(*({"premise": "a", "hypothesis": "b", "label": i % 3} for i in range(20)))
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


def glue(rows=ROWS):
    part = {name: values[:20] for name, values in rows.items()}, {name: values[20:] for name, values in rows.items()}
    return {
        "README.md": CARD.format(name="sst2").encode(), "other.csv": b"a,b\n1,2\n",
        "sst2/train-00000-of-00002.parquet": parquet(**part[0]),
        "sst2/train-00001-of-00002.parquet": parquet(**part[1]),
        "sst2/validation-00000-of-00001.parquet": parquet(**part[0]),
    }  # fmt: skip


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content)
    return str(folder)


def load(task, path, splits=None, **place):
    return load_split_files(task, Place(str(path), **place), splits)


def sizes(task, path, splits=None, **place):
    return {name: len(split) for name, split in load(task, path, splits, **place).items()}


# ------------------------------------------------------------------------------------------- files of the user


def test_second_validation_split_may_be_missing(tmp_path):
    write(tmp_path, {"train.jsonl": PAIRS, "dev_matched.jsonl": PAIRS})
    assert sizes(MNLI, tmp_path) == {"train": 20, "validation_matched": 20}
    write(tmp_path, {"validation_mismatched.jsonl": PAIRS})
    assert list(sizes(MNLI, tmp_path)) == ["train", "validation_matched", "validation_mismatched"]


def test_of_two_dev_splits_the_one_with_the_exact_name_is_read(tmp_path):
    """In parts: never both together."""
    write(tmp_path, {f"data/{name}-00000-of-00001.jsonl": sst2(*labels) for name, labels in
                     {"train": (0, 1), "validation": (1,), "dev": (0, 1)}.items()})  # fmt: skip
    assert sizes(SST2, tmp_path) == {"train": 2, "validation": 1}
    (tmp_path / "data/validation-00000-of-00001.jsonl").rename(tmp_path / "data/eval-00000-of-00001.jsonl")
    with pytest.raises(UserError, match="holds 'dev' and 'eval', both could be 'validation'; leave one"):
        sizes(SST2, tmp_path)


@pytest.mark.parametrize("name", ["dev", "val", "valid", "eval"])
def test_a_dev_split_of_any_name_is_read(tmp_path, name):
    """For the user's own task it would be ignored, and rows of train be the dev split."""
    write(tmp_path, {"train.jsonl": own(0, 1) * 10, f"{name}.jsonl": own(0, 1, 1)})
    task = custom_task(Custom(), Place(str(tmp_path)))
    assert sizes(task, tmp_path) == {"train": 20, "validation": 3}
    write(tmp_path, {"validation.jsonl": own(0)})
    assert sizes(task, tmp_path) == {"train": 20, "validation": 1}


def test_files_of_a_second_format_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_noted", set())
    write(
        tmp_path, {"train/a.jsonl": sst2(0, 1), "train/b.csv": b"sentence,label\na,1\n", "validation/a.jsonl": sst2(1)}
    )
    assert sizes(SST2, tmp_path) == {"train": 2, "validation": 1}
    assert "its .jsonl files are read, not its .csv files" in capsys.readouterr().err


def test_every_part_of_a_split_has_its_columns_once(tmp_path):
    parts = {"00000": "sentence,label\na,1\n", "00001": "sentence,label,label\na,1,0\n"}
    write(tmp_path, {f"train-{number}-of-00002.csv": text.encode() for number, text in parts.items()})
    with pytest.raises(UserError, match=r"train-00001-of-00002\.csv' has the column 'label' twice"):
        load(SST2, tmp_path, ["train"])


@pytest.mark.parametrize("name", ["mine.csv", "mine.CSV", "mine.json"])
def test_a_single_file_of_a_shipped_task(tmp_path, name):
    """It is split for fit, read whole for predict, and for validate and test if that is said."""
    rows = [{"sentence": f"text {i}", "label": i % 2} for i in range(20)]
    table = "sentence,label\n" + "".join(f"{row['sentence']},{row['label']}\n" for row in rows)
    file = tmp_path / name
    file.write_bytes(jsonl(*rows) if name.endswith("json") else table.encode())
    loaded = load(SST2, file, ["train", "validation", "test"], seed=1)
    assert [len(split) for split in loaded.values()] == [16, 2, 2]
    texts = [row["sentence"] for row in rows]
    assert sorted(text for split in loaded.values() for text in split["sentence"]) == sorted(texts)
    assert set(sources_at(SST2, Place(str(file)), ["all", "test"])) == {"all", "test"}
    assert load(SST2, file, ["all"])["all"]["sentence"][:] == texts
    assert sizes(SST2, file, ["validation", "test"], whole=True) == {"validation": 20, "test": 20}


def test_a_single_file_of_a_task_with_two_validation_splits(tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(PAIRS)
    assert sizes(MNLI, tmp_path / "mine.jsonl") == {"train": 16, "validation_matched": 2}
    both = ["validation_matched", "validation_mismatched"]
    assert sizes(MNLI, tmp_path / "mine.jsonl", both, whole=True) == {"validation_matched": 20}


WRONG = {
    "another name": ({"trian.csv": b""}, "has no split 'train', e.g. train.csv; it holds trian.csv"),
    "nothing": ({}, "has no split 'train', e.g. train.csv; it is empty"),
    "two files": ({"train.csv": sst2(1), "train.tsv": sst2(1)}, "train.csv and train.tsv, both could be 'train'"),
    "a dev split of another name": ({"train.jsonl": sst2(1), "devel.jsonl": sst2(1)}, "has no split 'validation'"),
    "two dev splits": ({"train.csv": sst2(1), "val.csv": sst2(1), "dev.tsv": sst2(1)}, "'dev' and 'val', both could"),
    "part of a data set": ({"lang=en/train.jsonl": sst2(1)}, "has no split 'train', .* it holds lang=en"),
    "no dev split": ({"train.jsonl": sst2(1)}, "has no split 'validation'; valid: train"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_without_its_files_is_one_line(tmp_path, case):
    files, line = WRONG[case]
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match=line):
        load(SST2, write(tmp_path / "data", files))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "no such folder or file; give a folder"),
        ("new.xlsx", "is no .parquet, .jsonl"),
        ("new.csv.gz", "is no .parquet, .jsonl.* unpack archives"),
    ],
)
def test_a_file_that_cannot_be_meant_is_one_line(tmp_path, name, words):
    if name != "none":
        (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(UserError, match=f"data.path: '.*{name}'.*{words}"):
        load(SST2, tmp_path / name, ["all"])


@pytest.mark.parametrize("form", [{"encoding": "cp1252"}, {"separator": ";"}], ids=str)
def test_a_form_is_for_files(form):
    with pytest.raises(UserError, match=r"is for files; give --data.path, or leave it out"):
        Place(**form)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"broken", "cannot be read by the library datasets"),
        (b"version https://git-lfs.github.com/spec/v1\n", "arrow' is a Git LFS"),
    ],
)
def test_a_broken_saved_dataset(content, words, tmp_path):
    datasets.DatasetDict(train=datasets.Dataset.from_dict(ROWS)).save_to_disk(str(tmp_path / "set"))
    next((tmp_path / "set" / "train").glob("*.arrow")).write_bytes(content)
    with pytest.raises(UserError, match=words):
        load(SST2, tmp_path / "set", ["train"])


def test_a_task_without_data_of_its_own_needs_a_path():
    with pytest.raises(UserError, match=r"data\.task: 'plain_text' has no data on the hub; give --data\.path"):
        load_split_files(get_task("plain_text"), Place(), ["train"])


# ------------------------------------------------------------------------------------------- data sets of the hub


def test_no_hub_is_one_line(hub):
    hub.close()
    with pytest.raises(UserError, match=r"'nyu-mll/glue'.*--data.path"):
        load_split_files(SST2, Place())


def test_hub_rows_are_checked_like_files(hub):
    files = {"sst2/train.jsonl": sst2(0, 1), "sst2/validation.jsonl": sst2(0, 1), "sst2/test.jsonl": sst2(-1)}
    hub.add("nyu-mll/glue", files, kind="datasets")
    assert load_split_files(SST2, Place())["train"]["label"][:] == [0, 1]
    assert set(sources_at(SST2, Place(), [])) == {"train", "validation", "test"}
    with pytest.raises(UserError, match=r"test.jsonl' has no labels"):
        load_split_files(SST2, Place(), ["test"])


def test_a_task_reads_its_configuration_of_the_hub(hub, tiny_backbone):
    commit = hub.add("nyu-mll/glue", glue(), kind="datasets")
    data = DataModule("sst2", str(tiny_backbone))
    data.setup("fit")
    assert data.train_size() == 40 and len(data.val_dataloader()[0].dataset) == 20
    assert not hub.asked("other.csv") and hub.asked(f"resolve/{commit}/sst2/train-00000-of-00002.parquet")
    assert set(sources_at(SST2, Place(), [])) == {"train", "validation"}
    number = len(hub.asked())
    again = DataModule("sst2", str(tiny_backbone), revision=commit)
    assert again.fingerprint() == data.fingerprint() and len(hub.asked()) == number
    hub.add("nyu-mll/glue", glue(ROWS | {"label": [7] * 40}), kind="datasets", revision="broken")
    with pytest.raises(UserError, match=r"data\.task: 'sst2' split 'train' row 1"):
        DataModule("sst2", str(tiny_backbone), revision="broken").setup("fit")


@pytest.mark.parametrize("given", ["me/rows", "me/rows@main", "folder"])
def test_a_data_set_of_anybody(given, hub, tmp_path, tiny_backbone):
    """Its name, or the folder of a download."""
    files = {"README.md": b"# rows\n", "dataset_infos.json": b"{}"}
    files |= {f"data/{split}-00000-of-00001.parquet": parquet(**ROWS) for split in ("train", "test")}
    hub.add("me/rows", files, kind="datasets")
    if given == "folder":
        given = write(tmp_path / "rows", files)
    place = DataModule("sst2", str(tiny_backbone), given).place
    assert {name: len(split) for name, split in load_split_files(SST2, place, ["train", "test"]).items()} == {
        "train": 40, "test": 40
    }  # fmt: skip
    own_task = DataModule("custom", str(tiny_backbone), given, custom=Custom(text="sentence"))
    own_task.setup("fit")
    assert own_task.record.labels == ("0", "1") and (
        own_task.train_size(),
        len(own_task.val_dataloader()[0].dataset),
    ) == (36, 4)


@pytest.mark.parametrize("given", ["me/glue", "folder"])
def test_one_of_several_configurations_is_chosen(given, hub, tmp_path, tiny_backbone, capsys):
    """Without a choice nothing is downloaded, and one line names all; a run keeps the choice."""
    hub.add("me/glue", glue(), kind="datasets")
    if given == "folder":
        given = write(tmp_path / "rows", glue())
    words = ["fit", "--model", "SVD", "--model.backbone", str(tiny_backbone), "--data.path", given]
    line = fails(capsys, *words, "--data.task", "custom", "--data.custom.text", "sentence")
    assert f"data.path: '{given}' has several configurations: other, sst2; choose one with --data.task custom " in line
    assert line.endswith("--data.custom.configuration other") and not hub.asked(".parquet")
    made = DataModule("custom", str(tiny_backbone), given, custom=Custom(text="sentence", configuration="sst2"))
    made.setup("fit")
    assert made.train_size() == 40 and len(made.val_dataloader()[0].dataset) == 20
    with pytest.raises(UserError, match="several configurations: other, sst2, none is called 'sst'"):
        DataModule("custom", str(tiny_backbone), given, custom=Custom(text="sentence", configuration="sst"))


@pytest.mark.parametrize("file", ["train.jsonl", "other/train.jsonl", "train-00000-of-00001.jsonl"])
def test_a_configuration_that_a_folder_lacks_is_refused(file, tmp_path, tiny_backbone):
    """Without it, or with one that is there, next to files called by splits, the rows are read. A file has none."""
    write(tmp_path, {file: sst2(*[0, 1] * 10), "mine/train.jsonl": sst2(*[0, 1] * 5)})

    def rows(configuration=None, place=tmp_path):
        custom = Custom(text="sentence", label="label", configuration=configuration)
        data = DataModule("custom", str(tiny_backbone), str(place), custom=custom)
        data.setup("fit")
        return data.train_size()

    assert rows("mine") == 8
    with pytest.raises(UserError, match=r"data\.custom\.configuration: .* has no 'sst2'; leave it out"):
        rows("sst2")
    with pytest.raises(UserError, match=r"data\.custom\.configuration: .* has no 'mine'; leave it out"):
        rows("mine", tmp_path / file)
    if file == "train.jsonl":
        assert rows() == 16


@pytest.mark.parametrize("layout", ["{}.jsonl", "{}-00000-of-00001.jsonl", "mnli/{}/0000.jsonl"])
def test_the_test_split_of_mnli(layout, tmp_path, capsys):
    splits = ("train", "validation_matched", "validation_mismatched", "test_matched")
    write(tmp_path, {layout.format(split): PAIRS for split in splits})
    assert list(sizes(MNLI, tmp_path)) == [*splits[:3]] and "test" in sources_at(MNLI, Place(str(tmp_path)), [])
    assert sizes(MNLI, tmp_path, ["test"]) == {"test": 20}
    assert "test_matched" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("me/pictures", "has no tables"), ("me/nothing", "no folder and no"),
        ("me/broken", "cannot be read: "), ("me/carded", "cannot be read by the library datasets"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(name, words, hub, tiny_backbone, tmp_path):
    hub.add("me/pictures", {"a.png": b"x", "README.md": b""}, kind="datasets")
    hub.add("me/broken", {"data/train-00000-of-00001.parquet": b"PAR1"}, kind="datasets")
    tables = dict.fromkeys(("sst2/train-0.parquet", "sst2/validation-0.parquet"), b"PAR1")
    hub.add("me/carded", {"README.md": CARD.format(name="sst2").encode(), **tables}, kind="datasets")
    as_a_new_process()
    with pytest.raises(UserError, match=f"data.path: .*{words}") as error:
        DataModule("sst2", str(tiny_backbone), name).setup("fit")
    assert str(tmp_path) not in str(error.value)


ELSEWHERE = [
    "/etc/passwd", "../rows.csv", "data/../../rows.csv", "~/rows.csv", "\\\\host\\rows.csv", "C:\\rows.csv",
    "http://127.0.0.1:9/rows.csv", "s3://bucket/rows.csv", "zip://rows.csv::http://127.0.0.1/a.zip", "gzip::a.csv.gz",
]  # fmt: skip


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_card_names_no_file_outside_of_its_folder(tmp_path, place):
    write(tmp_path, {"rows.csv": b"sentence,label\nsecret,1\n", "set/good.csv": b"sentence,label\na,1\nb,0\n"})
    for form in ("{}", "[good.csv, {}]", "{{train: {}}}", "[{{split: train, path: [{}]}}]"):
        for field in ("data_files", "data_dir"):
            other = f"{{config_name: other, {field}: {form.format(json.dumps(place))}}}"
            good = "{config_name: default, data_files: good.csv}"
            (tmp_path / "set" / "README.md").write_text(f"---\nconfigs: [{other}, {good}]\n---\n")
            with pytest.raises(UserError, match="which is not in the folder"):
                load(SST2, tmp_path / "set", ["train"])
    write(tmp_path / "set", {"train.csv": b"sentence,label\na,1\n"})  # the card is not needed then
    assert len(load(SST2, tmp_path / "set", ["train"])["train"]) == 1
