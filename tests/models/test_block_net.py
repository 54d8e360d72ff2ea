"""A net of which one block is in memory gives what the whole net gives, for every family whose blocks go one by one."""

import pytest
import torch
from tiny import ALL, DECODERS, make_inputs, make_net

from lit_compress.models.block_net import BlockNet, check_by_block
from lit_compress.models.files import LazyTensors
from lit_compress.utils.errors import UserError

REFUSED = ("albert", "albert-groups", "deberta-v2", "deberta-v2-conv", "deberta-v2-own-positions", "bart",
           "bart-uneven", "t5", "t5-gated")  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_blocks_one_by_one_are_the_net(name, tmp_path):
    family, settings = ALL[name]
    task = "wikitext2" if family in DECODERS else "sst2"
    net = make_net(family, "sst2" if family in ("bart", "t5") else task, **settings).eval()
    if name in REFUSED:
        with pytest.raises(UserError, match=r"--by_block: .* cannot go block by block"):
            check_by_block(net)
        return
    net.save_pretrained(tmp_path)
    inputs = make_inputs(3, 9)
    with torch.no_grad():
        expected, hidden = net(**inputs).logits, None
        found = BlockNet(net.config, LazyTensors(tmp_path, "model: 'x'"))
        for i in range(len(found)):
            with found.block(i):
                hidden = found.step(i, inputs, hidden)
            assert all(value.is_meta for value in found.blocks[i].parameters())
        assert torch.allclose(found.finish(inputs, hidden).logits, expected, atol=1e-5)
    assert {value.device.type for value in found.net.parameters()} == {"cpu"}


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_outside_the_blocks_can_be_given_up_for_a_while(tied, tmp_path):
    net = make_net("llama", "wikitext2", tie_word_embeddings=tied).eval()
    net.save_pretrained(tmp_path)
    found = BlockNet(net.config, LazyTensors(tmp_path, "model: 'x'"))
    before = {name: value.clone() for name, value in found.outside().items()}
    with found.block(0) as block, found.only_block():
        assert {value.device.type for value in found.net.parameters()} == {"meta"}
        assert {value.device.type for value in block.parameters()} == {"cpu"}
    after = found.outside()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert (found.net.lm_head.weight is found.net.model.embed_tokens.weight) == tied


def test_a_missing_tensor_is_named(tmp_path):
    net = make_net("llama", "wikitext2")
    net.save_pretrained(tmp_path)
    net.config.num_hidden_layers = 3
    found = BlockNet(net.config, LazyTensors(tmp_path, "model: 'x'"))
    with pytest.raises(UserError, match=r"model: 'x' has no tensor 'model.layers.2.self_attn.q_proj.weight'"):
        found.fill(2, found.blocks[2])
