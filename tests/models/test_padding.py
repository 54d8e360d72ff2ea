"""The token that pads: a decoder's head reads the same token alone and in a batch; positions behind it."""

import importlib
import inspect
import json

import pytest
import torch
import transformers
from helpers import alone
from tiny import SIZES, TINY, WORDS, write_backbone
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import lit_compress as lc
from lit_compress.data.datamodule import DataModule
from lit_compress.models.backbones import load_finetuned, load_net, load_tokenizer
from lit_compress.models.padding import BEHIND_PADDING, usable_positions
from lit_compress.tasks import task_type
from lit_compress.tasks.records import get_task
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


# config.json's, the tokenizer's -> what pads
CASES = {
    "neither": (None, None, "<unk>"), "the end in the tokenizer": (None, "</s>", "<unk>"),
    "another in the tokenizer": (None, "<pad>", "<pad>"), "minus one": (-1, None, "<unk>"),
    "only the config": (1, None, "<pad>"), "both": (1, "<pad>", "<pad>"), "different ones": (1, "<unk>", "<pad>"),
    "the end in the config": (2, "</s>", "</s>"), "the end in the config alone": (2, "<pad>", "</s>"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "case"),
    [*(("llama", case) for case in CASES),
     *((family, "neither") for family in ("gpt2", "gpt_neox", "mistral", "phi3", "gemma3_text", "opt"))],
)  # fmt: skip
def test_a_batch_gets_the_answers_of_its_texts_alone(case, family, tmp_path):
    pad_id, pad_token, pads = CASES[case]
    folder = written(tmp_path, family, pad_id, pad_token)
    tokenizer, expected = load_tokenizer(folder, SST2), alone(folder, TEXTS)
    assert tokenizer.pad_token == pads
    for load in (load_net, load_finetuned):
        net = load(folder, SST2).eval()
        assert net.config.pad_token_id == tokenizer.pad_token_id
        torch.testing.assert_close(together(net, tokenizer), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("pad_id", "pad_token"), [(None, None), (1, None), (-1, "</s>")])
def test_without_an_end_behind_every_text(pad_id, pad_token, tmp_path):
    folder = written(tmp_path, "llama", pad_id, pad_token, ends=False)
    net, tokenizer = load_finetuned(folder, SST2), load_tokenizer(folder, SST2)
    assert tokenizer.pad_token == ("<pad>" if pad_id == 1 else "</s>")
    torch.testing.assert_close(together(net, tokenizer), alone(folder, TEXTS), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("case", ["neither", "different ones"])
def test_a_net_in_memory_gives_its_own_answers(case, tmp_path):
    from datasets import Dataset

    folder = written(tmp_path, "llama", *CASES[case][:2])
    net, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    data = Dataset.from_dict({"sentence": TEXTS, "label": alone(folder, TEXTS).argmax(1).tolist()})
    assert lc.evaluate(net, tokenizer, data, task="sst2")["accuracy"] == 1
    assert net.config.pad_token_id == CASES[case][0]


TABLES = {
    **{name: TINY[name] for name in ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "electra", "albert")},
    **{name: TINY[name] for name in ("opt", "bart", "gpt2")},
    **dict.fromkeys(("camembert", "data2vec-text", "esm", "roberta-prelayernorm", "xlm-roberta-xl", "yoso"), SIZES),
}  # fmt: skip


def reads(net, length):
    """Say whether a net reads so many tokens, none of which is padding."""
    ids = torch.full((1, length), 7)
    try:
        with torch.no_grad():
            net(input_ids=ids, attention_mask=torch.ones_like(ids))
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("pad", [1, 3])
@pytest.mark.parametrize("family", TABLES)
def test_a_net_reads_so_many_tokens_and_no_more(family, pad):
    sizes = {"vocab_size": 30, "n_positions" if family == "gpt2" else "max_position_embeddings": 40}
    config = transformers.AutoConfig.for_model(family, **TABLES[family] | sizes | {"pad_token_id": pad})
    net = transformers.AutoModel.from_config(config).eval()
    usable = usable_positions(config)
    assert usable == 40 - (pad + 1 if family != "mpnet" else 2) * (family in BEHIND_PADDING)
    assert reads(net, usable)
    assert not reads(net, usable + 1)


def test_every_text_family_that_counts_behind_padding_is_known():
    """By the code of the installed transformers: all families of AutoModel whose text embeddings do so."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as HEADS

    found = set()
    for family, name in HEADS.items():
        kind = getattr(transformers, name)
        code = inspect.getsource(importlib.import_module(kind.__module__))
        if "create_position_ids_from_input_ids(input_ids" in code and "self.position_embeddings = " in code:
            found.add(family)
    assert found - BEHIND_PADDING == set()


def test_texts_are_cut_to_usable_positions(tmp_path):
    """An XLM-R with 24 positions, and a tokenizer that says nothing of them."""
    model = write_backbone(tmp_path / "model", "xlm-roberta", "sst2", max_position_embeddings=24, pad_token_id=1)
    found = DataModule("sst2", str(model), str(tmp_path))
    assert found.limit == found.max_length == 22
