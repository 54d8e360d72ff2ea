"""Several labels per row: losses against transformers' own, scores against loops, and the commands."""

import json
import random
from dataclasses import replace

import pytest
import torch
from helpers import alone
from mistakes import factorized, fails, predicted
from tiny import WORDS, make_batch, make_net, write_bert

import lit_compress as lc
from lit_compress.data.custom import custom_task
from lit_compress.data.readers import Place
from lit_compress.evaluation.intervals import intervals
from lit_compress.evaluation.metrics import build_metrics
from lit_compress.numerics.losses import distillation_loss, example_losses, task_loss
from lit_compress.tasks import KINDS
from lit_compress.tasks.records import Custom, Task
from lit_compress.utils.errors import UserError

NAMES = ("toxic", "insult", "threat")
KIND = KINDS["multi_label"]
TASK = Task("custom", "multi_label", ("text",), NAMES, KIND.scores, None, label="labels")


def _row(label, task=TASK):
    return KIND.label_of(task, "f row 1", {"labels": label})


READ: dict[tuple[int, ...], list[object]] = {
    (0, 2): [["threat", "toxic"], ("threat", "toxic"), [2, 0], [1, 0, 1], [1.0, 0.0, 1.0], [True, False, True],
             "['toxic', 'threat']", '["toxic", "threat"]', "('toxic', 'threat')", "[1, 0, 1]", ["1", "0", "1"],
             "['1.0', '0.0', '1.0']"],
    (1,): [["insult"], "['insult']", [1], [0, 1, 0]],
    (): [[], "[]", [0, 0, 0], [0.0, 0.0, 0.0]],
}  # fmt: skip


@pytest.mark.parametrize(("numbers", "label"), [(numbers, label) for numbers in READ for label in READ[numbers]])
def test_labels_are_read_as_they_are_written(numbers, label):
    assert _row(label) == [*numbers]
    assert KIND.shown(TASK, _row(label)) == [NAMES[number] for number in numbers]


@pytest.mark.parametrize(
    ("label", "line"),
    [(None, "label is null; write \\[\\]"), (["toxik"], "did you mean 'toxic'"), ([1, 0, 0, 1], "4 values"),
     ([["3"]], "neither text"), ([0.0, 1.0], "2 values of 0 and 1 for 3 labels"), (["toxic", None], "null")],
)  # fmt: skip
def test_what_is_no_label_is_one_line(label, line):
    with pytest.raises(UserError, match=line):
        _row(label)


@pytest.mark.parametrize(
    "label", ["toxic", "toxic|threat", "threat; toxic", "toxic, threat", "toxic\nthreat", "1 | 0 | 1", "1", "", 1]
)
def test_a_label_that_is_no_list_is_refused(label, tmp_path):
    """With or without names that are known; it is never taken as one label."""
    line = r"is no list; write \['toxic', 'insult'\], \[\] for none, or give a column of 0 and 1 for each label"
    with pytest.raises(UserError, match=line):
        _row(label)
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "a", "labels": label}) + "\n")
    with pytest.raises(UserError, match=f"train.jsonl' row 1: 'labels': .*{line}"):
        custom_task(Custom("multi_label"), Place(str(tmp_path)))


def test_flags_alone_have_no_names():
    with pytest.raises(UserError, match=r"0 or 1 for every label; name the labels by data\.custom\.labels"):
        KIND.classes_in("f row 1", ["1", "0", "1"])


def test_two_labels_written_two_ways_at_once_are_refused():
    two = replace(TASK, labels=NAMES[:2])
    with pytest.raises(UserError, match="two class numbers, or 0 and 1 for two labels"):
        _row([0, 1], two)
    assert _row([0.0, 1.0], two) == _row([1], two) == [1] and _row([1, 1], two) == [0, 1] and _row([0, 0], two) == []


def test_losses_are_those_of_transformers():
    """Its own loss for this problem type, and the KL of independent yes-or-no answers by a loop."""
    net = make_net("bert", TASK, dropout=0.0)
    batch = make_batch(5) | {"labels": torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]])}
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    output = net(**inputs, labels=batch["labels"].float())
    logits = KIND.logits(output, batch)
    assert float(task_loss(logits, batch["labels"], KIND.loss)) == pytest.approx(float(output.loss), rel=1e-6)
    assert float(example_losses(logits, batch["labels"], KIND.loss).mean()) == pytest.approx(float(output.loss))
    other = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for ours, theirs in zip(output.logits.flatten() / 2, other.flatten() / 2, strict=True):
        p, q = float(theirs.sigmoid()), float(ours.sigmoid())
        total += p * float(torch.tensor(p / q).log()) + (1 - p) * float(torch.tensor((1 - p) / (1 - q)).log())
    teacher = torch.stack([torch.zeros_like(other), other], -1)
    assert float(distillation_loss(logits, teacher, KIND.loss, 2.0)) == pytest.approx(4 * total / 15, rel=1e-4)


