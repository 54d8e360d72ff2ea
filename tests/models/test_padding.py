"""The token that pads: the head of a decoder reads the same token of a text alone, in a batch and in the export."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import WORDS, write_backbone
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import lit_compress as lc
from lit_compress.__main__ import main
from lit_compress.models.backbones import load_finetuned, load_net, load_tokenizer
from lit_compress.tasks import task_type
from lit_compress.tasks.records import get_task
from lit_compress.utils import progress
from lit_compress.utils.errors import UserError

SST2 = get_task("sst2")
TEXTS = ["film", " ".join(WORDS[:7]), " ".join(WORDS[2:5]), "film plot dull"]
END = TemplateProcessing(single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 3), ("</s>", 2)])


def written(folder, family, pad_id, pad_token, ends=True):
    """Write a classifier whose config.json and whose tokenizer name what pads; None: they name nothing."""
    write_backbone(folder, family, "sst2", pad_token_id=pad_id)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if ends:
        tokenizer.backend_tokenizer.post_processor = END
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = {name: value for name, value in json.loads(path.read_text()).items() if name != "pad_token"}
    path.write_text(json.dumps(settings | ({"pad_token": pad_token} if pad_token else {})))
    return str(folder)


def alone(folder):
    """The model's own answers, to one text at a time, as transformers gives them."""
    net, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([net(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS])


def together(net, tokenizer):
    """The answers to a batch as the data makes it and the methods read it."""
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    length = max(map(len, rows))
    batch = {
        "input_ids": torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
    }
    with torch.no_grad():
        return net(**task_type(SST2).inputs(net, batch)).logits


@pytest.fixture
def notes(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_noted", set())
    return lambda: capsys.readouterr().err


# config.json's, the tokenizer's -> what pads, what a note says
CASES = {
    "neither": (None, None, "<unk>", "'<unk>' pads, as '</s>' ends every text and the head reads it"),
    "the end in the tokenizer": (None, "</s>", "<unk>", "'<unk>' pads, as '</s>' ends every text"),
    "another in the tokenizer": (None, "<pad>", "<pad>", None),
    "minus one": (-1, None, "<unk>", "'<unk>' pads"),
    "only the config": (1, None, "<pad>", None),
    "both": (1, "<pad>", "<pad>", None),
    "different ones": (1, "<unk>", "<pad>", "'<pad>' pads, as its config.json says, and not '<unk>', as its tokenizer"),
    "the end in the config": (2, "</s>", "</s>", "ends every text, so the head reads the token before it"),
    "the end in the config alone": (2, "<pad>", "</s>", "was trained on texts padded with '<pad>' reads another token"),
}


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "mistral", "phi3", "gemma3_text", "opt"])
@pytest.mark.parametrize("case", CASES)
def test_a_batch_gets_the_answers_of_its_texts_alone(case, family, tmp_path, notes):
    pad_id, pad_token, pads, said = CASES[case]
    folder = written(tmp_path, family, pad_id, pad_token)
    tokenizer, expected = load_tokenizer(folder, SST2), alone(folder)
    assert tokenizer.pad_token == pads
    text = notes()
    assert (said in text) if said else ("pads" not in text)
    for load in (load_net, load_finetuned):
        net = load(folder, SST2).eval()
        assert net.config.pad_token_id == tokenizer.pad_token_id
        torch.testing.assert_close(together(net, tokenizer), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("pad_id", "pad_token"), [(None, None), (1, None), (-1, "</s>")])
def test_without_an_end_behind_every_text(pad_id, pad_token, tmp_path):
    folder = written(tmp_path, "llama", pad_id, pad_token, ends=False)
    net, tokenizer = load_finetuned(folder, SST2), load_tokenizer(folder, SST2)
    assert tokenizer.pad_token == ("<pad>" if pad_id == 1 else "</s>")
    torch.testing.assert_close(together(net, tokenizer), alone(folder), rtol=1e-4, atol=1e-5)


def test_a_teacher_may_name_another_token_than_the_data(tmp_path):
    student, teacher = (tmp_path / name for name in ("student", "teacher"))
    tokenizer = load_tokenizer(written(student, "llama", None, None), SST2)
    net = load_finetuned(written(teacher, "llama", 2, "</s>"), SST2)
    torch.testing.assert_close(together(net, tokenizer), alone(teacher), rtol=1e-4, atol=1e-5)


def test_a_tokenizer_in_which_nothing_else_can_pad_is_one_line(tmp_path):
    folder = written(tmp_path, "llama", None, None)
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] == "</s>"]
    state["post_processor"] = json.loads(path.read_text())["post_processor"]
    path.write_text(json.dumps(state))
    names = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with pytest.raises(UserError, match="has no padding token, and '</s>' ends every text; add one"):
        load_tokenizer(folder, SST2)


@pytest.mark.parametrize("case", ["neither", "the end in the config"])
def test_the_export_of_such_a_classifier_reads_the_same_token(case, tmp_path):
    folder = written(tmp_path / "net", "llama", *CASES[case][:2])
    rows = [{"sentence": text, "label": int(label)} for text, label in zip(TEXTS, alone(folder).argmax(1), strict=True)]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    out = tmp_path / "out"
    main(["factorize", folder, str(out), "--data.task", "sst2", "--data.path", str(tmp_path), "--density", "1"])
    report = json.loads((out / "report.json").read_text())
    assert report["dense"]["metric"] == report["compressed"]["metric"] == 1
    net = AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert net.config.pad_token_id == tokenizer.pad_token_id == (2 if case == "the end in the config" else 0)
    with torch.no_grad():
        found = net(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits
    torch.testing.assert_close(found, alone(folder), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_net_in_memory_gives_its_own_answers(case, tmp_path):
    from datasets import Dataset

    folder = written(tmp_path, "llama", *CASES[case][:2])
    net, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    data = Dataset.from_dict({"sentence": TEXTS, "label": alone(folder).argmax(1).tolist()})
    assert lc.evaluate(net, tokenizer, data, task="sst2")["accuracy"] == 1
    assert net.config.pad_token_id == CASES[case][0]
