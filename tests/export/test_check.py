"""The export refuses what does not load by itself or answers otherwise; every form is compared on real texts."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from largest import largest_tensor
from tiny import ALL, TINY, WORDS, make_batch, make_net, write_backbone
from transformers import AutoTokenizer

from lit_compress.data.datamodule import DataModule
from lit_compress.export.check import Certificate, check_export
from lit_compress.export.fuse import fuse
from lit_compress.export.modelling import write_model
from lit_compress.export.program import difference
from lit_compress.layers import MixedRankLinear
from lit_compress.models.backbones import load_net as load_backbone
from lit_compress.models.storage import ACTIVATIONS, load_net
from lit_compress.models.surgery import factorize
from lit_compress.models.vocabulary import keep_tokens
from lit_compress.numerics.decompose import decompose
from lit_compress.stages.rank_rule import RankRule
from lit_compress.tasks import task_type
from lit_compress.tasks.embedding import Embedding
from lit_compress.tasks.records import Custom, get_task
from lit_compress.tasks.sentences import Pooling
from lit_compress.utils.errors import UserError


def inputs():
    return {name: value for name, value in make_batch().items() if name in ("input_ids", "attention_mask")}


def exported(family, folder):
    family, settings = ALL[family]
    net = make_net(family, **settings).eval()
    factorize(net, RankRule(0.5).allocate(net), lambda _, w, r: decompose(w, r), MixedRankLinear)
    fused = fuse(net)
    folder.mkdir(exist_ok=True)
    write_model(fused, folder)
    return fused


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama", "t5"])
def test_it_loads_alone_with_the_same_logits(family, tmp_path):
    """Of every family it does so in this process, by its own class, below."""
    assert check_export(exported(family, tmp_path), tmp_path) <= 1e-6


def test_a_large_vocabulary_has_fewer_tokens(tmp_path, monkeypatch):
    """Logits of all tokens take memory: 155 MB with Gemma's vocabulary, several times."""
    net = make_net("llama", "plain_text").eval()
    write_model(net, tmp_path)
    monkeypatch.setattr("lit_compress.export.check.ELEMENTS", 5 * 4 * net.config.vocab_size)
    seen = []
    net.register_forward_hook(lambda module, args, output: seen.append(output.logits.shape[:2]))
    assert check_export(net, tmp_path) <= 1e-6 and seen == [(4, 5)]


def test_a_folder_may_be_given_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("out")
    folder.mkdir()
    assert check_export(exported("bert", folder), folder) <= 1e-6


def test_other_weights_are_refused(tmp_path):
    net = exported("bert", tmp_path)
    with torch.no_grad():
        net.classifier.bias.add_(0.01)
    with pytest.raises(UserError, match=r"logits differ by 1\.00e-02"):
        check_export(net, tmp_path)


def test_a_file_that_needs_the_package_is_refused(tmp_path, monkeypatch):
    """In a process that is started anew, as on a user's machine, not in a fork (reloads.py)."""
    monkeypatch.setattr("lit_compress.export.check.subprocess", subprocess)
    net = exported("bert", tmp_path)
    source = tmp_path / "modeling_compressed.py"
    source.write_text(source.read_text().replace("import torch\n", "import torch\nimport lit_compress\n", 1))
    with pytest.raises(UserError, match="does not load by itself"):
        check_export(net, tmp_path)


@pytest.mark.parametrize("family", [*TINY, "t5-gated"])
def test_no_class_but_its_own_loads_it(family, tmp_path):
    """Another would draw the matrices that it does not find at random; so would one that loads it saved again."""
    import transformers

    net = exported(family, tmp_path / "out")
    expected = net(**inputs()).logits
    for name in ("out", "again"):
        folder = tmp_path / name
        for loader in (transformers.AutoModelForSequenceClassification, transformers.AutoModel, type(net)):
            with pytest.raises(Exception, match="load this folder with trust_remote_code=True"):
                loader.from_pretrained(folder)
        own = transformers.AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
        assert torch.equal(own(**inputs()).logits, expected)
        own.save_pretrained(tmp_path / "again")
        own_config, dense_config = own.config.to_dict(), net.config.to_dict()
        assert "trust_remote_code" not in str(own_config)
        assert all(own_config[name] == value for name, value in dense_config.items() if "act" in name)
    again = load_net(tmp_path / "out")
    assert torch.equal(again(**inputs()).logits, expected) and not hasattr(again.config, ACTIVATIONS)
    assert "trust_remote_code" not in str(again.config.to_dict())


def test_a_pipeline_refuses_it_too(tiny_backbone, tmp_path):
    from transformers import AutoTokenizer, pipeline

    folder = shutil.copytree(tiny_backbone, tmp_path / "out")
    net = exported("bert", folder)
    with pytest.raises(Exception, match="load this folder with trust_remote_code=True"):
        pipeline("text-classification", model=str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)  # asks for no trust
    answer = pipeline("text-classification", model=str(folder), trust_remote_code=True)("a great film")[0]
    expected = net(**tokenizer("a great film", return_tensors="pt")).logits.softmax(-1).max()
    assert answer["score"] == pytest.approx(float(expected), abs=1e-6)


def test_a_net_without_replaced_layers_loads_by_any_class(tmp_path):
    """All of its tensors are found under the names that the library knows."""
    net = make_net().eval()
    write_model(net, tmp_path)
    again, info = type(net).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and torch.equal(again(**inputs()).logits, net(**inputs()).logits)


FOLDER = {"file": "model.safetensors", "format": "hf"}