def test_scores_are_those_of_loops():
    """However rows are batched; a label that nobody has or is given does not count in the mean."""
    rng = random.Random(0)
    rows = [([rng.random() < 0.4, rng.random() < 0.5, False], [rng.random() < 0.3 for _ in range(2)] + [False])
            for _ in range(40)]  # fmt: skip
    f1, cells = [], [0, 0]
    for label in range(2):
        right = sum(p[label] and t[label] for p, t in rows)
        seen = sum(p[label] + t[label] for p, t in rows)
        f1.append(2 * right / seen)
        cells = [cells[0] + 2 * right, cells[1] + seen]
    expected = {
        "micro_f1": cells[0] / cells[1], "macro_f1": sum(f1) / 2, "subset_accuracy": sum(p == t for p, t in rows) / 40,
    }  # fmt: skip
    for size in (40, 7):
        metrics = build_metrics(TASK)
        for start in range(0, 40, size):
            part = rows[start : start + size]
            on = torch.tensor([p for p, _ in part]).float() - 0.5
            outputs = torch.stack([torch.zeros_like(on), on], -1)
            KIND.observe(metrics, outputs, {"labels": torch.tensor([t for _, t in part]).long()})
        found = {name: float(value) for name, value in metrics.compute().items()}
        assert found == pytest.approx(expected, rel=1e-6)
    bounds = intervals(metrics, found, 40)
    assert bounds.keys() == expected.keys() and all(low < found[name] < high for name, (low, high) in bounds.items())
    assert not any(build_metrics(TASK).compute().values())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model that was fine-tuned for several labels, and texts whose words give them."""
    folder, rng = tmp_path_factory.mktemp("multi_label"), random.Random(0)
    write_bert(folder / "model", TASK, dropout=0.0, initializer_range=0.3)
    (folder / "data").mkdir()
    for split, count in (("train", 48), ("validation", 24)):
        texts = [rng.choices(WORDS, k=rng.randint(2, 9)) for _ in range(count)]
        on = [[name for i, name in enumerate(NAMES) if {WORDS[i], WORDS[i + 3]} & {*words}] for words in texts]
        lines = [f'{" ".join(words)},"{names}"\n' for words, names in zip(texts, on, strict=True)]
        (folder / "data" / f"{split}.csv").write_text("text,labels\n" + "".join(lines))
    return folder


@pytest.mark.slow
def test_factorize_in_a_command_and_in_python(place, tmp_path):
    """All weightings' default, with labels drawn per label; the model's head alone says which kind it is."""
    from datasets import Dataset

    asked = ["--data.task", "custom", "--data.custom.kind", "multi_label", "--data.custom.labels", json.dumps(NAMES)]
    report = factorized(place / "model", tmp_path / "small", *asked, "--data.path", place / "data")
    assert report["metric"]["name"] == "micro_f1" and 0 < report["calibration"]["measured_loss"] < 1
    dev = place / "data" / "validation.csv"
    lines = predicted(tmp_path / "small", tmp_path / "p", "--data.path", dev)
    assert len(lines) == 24 and {"labels", "probabilities", "given"} <= lines[0].keys()
    expected = alone(tmp_path / "small", [line["text"] for line in lines]).sigmoid().tolist()
    for line, chances in zip(lines, expected, strict=True):
        assert list(line["probabilities"].values()) == pytest.approx(chances, abs=1e-5)
        assert line["labels"] == [name for name, chance in zip(NAMES, chances, strict=True) if chance > 0.5]
    assert "One logit per label; its probability is sigmoid(logit)" in (tmp_path / "small" / "README.md").read_text()
    rows = [line.split(",", 1) for line in dev.read_text().splitlines()[1:]]
    on = [[float(name in labels) for name in NAMES] for _, labels in rows]
    scores = lc.evaluate(str(place / "model"), data=Dataset.from_dict({"text": [row[0] for row in rows], "labels": on}))
    assert scores.keys() >= {"micro_f1", "macro_f1", "subset_accuracy"}
    assert scores["micro_f1"] == pytest.approx(report["dense"]["metric"], abs=1e-6)


def test_one_label_a_row_is_not_taken_for_one_class(place, tmp_path, capsys):
    """The head has a sigmoid per label: a softmax over them would be another model."""
    (tmp_path / "data.csv").write_text("text,label\n" + "".join(f"{WORDS[i]},{NAMES[i % 3]}\n" for i in range(15)))
    line = fails(
        capsys, "factorize", place / "model", tmp_path / "out", "--data.task", "custom", "--data.path",
        tmp_path / "data.csv", "--data.custom.labels", json.dumps(NAMES), "--data.custom.kind", "classification",
    )  # fmt: skip
    assert "problem_type multi_label_classification" in line and "custom takes the head's kind" in line
    assert not (tmp_path / "out").exists()
