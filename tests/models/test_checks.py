"""What a library would load with a warning, or silently, is one line: wrong tensors, tokenizers, labels."""

import io
import json
import logging
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from mistakes import configure
from safetensors.torch import load_file, save_file
from tiny import TINY, make_net
from transformers import ByT5Tokenizer

from lit_compress.export.fuse import cast
from lit_compress.models.accounting import _Live
from lit_compress.models.backbones import finetuned_on, load_finetuned, load_net, load_tokenizer
from lit_compress.models.checks import check_finite, is_compressed, trained_head
from lit_compress.models.storage import _load_tensors, save_net, tied
from lit_compress.models.storage import load_net as load_saved
from lit_compress.tasks.records import get_task
from lit_compress.utils import progress
from lit_compress.utils.errors import UserError

SST2 = get_task("sst2")
SITE = "bert.encoder.layer.0.attention.self.query.weight"


@pytest.fixture
def folder(tiny_backbone, tmp_path):
    """A copy of a fine-tuned model with its tokenizer, to be broken."""
    return shutil.copytree(tiny_backbone, tmp_path / "model")


@pytest.fixture
def notes(monkeypatch, capsys):
    """What was noted so far in this test, although it may have been noted in another."""
    monkeypatch.setattr(progress, "_noted", set())
    return lambda: capsys.readouterr().err


