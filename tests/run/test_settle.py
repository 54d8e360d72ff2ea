"""Before a run: roundings and shapes that a method has; the plan shows the sizes that are counted."""

import json
from types import SimpleNamespace

import pytest
from tiny import WORDS, make_net, write_bert

from lit_compress import methods
from lit_compress.__main__ import main
from lit_compress.run.settle import _check_given_teacher, _layers_table, check_sizes, facts_lines, facts_table
from lit_compress.utils.errors import UserError
from lit_compress.utils.tables import show


def split(name="train", **values):
    return {
        "split": name, "rows": 64, "available": 872, "inputs": 64, "longest": 12, "cut": 3, "empty": 0, "repeated": 0,
        "in_train": 0, "classes": [], **values,
    }  # fmt: skip


def facts(*splits):
    return {"max_length": 128, "splits": splits}


def test_the_table_has_a_row_per_split_and_no_empty_column(capsys):
    show(*facts_table("sst2", facts(split(), split("validation", rows=872, inputs=872, in_train=5))))
    said = capsys.readouterr().out
    assert "data of sst2" in said and "64 of 872" in said and "in train" in said
    assert "empty" not in said and "inputs" not in said and "repeated" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert "inputs" in facts_table("squad", facts(split(inputs=90)))[0]


def test_classes_are_listed_with_their_counts_most_frequent_first():
    few = [{"name": "bad", "count": 2}, {"name": "good", "count": 1062}]
    many = [{"name": f"c{i}", "count": i} for i in range(20)]
    first, second, last = facts_lines(facts(split(classes=few), split("validation", classes=many)))
    assert first == "rows of each class in train: good: 1,062, bad: 2"
    counts = ", ".join(f"c{i}: {i}" for i in range(19, 12, -1))
    assert second == f"rows of each class in validation: {counts}, 12 more, c0: 0"
    assert "128 tokens" in last


@pytest.mark.slow
def test_a_run_shows_and_keeps_what_it_has_found(short_run, tmp_path, capsys, tiny_data):
    """Before anything is trained, and once."""
    rows = [json.loads(line) for line in (tiny_data / "train.jsonl").read_text().splitlines()]
    args = ["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--run_dir", str(tmp_path / "run"),
            "--data.validation_examples", "30"]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_compress.cli.fitting.run_stages", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(args)
    said = capsys.readouterr().out
    assert "rows of each class in train: negative: 50, positive: 50" in said and "30 of 40" in said
    assert "SVD: dense 2 epochs = 26 steps, retrain 2 epochs = 26 steps" in said
    sizes = {word for line in said.splitlines() if "parameters of the sites" in line for word in line.split()}
    assert {"16,384", "7,936", "0.484"} <= sizes
    main([*args, "--ckpt_path", "last"])
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["data"] == json.loads((tmp_path / "run" / "data.json").read_text())
    train, dev = report["data"]["splits"]
    assert (train["rows"], train["available"], dev["rows"], dev["available"]) == (100, 100, 30, 40)
    assert train["repeated"] == 100 - len({row["sentence"] for row in rows})
    assert report["metric"]["rows"] == 30 and report["metric"]["available"] == 40
    score, (low, high) = report["compressed"]["metric"], report["compressed"]["interval"]
    said = capsys.readouterr().out
    assert f"\ndev accuracy {score:.4f} ± {(high - low) / 3.919928:.4f} (30 of 40 rows)\n" in said
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert "The dev metric is measured on 30 of 40 rows" in card
    assert f"between {low:.4f} and {high:.4f}" in card


def able(line, **options):
    """The methods that have an option; the others are refused in one line."""
    for name in {*methods.__all__} - {"Method"}:
        try:
            check_sizes(getattr(methods, name)(task="sst2", **options))
            yield name
        except UserError as error:
            assert str(error).startswith(line.format(name))


def test_what_can_be_rounded():
    """Every method that chooses ranks or widths; the others, and numbers that are none, are refused in one line."""
    found = able("model.round_to: {} chooses no ranks or widths", round_to=8)
    unable = {"BlockMovement", "ITP", "Movement", "Magnitude", "FirstOrder", "PLATON", "Layers", "Theseus"}
    assert {*methods.__all__} - {"Method", *found} == unable
    with pytest.raises(UserError, match=r"model\.round_to: 0 is below 1"):
        check_sizes(methods.CoFi(task="sst2", round_to=0))


def test_whose_layers_can_have_one_shape():
    """FWSVD's can with the weightings that remove structures; its other settings are refused by the stage."""
    line = "model.shape: 'uniform' is for heads and neurons that go at once, which {} does not"
    assert {*able(line, shape="uniform")} == {"SecondOrder", "FWSVD", "LLMPruner"}
    with pytest.raises(UserError, match=r"model\.shape: 'uniform' .* 'components' makes factors; nearest: structures"):
        methods.SecondOrder(task="sst2", shape="uniform").stages()[-1].check(make_net())


def test_layers_of_the_same_sizes_are_one_row_from_the_first_to_the_last():
    net = make_net(num_hidden_layers=3)
    assert [row[0] for row in _layers_table(SimpleNamespace(dense=net, net=net))[1]] == ["0 - 2"]


def test_a_given_teacher_reads_as_the_backbone_does_and_is_as_wide(tmp_path):
    backbone, wide = write_bert(tmp_path / "backbone"), write_bert(tmp_path / "wide", hidden_size=64)
    other = write_bert(tmp_path / "other")
    for path in (other / "vocab.txt", other / "tokenizer.json"):
        path.write_text(path.read_text().replace(WORDS[1], "movie"))
    net, longer = make_net(), write_bert(tmp_path / "longer", num_hidden_layers=3)
    for teacher, words in ((wide, "is 64 wide, the backbone 32; give"), (other, "has another tokenizer than the back")):
        method = methods.SecondOrder(task="sst2", backbone=str(backbone), teacher=str(teacher))
        with pytest.raises(UserError, match=rf"^model\.teacher: '{teacher}' {words}"):
            _check_given_teacher(method, net)
    _check_given_teacher(methods.LPAF(task="sst2", backbone=str(backbone), teacher=str(backbone)), net)
    given = {"task": "sst2", "backbone": str(backbone), "teacher": str(longer)}
    with pytest.raises(UserError, match=r"has other sizes than .*, and SVD compresses the teacher; give it as model"):
        _check_given_teacher(methods.SVD(**given), net)
    _check_given_teacher(methods.LoSparse(**given), net)  # which compresses the backbone
