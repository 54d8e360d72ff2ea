"""Kinds whose inputs are not simply rows, on two processes: every example is scored once, the ranks stay one net."""

from __future__ import annotations

import json
import random

import processes
import pytest
import torch
from tiny import WORDS, write_backbone

from lit_compress.__main__ import main
from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.models.storage import load_net

TAGS = {word: tag for word, tag in zip(WORDS, ["B-PER", "I-PER", "O", "B-LOC", "O"] * 5, strict=False)}

# kind -> task, backbone, what else its data module is told
CASES = {
    "tagging": ("conll2003", None, {"max_length": 9}),
    "span_qa": ("squad", None, {"max_length": 18, "stride": 3}),
    "summarization": ("xsum", "bart", {"target_length": 6, "num_beams": 2}),
    "language_modelling": ("plain_text", "llama", {"max_length": 16}),
    "embedding": ("stsb_embedding", None, {}),
    "reranking": ("wiki_qa", None, {}),
    "multi_label": ("go_emotions", None, {}),
}

# weights far from 0: what is written hangs on what was read
FAR = {"bart": {"init_std": 0.5}, "llama": {"initializer_range": 0.2}}


def _row(kind, rng):
    """A row; words are in it once."""
    words = rng.sample(WORDS, rng.randint(4, 18))
    text = " ".join(words)
    if kind == "tagging":
        return {"tokens": words, "ner_tags": [TAGS[word] for word in words]}
    if kind == "span_qa":
        answer = " ".join(words[-3:-1])
        return {"question": words[-3], "context": text, "answers": answer}
    if kind == "embedding":
        return {"sentence1": text, "sentence2": " ".join(rng.sample(WORDS, 3)), "label": rng.random()}
    if kind == "reranking":
        return {"question": rng.choice(WORDS[:3]), "answer": text, "label": rng.randint(0, 1)}
    if kind == "multi_label":
        return {"text": text, "labels": [number for number, word in enumerate(WORDS[:20]) if word in words]}
    if kind == "summarization":
        return {"document": text, "summary": " ".join(words[::-1])}
    return {"text": text}


@pytest.fixture(params=CASES)
def case(request, tiny_backbone, tmp_path):
    """The options of a short run, and how its data module is made."""
    kind = request.param
    task, family, settings = CASES[kind]
    rng, data = random.Random(0), tmp_path / "data"
    data.mkdir()
    for split, rows in (("train", 24), ("validation", 13)):
        lines = [json.dumps({"id": f"{split}{i}", **_row(kind, rng)}) for i in range(rows)]
        (data / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    backbone = str(write_backbone(tmp_path / "backbone", family, task, **FAR[family]) if family else tiny_backbone)
    settings = {"task": task, "path": str(data), "batch_size": 4, "eval_batch_size": 3, **settings}
    return [
        "--model", "SVD", "--model.density", "0.5", "--model.backbone", backbone,
        *(word for name, value in settings.items() for word in (f"--data.{name}", str(value))),
        "--model.dense.epochs", "1", "--model.dense.learning_rate", "1e-4", "--model.retrain.epochs", "1",
        "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false",
    ], lambda: DataModule(backbone=backbone, **settings)  # fmt: skip


@pytest.mark.slow
def test_two_processes_are_scored_as_one(case, tmp_path, capsys):
    args, make = case
    run = tmp_path / "run"
    more = ["--run_dir", str(run), "--trainer.strategy", "ddp", "--trainer.devices", "2"]
    processes.fork_ranks(["fit", *args, *more, "--trainer.callbacks+=processes.KeepRanks"], tmp_path / "errors")
    [loader] = make().val_dataloader()
    assert len(loader.order.lengths) % 2  # one rank's last batch is filled up
    records = json.loads((run / "stages.json").read_text())
    for record in records:
        net = run / record["name"]
        alone = evaluate(load_net(net / "net"), make())
        assert record["metric"] == pytest.approx(alone, rel=1e-6, abs=1e-6)
        first, second = (torch.load(net / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
        assert all(torch.equal(first[name], second[name]) for name in first)
    capsys.readouterr()
    main(["validate", str(run)])
    said = {name: float(value) for name, value, *_ in map(str.split, capsys.readouterr().out.splitlines())}
    expected = records[-1]["metric"]
    assert {name: said[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert all(name.endswith(("/rows", "_low95", "_high95")) for name in said.keys() - expected.keys())
    if make().record.kind != "language_modelling":
        main(["predict", str(run)])
        assert capsys.readouterr().out.startswith("predicted 13 of 13 rows")