def change(folder, **tensors):
    """Write other tensors into a model's file; None takes one out."""
    path = folder / "model.safetensors"
    found = load_file(path) | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({name: value for name, value in found.items() if value is not None}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("load", [load_net, load_finetuned])
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({SITE: None}, "(no tensor|it has no) 'bert.encoder.layer.0.attention.self.query.weight'"),
        ({SITE: torch.ones(32, 16)}, r"has the shape \[32, 16\] in the file and \[32, 32\]"),
        ({SITE: torch.full((32, 32), torch.nan)}, "has values that are not finite"),
        ({SITE.replace("weight", "lora_A"): torch.ones(4, 32)}, "lora_A' for which BertForSequence.* has no place"),
        ({SITE.replace("layer.0", "layer.2"): torch.ones(32, 32)}, "has a tensor 'bert.encoder.layer.2"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(load, tensors, words, folder):
    change(folder, **tensors)
    with pytest.raises(UserError, match=words) as error:
        load(str(folder), SST2)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_an_adapter_of_a_trained_head_is_named(folder):
    change(folder, classifier__lora_A=torch.ones(4, 32))
    with pytest.raises(UserError, match=r"has a tensor 'classifier.lora_A' for which"):
        load_finetuned(str(folder), SST2)


def test_a_saved_net_is_checked_alike(tmp_path):
    save_net(make_net(), tmp_path)
    change(tmp_path, **{SITE: torch.full((32, 32), torch.inf)})
    with pytest.raises(UserError, match=r"query.weight' has values that are not finite"):
        load_saved(tmp_path)
    change(tmp_path, **{SITE: None})
    with pytest.raises(UserError, match=r"cannot load a model.*Missing key.*query.weight"):
        load_saved(tmp_path)


@pytest.mark.parametrize("family", TINY)
def test_a_new_head_is_an_exception_and_is_named(family, tmp_path, notes):
    """Of another size, or in a file without one; a net that only lost its head is a backbone as before."""
    make_net(family, task="mnli").save_pretrained(tmp_path / "other")
    make_net(family).base_model.save_pretrained(tmp_path / "bare")
    for name in ("other", "bare"):
        load_net(str(tmp_path / name), SST2)
        (said,) = (line for line in notes().splitlines() if line.startswith("note: "))
        start, _, tensors = said.partition(" (")
        assert start == f"note: model.backbone: '{tmp_path / name}': the head is new and not trained yet"
        assert "layer" not in tensors and "weight" in tensors
        with pytest.raises(UserError, match=r"is not fine-tuned|has 3 labels, sst2 has 2"):
            load_finetuned(str(tmp_path / name), SST2)
    make_net(family).save_pretrained(tmp_path / "same")
    load_net(str(tmp_path / "same"), SST2)
    assert "note: " not in notes()


def test_the_library_s_report_on_a_new_head_is_not_printed(tmp_path):
    """It came for every load of a run: one before the dense stage, and one when the stage ended."""
    make_net("bert").base_model.save_pretrained(tmp_path)
    said, library = io.StringIO(), logging.getLogger("transformers")
    library.addHandler(handler := logging.StreamHandler(said))
    load_net(str(tmp_path), SST2)
    library.removeHandler(handler)
    assert "REPORT" not in said.getvalue()


def test_a_folder_without_a_tokenizer_has_none(folder, tmp_path):
    """The library makes one up that knows its special tokens only."""
    for family in TINY:
        make_net(family).save_pretrained(tmp_path / family)
        with pytest.raises(UserError, match=r"no tokenizer|cannot load the tokenizer"):
            load_tokenizer(str(tmp_path / family), SST2)
    configure(folder, vocab_size=20)
    with pytest.raises(UserError, match="its tokenizer has ids up to 25, its embeddings 20 rows"):
        load_tokenizer(str(folder), SST2)


def test_a_tokenizer_in_python_is_one_line(tmp_path):
    """ByT5 has a supported family and no tokenizer.json."""
    make_net("t5", "xsum", vocab_size=384).save_pretrained(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has a tokenizer in Python \(ByT5Tokenizer\), which is not supported"):
        load_tokenizer(str(tmp_path), get_task("xsum"))


def test_a_backbone_with_labels_in_another_order_is_named(folder):
    """Its head is trained again, which otherwise only the number of stages tells."""
    configure(folder, id2label={0: "Positive", 1: "negative"}, label2id={"Positive": 0, "negative": 1})
    with pytest.warns(UserWarning, match=r"another order \(Positive, negative\) than the data \(negative, positive\)"):
        assert not finetuned_on(str(folder), SST2)
    with pytest.warns(UserWarning, match="exchanged answers; as --model.teacher too it gives the order"):
        assert not finetuned_on(str(folder), replace(SST2, name="custom"))
    configure(folder, id2label={0: "C++", 1: "C#"}, label2id={"C++": 0, "C#": 1})  # alike without their signs
    with pytest.warns(UserWarning, match="another order"):
        assert not finetuned_on(str(folder), replace(SST2, labels=("C#", "C++")))
    assert finetuned_on(str(folder), replace(SST2, labels=("c++", "c#")))


@pytest.mark.parametrize("labels", [{0: "negative", 1: "positive"}, {0: "LABEL_0", 1: "LABEL_1"}, {0: "a", 1: "b"}])
def test_other_backbones_are_not(labels, folder, notes):
    configure(folder, id2label=labels, label2id={name: i for i, name in labels.items()})
    finetuned_on(str(folder), SST2)
    assert "order" not in notes()


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({0: "Negative", 1: "POSITIVE"}, None),
        ({0: "LABEL_0", 1: "LABEL_1"}, "its labels have no names; they are taken as negative, positive, in this order"),
        ({0: "0", 1: "1"}, "its labels have no names"),
        ({0: "positive", 1: "negative"}, r"another order \(positive, negative\) than sst2 \(negative, positive\); g"),
        ({0: "bad", 1: "good"}, "has the labels bad, good; sst2 has negative, positive"),
        ({0: "a", 1: "b", 2: "c"}, "has 3 labels, sst2 has 2; give a model fine-tuned on this task"),
    ],
)
def test_labels_of_a_trained_head_are_those_of_the_task(labels, words, folder, notes):
    configure(folder, id2label=labels, label2id={name: i for i, name in labels.items()})
    if words is None or words.startswith("its"):
        load_finetuned(str(folder), SST2)
        assert (words or "") in notes()
        return
    with pytest.raises(UserError, match=words):
        load_finetuned(str(folder), SST2)


HEADS = {
    "SequenceClassification": ({"problem_type": None}, ("classification", ["negative", "positive"])),
    "regression": ({"problem_type": "regression"}, ("regression", ["negative", "positive"])),
    "one number": ({"id2label": {0: "LABEL_0"}}, ("regression", None)),
    "no names": ({"id2label": {0: "LABEL_0", 1: "LABEL_1"}}, ("classification", None)),
    "one name": ({"id2label": {0: "LABEL_0", 1: "good"}}, ("classification", ["LABEL_0", "good"])),
    "several": ({"problem_type": "multi_label_classification"}, ("multi_label", ["negative", "positive"])),
    "words": ({"architectures": ["BertForTokenClassification"]}, ("tagging", ["negative", "positive"])),
    "vectors": ({"architectures": ["BertModel"]}, ("embedding", ["negative", "positive"])),
    "its own": ({"architectures": ["Mine"]}, (None, ["negative", "positive"])),
    "a name twice": ({"id2label": {0: "a", 1: "a"}}, ("classification", None)),
    "broken": ({"id2label": [3]}, (None, None)),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_trained_head_says_its_kind_and_its_classes(case, folder):
    values, expected = HEADS[case]
    configure(folder, **{"id2label": {10: "b", 9: "a"}})
    assert trained_head(folder)[1] == ["a", "b"]
    configure(folder, **{"id2label": {0: "negative", 1: "positive"}, **values})
    assert trained_head(folder) == expected


def test_a_cross_encoder_of_classes_is_no_reranker(folder):
    with pytest.raises(UserError, match=r"has 2 labels, wiki_qa has 1; --data.task custom takes the head's kind"):
        load_finetuned(str(folder), get_task("wiki_qa"))
    with pytest.raises(UserError, match=r"custom has 1; leave --data.custom.kind out: custom takes the head's kind"):
        load_finetuned(str(folder), replace(get_task("wiki_qa"), name="custom"))


def test_layers_of_ours_are_noticed(folder):
    assert not is_compressed(folder)
    (folder / "structure.json").write_text("{}\n")  # an ordinary net that a run wrote
    assert not is_compressed(folder)
    configure(folder, auto_map={"AutoTokenizer": "tokens.Tokens"})
    assert not is_compressed(folder)
    for file, text in (("structure.json", '{"a": {"kind": "low_rank"}}'), ("modeling_compressed.py", "")):
        broken = shutil.copytree(folder, folder.with_name(file))
        (broken / file).write_text(text)
        assert is_compressed(broken)
        for load in (load_net, load_finetuned):
            with pytest.raises(UserError, match="is compressed already"):
                load(str(broken), SST2)


def test_numbers_are_names_only_where_they_are_the_same_ones(folder, notes):
    numbers = {labels: replace(SST2, name="custom", labels=labels) for labels in (("0", "1"), ("5", "7"), ("1", "0"))}
    configure(folder, id2label={0: "0", 1: "1"})
    load_finetuned(str(folder), numbers["0", "1"])
    assert "no names" not in notes()
    load_finetuned(str(folder), numbers["5", "7"])
    assert "they are taken as 5, 7, in this order" in notes()
    with pytest.raises(
        UserError, match=r"in another order \(0, 1\) than custom \(1, 0\); leave --data.custom.labels o"
    ):
        load_finetuned(str(folder), numbers["1", "0"])


@pytest.mark.parametrize("check", [lambda net: check_finite("net", net), lambda net: cast(net, "float32")])
def test_weights_are_checked_without_a_tensor_of_their_size(check):
    """An embedding of 262,144 tokens took 1.2 GB more while it was checked than it takes."""
    net = make_net()
    with _Live(net.state_dict()) as live:
        check(net)
    assert 0 < live.peak < 100


def test_loading_copies_a_tied_embedding_once():
    """With 262,144 tokens another copy was the peak of a whole fit, when it loads its export."""
    net = make_net("llama", "wikitext2", tie_word_embeddings=True)
    tensors = {name: value for name, value in net.state_dict().items() if name not in tied(net)}
    assert len(tensors) < len(net.state_dict())
    with _Live(net.state_dict()) as live:
        _load_tensors(net, tensors)
    assert live.peak <= 1.01 * sum(value.numel() * 4 for value in tensors.values())


class Hostile:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_with_code_is_refused_without_advice_to_run_it(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"weight": Hostile(tmp_path / "ran")}, file)
    with pytest.raises(UserError) as error:
        load_net(str(folder), SST2)
    assert "save the model as safetensors" in str(error.value) and "weights_only" not in str(error.value)
    torch.save({"weight": Hostile(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="save the model as safetensors"):
        load_net(str(folder), SST2)
    assert not (tmp_path / "ran").exists()


def test_a_layer_that_is_not_here_is_refused(folder):
    spec = {"kind": "pivot", "in_features": 32, "out_features": 32, "rank": 4}
    (folder / "structure.json").write_text(json.dumps({"bert.encoder.layer.0.attention.self.query": spec}))
    with pytest.raises(UserError, match=r"structure.json: .*pivot.*no layer of this package"):
        load_saved(folder)
