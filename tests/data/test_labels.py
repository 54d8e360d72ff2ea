"""How labels are read: blanks around them, numbers with fractions, numbers for classes that have names."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_compress.data.datamodule import DataModule
from lit_compress.tasks.classification import class_number
from lit_compress.tasks.records import Custom, get_task, task_name
from lit_compress.utils import progress
from lit_compress.utils.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(progress, "_noted", set())


def csv(folder, split, *labels):
    lines = ["text,label", *(f"good,{label}" for label in labels)]
    (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")


def module(backbone, folder, **custom):
    return DataModule("custom", backbone, str(folder), custom=Custom(**custom))


def numbers(dm, split):
    dm.setup("test" if split == "test" else "fit")
    return dm._split(split).rows["label"][:]


def test_blanks_around_a_label_make_no_class(tmp_path, backbone):
    csv(tmp_path, "train", "yes", "yes ", " no", "no", "\tyes")
    csv(tmp_path, "validation", "no ")
    dm = module(backbone, tmp_path)
    assert dm.record.labels == ("no", "yes")
    assert numbers(dm, "train") == [1, 1, 0, 0, 1] and numbers(dm, "validation") == [0]


def test_blanks_in_labels_that_are_given_are_left_out_too(tmp_path, backbone):
    csv(tmp_path, "train", "yes ", "no")
    csv(tmp_path, "validation", "no ")
    dm = module(backbone, tmp_path, labels=[" yes", "no"])
    assert dm.record.labels == ("yes", "no") and numbers(dm, "train") == [0, 1]


def test_only_blanks_are_no_label(tmp_path, backbone):
    csv(tmp_path, "train", "yes", "  ", "no")
    with pytest.raises(UserError, match=r"row 2: the label is null"):
        module(backbone, tmp_path)


def test_labels_that_differ_only_in_case_are_noted(tmp_path, backbone, capsys):
    csv(tmp_path, "train", "Yes", "yes", "no")
    assert module(backbone, tmp_path).record.labels == ("Yes", "no", "yes")
    assert "labels 'Yes' and 'yes' differ only in case" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_column_of_fractions_is_no_column_of_classes(tmp_path, backbone, form):
    values = [1.0, 2.0, 3.75, 3.25]
    if form == "csv":
        csv(tmp_path, "train", *values)
    else:
        pq.write_table(pa.table({"text": ["good"] * 4, "label": values}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"row 3: label .*3\.75.* fraction.*kind regression.*data\.custom\.labels"):
        module(backbone, tmp_path)


def test_fractions_are_names_if_they_are_given_as_such(tmp_path, backbone):
    csv(tmp_path, "train", "1.0", "1.5", "2.0")
    csv(tmp_path, "validation", "1.5", "1.0")
    dm = module(backbone, tmp_path, labels=["1.0", "1.5", "2.0"])
    assert numbers(dm, "train") == [0, 1, 2] and numbers(dm, "validation") == [1, 0]


def test_whole_numbers_written_as_fractions_are_whole_numbers(tmp_path, backbone):
    """pandas writes integers so if one of the rows had none."""
    csv(tmp_path, "train", "1.0", "3.0", "1.0")
    csv(tmp_path, "validation", "3", "1.0")
    dm = module(backbone, tmp_path)
    assert dm.record.labels == ("1", "3")
    assert numbers(dm, "train") == [0, 1, 0] and numbers(dm, "validation") == [1, 0]


def test_numbers_are_no_classes_where_the_training_rows_have_names(tmp_path, backbone):
    """Nobody has said that 0 is "good", which is the first by the alphabet only."""
    csv(tmp_path, "train", "poor", "good", "good")
    csv(tmp_path, "test", "0", "1")
    dm = module(backbone, tmp_path)
    with pytest.raises(UserError, match=r"test.csv' row 1: label '0' is none of .*good, poor.*data\.custom\.numbered"):
        dm.setup("test")
    (tmp_path / "validation.csv").write_text("text,label\ngood,good\n")
    assert not dm.record.numbered and not get_task(task_name(dm.record)).numbered
    dm = module(backbone, tmp_path, labels=["good", "poor"], numbered=False)  # as a run stores it
    with pytest.raises(UserError, match="label '0' is none of"):
        dm.setup("test")


@pytest.mark.parametrize("settings", [{}, {"numbered": True}], ids=str)
def test_numbers_are_classes_where_their_order_is_given(tmp_path, backbone, settings):
    csv(tmp_path, "train", "0", "1", "1")
    csv(tmp_path, "validation", "poor", "0")
    dm = module(backbone, tmp_path, labels=["poor", "good"], **settings)
    assert numbers(dm, "train") == [0, 1, 1] and numbers(dm, "validation") == [0, 0]


def test_numbers_are_classes_where_a_table_says_which(tmp_path, backbone):
    info = {"info": {"features": {"label": {"names": ["poor", "good"], "_type": "ClassLabel"}}}}
    table = pa.table({"text": ["good"] * 3, "label": [0, 1, 1]})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), tmp_path / "train.parquet")
    csv(tmp_path, "validation", "1", "poor")
    assert numbers(module(backbone, tmp_path), "validation") == [1, 0]


def test_tags_are_read_like_labels(tmp_path, backbone):
    rows = [{"tokens": ["a", "b"], "tags": ["X ", "O"]}, {"tokens": ["a"], "tags": ["X"]}]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dm = module(backbone, tmp_path, kind="tagging")
    assert dm.record.labels == ("O", "X")
    dm.setup("fit")
    assert dm._split("train").rows["tags"][:] == [[1, 0], [1]]


def test_numbers_of_the_shipped_tasks_are_the_hubs():
    assert class_number(get_task("sst2"), "", "1") == class_number(get_task("sst2"), "", 1.0) == 1
    assert class_number(get_task("sst2"), "", "1.0") == class_number(get_task("sst2"), "", "positive ") == 1


def test_the_text_of_a_list_is_no_class(tmp_path, backbone):
    csv(tmp_path, "train", "['joy']", "['anger']")
    with pytest.raises(UserError, match=r"row 1: 'label' is .*a list; kind multi_label reads lists"):
        module(backbone, tmp_path)