@pytest.fixture(scope="module")
def data(tiny_backbone, tiny_data):
    return DataModule("sst2", str(tiny_backbone), str(tiny_data), batch_size=8)


@pytest.fixture(scope="module")
def net(data):
    return load_backbone(data.backbone, data.record)


def test_the_same_net_is_the_same_on_two_shapes(net, data):
    certificate = Certificate(net, data, "validation")
    entry = certificate.compare(FOLDER, net, data, partial(certificate.answers, net))
    assert entry["difference"] == 0 and entry["verdict"] == "same" and certificate.entries == [entry]
    one, three = entry["shapes"]
    lengths = data.val_dataloader()[0].dataset.encoded["length"]
    assert one[0] == 1 and three == [3, max(lengths)] and min(lengths) < max(lengths)


@pytest.mark.parametrize("value", [0.01, float("nan")])
def test_another_is_refused_unless_it_was_asked_for(value, net, data):
    def other(inputs):
        return {"logits": net(**inputs).logits.detach() + value}

    certificate = Certificate(net, data, "validation")
    with pytest.raises(
        UserError, match=r"logits of model\.safetensors differ from .* by (1\.00e-02|nan), more than 1e"
    ):
        certificate.compare(FOLDER, net, data, other)
    assert certificate.entries == []
    entry = certificate.compare(FOLDER, net, data, other, same=False)
    assert entry["allowed"] is None and entry["verdict"] == "changed as asked"
    assert entry["difference"] != entry["difference"] or entry["difference"] == pytest.approx(0.01, rel=1e-3)


def test_places_of_padding_are_not_compared(tmp_path):
    """A vector of ModernBERT is made of tokens; states at padding are what a runtime makes of an empty window."""
    texts = [" ".join(WORDS[:number]) for number in range(2, 22)]
    (tmp_path / "texts.csv").write_text("\n".join(["text", *texts]))
    folder = str(write_backbone(tmp_path / "net", "modernbert", "stsb_embedding"))
    data = DataModule("custom", folder, str(tmp_path / "texts.csv"), custom=Custom("embedding"))
    net = load_backbone(folder, data.record).eval()
    certificate = Certificate(net, data, "train")

    def run(inputs, at=0):
        found = certificate.answers(net, inputs)
        places = (inputs["attention_mask"] == at)[..., None]
        return found | {"last_hidden_state": found["last_hidden_state"].masked_fill(places, torch.nan)}

    assert certificate.compare(FOLDER, net, data, run)["difference"] == 0
    with pytest.raises(UserError, match="by nan"):
        certificate.compare(FOLDER, net, data, partial(run, at=1))


def test_vectors_are_compared(tmp_path):
    """A program of a sentence model that pools in another way gives the same states."""
    (tmp_path / "texts.csv").write_text("\n".join(["text", *(" ".join(WORDS[:number]) for number in range(2, 22))]))
    folder = str(write_backbone(tmp_path / "net", "bert", "stsb_embedding"))
    data = DataModule("custom", folder, str(tmp_path / "texts.csv"), custom=Custom("embedding"))
    net = load_backbone(folder, data.record).eval()
    certificate = Certificate(net, data, "train")
    other = Embedding(Pooling("cls"))
    with torch.no_grad(), pytest.raises(UserError, match="differ from the model's before export"):
        certificate.compare(FOLDER, net, data, lambda inputs: other.gives(net(**inputs), inputs))


@pytest.mark.parametrize(("family", "task"), [("opt", "plain_text"), ("bart", "xsum")])
def test_nets_that_write_with_fewer_tokens(family, task, tmp_path, monkeypatch):
    """A logit of the small vocabulary is compared with that of the same piece; a block is read as far as is needed."""
    texts = [" ".join(WORDS[:number]) for number in range(4, 16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"document": "{t}", "summary": "a film"}}' for t in texts))
    (tmp_path / "text.txt").write_text("\n".join(texts * 40))
    source = tmp_path / ("text.txt" if task == "plain_text" else "rows.jsonl")
    folder = str(write_backbone(tmp_path / "net", family, task, max_position_embeddings=200))
    data = DataModule(task, folder, str(source))
    net = load_backbone(folder, get_task(task)).eval()
    monkeypatch.setattr("lit_compress.export.check.ELEMENTS", 30 * net.config.vocab_size)
    before = Certificate(net, data, "train")
    tokenizer = AutoTokenizer.from_pretrained(
        write_backbone(tmp_path / "few", family, task, WORDS[15::-1], max_position_embeddings=200)
    )
    small = keep_tokens(net, data.tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(range(20))))
    entry = before.compare(FOLDER, small, data.read_by(tokenizer), partial(before.answers, small))
    assert entry["difference"] < 1e-5 and small.config.vocab_size < net.config.vocab_size
    assert family == "bart" or [length for _, length in entry["shapes"]] == [30, 30]  # of the larger vocabulary
    torch.nn.init.zeros_(small.get_output_embeddings().weight)
    with pytest.raises(UserError):
        before.compare(FOLDER, small, data.read_by(tokenizer), partial(before.answers, small))


def test_one_text_at_a_time():
    """Logits over a vocabulary are compared without a copy of those of all texts; padding does not count."""
    kind = task_type(get_task("wikitext2"))
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    expected = torch.randn(3, 8, 50) * 3
    answered = expected.clone()
    answered[1, 6] += 100
    answered[2, 3, 4] += 0.5
    with largest_tensor() as largest:
        found = difference(kind, "logits", answered, expected, {"attention_mask": mask})
    assert largest() <= 8 * 50
    torch.testing.assert_close(found, 0.5 / expected[mask.bool()].abs().max(), rtol=1e-4, atol=0)
