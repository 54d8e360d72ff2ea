"""The export refuses what does not load by itself or answers otherwise."""

from __future__ import annotations

import subprocess

import pytest
import torch
from moments import decompose
from tiny import ALL, TINY, make_batch, make_net

from lit_compress.export.check import check_export
from lit_compress.export.fuse import fuse
from lit_compress.export.modelling import write_model
from lit_compress.layers.training.mixed_rank import MixedRankLinear
from lit_compress.models.storage import ACTIVATIONS, load_net
from lit_compress.models.surgery import factorize
from lit_compress.stages.rank_rule import RankRule
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


def test_other_weights_are_refused(tmp_path):
    net = exported("bert", tmp_path)
    with torch.no_grad():
        net.classifier.bias.add_(0.01)
    with pytest.raises(UserError, match=r"logits differ by 1\.00e-02"):
        check_export(net, tmp_path)


def test_other_logits_than_before_the_export_are_refused(tmp_path):
    """The folder may have been written right, and of a model that is not the one that was fused."""
    net = exported("bert", tmp_path)
    before = exported("bert", tmp_path)
    assert check_export(net, tmp_path, before) <= 1e-6
    with torch.no_grad():
        before.classifier.bias.add_(0.01)
    with pytest.raises(UserError, match=r"differ by 1\.00e-02 from the model's before export, more than 1e-04"):
        check_export(net, tmp_path, before)


@pytest.mark.slow
def test_a_file_that_needs_the_package_is_refused(tmp_path, monkeypatch):
    """In a process that is started anew, as on a user's machine, not in a fork (reloads.py)."""
    monkeypatch.setattr("lit_compress.export.check.subprocess", subprocess)
    net = exported("bert", tmp_path)
    source = tmp_path / "modeling_compressed.py"
    source.write_text(source.read_text().replace("import torch\n", "import torch\nimport lit_compress\n", 1))
    with pytest.raises(UserError, match="does not load by itself"):
        check_export(net, tmp_path)


@pytest.mark.slow
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
