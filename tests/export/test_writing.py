"""Programs that write: the same tokens as the net, with their cache, without transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from test_generation import cut, make_writer
from tiny import DECODERS, make_batch

from lit_compress.export import writing
from lit_compress.export.writing import write_writing
from lit_compress.stages.blocks import kept_sublayers, remove_others

_CODE = """
import sys
sys.modules["lit_compress"] = sys.modules["transformers"] = None
sys.path.insert(0, ".")
import json
from write import Writer
inputs = json.loads(sys.argv[1])
print(json.dumps(Writer(".").write(**inputs, longest=9).tolist()))
"""


def inputs_for(net):
    batch = make_batch()
    found = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return found if net.config.is_encoder_decoder else {name: value.flip(1) for name, value in found.items()}


# over 10 s: two programs of a model that writes
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["opt", "bart"])
def test_the_same_tokens_as_the_net(variant, tmp_path):
    pytest.importorskip("onnxruntime")
    one = {"encoder_layers": 1, "decoder_layers": 1} if variant == "bart" else {"num_hidden_layers": 1}
    net = cut(make_writer(variant, **one)).eval().requires_grad_(False)
    net.generation_config.forced_eos_token_id = None
    net.generation_config.forced_bos_token_id = 7 if variant == "bart" else None
    batch = make_batch(3, 12)
    texts = [{name: batch[name][rows] for name in ("input_ids", "attention_mask")} for rows in (slice(1), slice(3))]
    found = write_writing(net, tmp_path, texts)
    assert found["difference"] <= 1e-4 and found["tokens"] > 8
    assert found["bytes"] == sum((tmp_path / name).stat().st_size for name in found["files"])
    inputs = inputs_for(net)
    given = json.dumps({name: value.tolist() for name, value in inputs.items()})
    done = subprocess.run([sys.executable, "-c", _CODE, given], cwd=tmp_path, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout) == net.generate(**inputs, max_new_tokens=9, do_sample=False, num_beams=1).tolist()


@pytest.mark.slow
def test_a_decoder_that_lost_an_attention_writes_the_same_tokens(tmp_path):
    """Its cache has a layer without keys behind the others."""
    pytest.importorskip("onnxruntime")
    net = make_writer("llama").eval().requires_grad_(False)
    remove_others(net, kept_sublayers(net, [False, True, True, True]))
    texts = [{name: make_batch(2, 12)[name][:1] for name in ("input_ids", "attention_mask")}]
    assert write_writing(net, tmp_path, texts)["difference"] <= 1e-4
    with pytest.raises(ValueError, match="some blocks of the decoder read nothing of the encoder"):
        layers = [SimpleNamespace(keys=None, values=None), SimpleNamespace(keys=torch.ones(1), values=torch.ones(1))]
        writing._tensors(SimpleNamespace(layers=layers))


def test_other_tokens_are_seen(tmp_path, monkeypatch):
    """Of the tokens that programs write, the net's own logits say whether it would write them."""
    net = make_writer("opt")

    class Other:
        facts = {"first": None, "end": [2]}

        def __init__(self, folder):
            pass

        def write(self, ids, mask, longest):
            return net.generate(torch.from_numpy(ids), max_new_tokens=4, do_sample=False).numpy() + self.more

    more = torch.zeros(1, 14, dtype=torch.int64).numpy()
    monkeypatch.setattr(writing.writer, "Writer", Other)
    texts = [{"input_ids": make_batch(2, 10)["input_ids"][:1], "attention_mask": torch.ones(1, 10)}]
    for last, same in ((0, True), (1, False)):
        more[:, 12] = last
        Other.more = more
        count, off = writing._compare(net, tmp_path, texts)
        assert count and (off < 1e-6) == same


@pytest.mark.parametrize("family", DECODERS)
def test_a_prompt_has_the_logits_of_its_last_token_alone(family):
    """The output layer over the vocabulary is by far the largest of its matrices."""
    net, rows = make_writer(family).eval(), []
    net.get_output_embeddings().register_forward_hook(lambda _, args, output: rows.append(output.shape[:-1].numel()))
    module, inputs, _ = writing._parts(net)["decode"]
    rows.clear()
    module(**inputs)
    assert rows == [3]
