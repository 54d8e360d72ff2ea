"""The order in which two nets put texts, beside SciPy's correlation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from tiny import make_net

from lit_compress.evaluation.order import same_order
from lit_compress.tasks.records import get_task


def _data(task, batches=4):
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(batches):
        ids = torch.randint(5, 20, (8, 6), generator=generator)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids),
                      "index": torch.arange(8) + 8 * number})  # fmt: skip
    return SimpleNamespace(record=get_task(task), sample_dataloader=lambda rows: found, tokenizer=None), found


@pytest.mark.parametrize("task", ["stsb", "wiki_qa"])
def test_it_is_spearmans(task):
    nets = [make_net("bert", task, seed=seed, dropout=0.0, initializer_range=0.3).eval() for seed in (0, 1)]
    data, batches = _data(task)

    def numbers(net):
        with torch.no_grad():
            found = [net(b["input_ids"], attention_mask=b["attention_mask"]).logits[:, 0] for b in batches]
        return torch.cat(found).numpy()

    expected = stats.spearmanr(*(numbers(net) for net in nets)).statistic
    assert same_order(*nets, data) == pytest.approx(expected, abs=1e-5)
    assert same_order(nets[0], nets[0], data) == pytest.approx(1)


def test_classes_have_no_order():
    assert same_order(None, None, _data("sst2")[0]) is None
