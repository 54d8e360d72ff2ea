"""Texts for texts: what is encoded, read, written, scored; whole runs."""

import json
import random
import re
from dataclasses import replace

import pytest
import torch
from mistakes import predicted
from rouge_score.rouge_scorer import RougeScorer
from tiny import WORDS, make_net, read_rows, write_backbone, write_rows

from lit_compress.__main__ import main
from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.models.backbones import load_net
from lit_compress.tasks import KINDS
from lit_compress.tasks.records import Writing, get_task
from lit_compress.tasks.summarization import as_bytes, as_texts
from lit_compress.utils import progress
from lit_compress.utils.errors import UserError

KIND, TASK = KINDS["summarization"], get_task("xsum")


@pytest.fixture(scope="module", params=["bart", "t5"])
def backbone(request, tmp_path_factory):
    return str(write_backbone(tmp_path_factory.mktemp(request.param), request.param, "xsum"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Documents of which the summary is the first words."""
    rng = random.Random(0)

    def row():
        words = rng.choices(WORDS, k=rng.randint(5, 20))
        return {"document": " ".join(words), "summary": " ".join(words[:3]) + " ."}

    splits = {split: [row() for _ in range(rows)] for split, rows in (("train", 40), ("validation", 10), ("test", 6))}
    return write_rows(tmp_path_factory.mktemp("texts"), **splits)


def test_text_survives_as_bytes():
    texts = ["", "Grüße, 世界 \n two lines", "a\0b"]
    rows = as_bytes(texts)
    padded = torch.tensor([row + [0] * (40 - len(row)) for row in rows])
    assert as_texts(padded) == ["", texts[1], "a b"]
    assert as_texts(torch.zeros(2, 0, dtype=torch.long)) == ["", ""]


def test_batches_hold_labels_and_true_texts(backbone, texts):
    data = DataModule("xsum", backbone, str(texts), eval_batch_size=10)
    data.setup("validate")
    (batch,) = data.val_dataloader()[0]
    rows = read_rows(texts / "validation.jsonl")
    order = batch["index"].tolist()
    assert as_texts(batch["reference"]) == [rows[i]["summary"] for i in order]
    for ids, i in zip(batch["labels"].tolist(), order, strict=True):
        assert ids == [*data.tokenizer(rows[i]["summary"])["input_ids"]]
        assert ids[-1] == data.tokenizer.eos_token_id and len(ids) == 5


def test_what_the_decoder_reads():
    """What the library makes of labels: one step later, the start token first, padding for -100."""
    labels = torch.tensor([[7, 8, 2], [9, 2, -100]])
    batch = {"input_ids": torch.tensor([[5, 2], [6, 2]]), "attention_mask": torch.ones(2, 2).long(), "labels": labels}
    for family in ("bart", "t5"):
        net = make_net(family, "xsum", dropout=0.0).eval()
        inputs = KIND.inputs(net, batch)
        start, pad = net.config.decoder_start_token_id, net.config.pad_token_id
        assert inputs["decoder_input_ids"].tolist() == [[start, 7, 8], [start, 9, 2]] and pad == 1
        with torch.no_grad():
            logits = net(**inputs).logits
            theirs = net(**{k: batch[k] for k in ("input_ids", "attention_mask")}, labels=labels)
        assert torch.equal(logits, theirs.logits)
        loss = torch.nn.functional.cross_entropy(logits[KIND.counted(batch)], labels[KIND.counted(batch)])
        torch.testing.assert_close(loss, theirs.loss)


def test_true_texts_are_scored_whole(backbone, texts, monkeypatch):
    """ROUGE is that of the text in the file although training sees only 3 tokens of it; any number of batches."""
    from lit_compress.tasks import records as tasks

    monkeypatch.setitem(tasks.TASKS, "xsum", replace(TASK, writing=Writing(3, 2)))
    data = DataModule("xsum", backbone, str(texts), eval_batch_size=4)
    data.setup("validate")
    assert max(len(row) for row in data._split("validation").encoded["labels"]) == 3
    net = load_net(backbone, tasks.get_task("xsum")).eval()
    assert (net.generation_config.num_beams, net.generation_config.max_new_tokens) == (2, 3)
    found = evaluate(net, data)
    scorer = RougeScorer(["rouge1", "rougeLsum"], use_stemmer=True)
    rows = read_rows(texts / "validation.jsonl")
    written = []
    for row in rows:
        ids = net.generate(**data.tokenizer(row["document"], return_tensors="pt", return_token_type_ids=False))
        written.append(data.tokenizer.decode(ids[0], skip_special_tokens=True).strip())
    for name in ("rouge1", "rougeLsum"):
        scores = [scorer.score(r["summary"], w)[name].fmeasure for r, w in zip(rows, written, strict=True)]
        assert found[f"val/{name}"] == pytest.approx(sum(scores) / 10, abs=1e-6)


OWN = {"num_beams": 4, "length_penalty": 2.0, "min_length": 6, "max_length": 20, "no_repeat_ngram_size": 3}


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        (OWN, {}, OWN),
        ({}, {}, {"num_beams": 8, "length_penalty": 1.0, "max_new_tokens": 63}),
        ({"max_new_tokens": 9}, {}, {"num_beams": 8, "length_penalty": 1.0, "max_new_tokens": 9}),
        (OWN, {"num_beams": 2}, OWN | {"num_beams": 2}),
        (OWN, {"target_length": 30}, OWN | {"max_new_tokens": 30, "max_length": None}),
        (OWN, {"target_length": 5}, OWN | {"max_new_tokens": 5, "max_length": None, "min_length": None}),
    ],
)
def test_a_model_writes_as_its_own_settings_say_unless_options_do(own, asked, expected, capsys):
    net = make_net("bart", "xsum")
    net.generation_config.update(**own)
    progress._noted.clear()
    writing = replace(Writing(target_length=63), **asked, asked=tuple(asked))
    for _ in range(2):  # the second time, as of an export
        KIND.configure(net, replace(TASK, writing=writing))
        found = {name: getattr(net.generation_config, name) for name in {**OWN, "max_new_tokens": 0}}
        assert found == dict.fromkeys(found) | expected
    assert ("does not set num_beams 8, length_penalty 1.0" in capsys.readouterr().err) == ("num_beams" not in own)


def test_a_text_is_not_longer_than_the_positions():
    """The longest leaves a position to begin at."""
    with pytest.raises(UserError, match=r"data.target_length: 64 is more than '' can write; the largest is 63"):
        KIND.configure(make_net("bart", "xsum"), replace(TASK, writing=Writing(64)))


def test_options_of_writing_are_known_as_such(backbone, texts):
    """They count for an export too, whose settings are its own."""
    record = DataModule("xsum", backbone, str(texts), num_beams=3).record
    assert record.writing.asked == ("num_beams",)
    assert repr(record) == repr(replace(TASK, writing=Writing(num_beams=3)))  # fingerprints of earlier runs hold


def test_an_empty_text_is_no_reference():
    with pytest.raises(UserError, match="row 2: 'summary' is ' '; give text"):
        KIND.label_of(TASK, "row 2", {"document": "a", "summary": " "})


@pytest.mark.slow
def test_a_run_on_summaries(texts, tmp_path):
    """Data, fit, export, generate; the export's own folder writes and is scored as the run was."""
    folder = tmp_path / "run"
    main([
        "fit", "--model", "LPAF", "--model.backbone", str(write_backbone(tmp_path / "t5", "t5", "xsum")),
        "--model.density", "0.5", "--data.task", "xsum", "--data.path", str(texts), "--data.batch_size", "8",
        "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--model.dense.epochs", "1",
        "--model.dense.learning_rate", "3e-3", "--data.target_length", "6", "--data.num_beams", "2",
        "--model.prune.epochs", "1", "--model.retrain.epochs", "1", "--model.distillation.alpha_layers", "1",
        "--run_dir", str(folder),
    ])  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    record = json.loads((folder / "stages.json").read_text())[-1]
    assert report["metric"] == {"name": "rougeL", "mode": "max", "rows": 10, "available": 10}
    assert {"val/rouge1", "val/rouge2", "val/rougeL", "val/rougeLsum"} <= record["metric"].keys()
    assert report["compressed"]["metric"] == pytest.approx(record["metric"]["val/rougeL"], abs=1e-5)
    low, high = report["dense"]["interval"]
    assert low <= report["dense"]["metric"] <= high and len(report["compressed"]["interval"]) == 2
    assert report["compressed"]["density"] <= 0.5 and report["export_difference"] <= 1e-5
    rows = predicted(folder, tmp_path / "written.jsonl")
    assert len(rows) == 6 and all(isinstance(row["summary"], str) for row in rows)
    code, names = re.findall(r"```python\n(.*?)```", (folder / "export" / "README.md").read_text(), re.S), {}
    exec(code[0].replace('"."', f'"{folder}/export"'), names)
    assert names["output"].logits.shape[:2] == (1, 1)
