"""The same prompt continued by two nets: with an encoder too, with other tokens, and not for nets that do not write."""

from __future__ import annotations

import copy

import torch
from tiny import make_net, write_backbone
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lit_compress.evaluation.continuation import _same, continuations


class Rows:
    """What is read of the data: the tokens of its first dev row."""

    def __init__(self, tokenizer, ids):
        self.tokenizer, self.dataset, self.encoded = tokenizer, self, [{"input_ids": ids}]

    def val_dataloader(self):
        return [self]


def test_a_net_with_an_encoder_writes_of_the_prompt(tmp_path):
    folder = write_backbone(tmp_path, "bart", "xsum", decoder_start_token_id=2, forced_eos_token_id=None)
    net, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    net.generation_config.update(num_beams=4, length_penalty=2.0)
    ids = tokenizer("plot is fine wit and story " * 5)["input_ids"]
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.final_logits_bias[0, 7] += 100
    data = Rows(tokenizer, ids)
    found = continuations((net, data), (other, data))
    assert found["prompt"] == tokenizer.decode(ids[:16])
    read = torch.tensor([tokenizer(found["prompt"])["input_ids"]])
    new = net.generate(read, num_beams=1, length_penalty=1.0, max_new_tokens=20, do_sample=False)[0, 1:]
    assert found["dense"] == tokenizer.decode(new, skip_special_tokens=True) and found["tokens"] == len(new)
    assert found["compressed"].split() == [tokenizer.decode([7])] * 20 and found["same"] == 0
    again = Rows(copy.deepcopy(tokenizer), ids)  # as where the export has a vocabulary of its own
    assert continuations((net, data), (net, again))["same"] == len(new)
    assert continuations((make_net("bert"), data), (make_net("bert"), data)) is None


def test_how_far_two_lists_are_the_same():
    assert [_same(*pair) for pair in (([], []), ([1], [2]), ([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 5, 3]))] == [
        0,
        0,
        2,
        1,
    ]
