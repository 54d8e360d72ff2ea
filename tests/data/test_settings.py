"""How vectors are made: as the folder of the teacher or of the backbone says, also if they are named."""

from lit_compress.data.datamodule import DataModule
from lit_compress.data.settings import pooling_of
from lit_compress.tasks.records import Custom
from lit_compress.tasks.sentences import Pooling, write_pooling

CLS, LAST = Pooling("cls", max_length=20), Pooling("lasttoken", normalize=False, max_length=20)


def sentence_model(folder, pooling):
    """Write the files of a sentence model, without its net."""
    folder.mkdir()
    write_pooling(folder, 32, 20, pooling)
    return folder


def test_the_way_of_the_teacher_counts(tmp_path):
    one, other = sentence_model(tmp_path / "cls", CLS), sentence_model(tmp_path / "last", LAST)
    (tmp_path / "plain").mkdir()
    assert pooling_of(str(one)) == pooling_of(str(one), str(tmp_path / "plain")) == CLS
    assert pooling_of(str(one), str(other)) == LAST
    assert pooling_of(str(tmp_path / "plain")) == Pooling()


def test_a_named_model_pools_as_its_repository_says(hub, tmp_path, tiny_backbone):
    (tmp_path / "texts.csv").write_text("text\n" + "a film\n" * 12)
    files = {path.name: path.read_bytes() for path in tiny_backbone.iterdir()}
    for name, pooling in (("me/cls", CLS), ("me/last", LAST)):
        folder = sentence_model(tmp_path / name.replace("/", "-"), pooling)
        hub.add(name, files | {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    asked = {"path": str(tmp_path / "texts.csv"), "custom": Custom("embedding")}
    assert DataModule("custom", "me/cls", **asked).record.pooling == CLS
    assert DataModule("custom", "me/cls", teacher="me/last", **asked).record.pooling == LAST


def test_a_line_of_another_file_is_a_text_whatever_a_row_of_the_task_is(tmp_path, tiny_backbone):
    (tmp_path / "texts.txt").write_text("a film\na great plot\n")
    (tmp_path / "pairs.csv").write_text("text,document\n" + "a film,a plot\n" * 12)
    data = DataModule(
        "custom", str(tiny_backbone), str(tmp_path / "pairs.csv"), custom=Custom("embedding", ["text", "document"])
    )
    [batch] = data.with_texts(str(tmp_path / "texts.txt")).train_dataloader()
    assert batch["input_ids"].shape[0] == 2 and not any(name.endswith("_2") for name in batch)
    assert data.record.text == ("text", "document")
