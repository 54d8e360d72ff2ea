"""Two nets on the same examples: their divergence against loops, the order of their numbers against SciPy."""

from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from tiny import make_net
from torch.utils.data import DataLoader

from lit_compress.evaluation.evaluate import divergence, same_order
from lit_compress.tasks import task_type
from lit_compress.tasks.records import get_task

LENGTHS = (7, 4, 5, 6, 3)


def rows(task):
    """Examples of several lengths, padded, with labels of the task."""
    generator, made = torch.Generator().manual_seed(0), []
    for length in LENGTHS:
        row = {"input_ids": torch.randint(5, 20, (7,), generator=generator),
               "attention_mask": (torch.arange(7) < length).long()}  # fmt: skip
        labels = {"sst2": torch.tensor(1), "stsb": torch.tensor(2.0)}
        tags = torch.where(row["attention_mask"] > 0, torch.tensor(1), torch.tensor(-100))
        made.append(row | {"labels": labels.get(task, tags)})
    return made


def data_of(task):
    some = rows(task)
    return SimpleNamespace(
        record=get_task(task), tokenizer=None, sample_dataloader=lambda n: DataLoader(some[:n], batch_size=2)
    )


def kl(p, q):
    return float((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1))


@pytest.mark.parametrize("task", ["sst2", "stsb", "conll2003"])
@pytest.mark.parametrize("limit", [3, 5])
def test_equals_the_loop(task, limit, monkeypatch):
    monkeypatch.setattr("lit_compress.evaluation.evaluate.ROWS", limit)
    kind = task_type(get_task(task))
    net, dense = (make_net("bert", task=task, seed=seed, initializer_range=0.3).eval() for seed in (0, 1))
    total = 0.0
    for row in rows(task)[:limit]:
        batch = {name: value[None] for name, value in row.items()}
        with torch.no_grad():
            ours, theirs = (kind.logits(n(**kind.inputs(n, batch)), batch)[0] for n in (net, dense))
        if task == "stsb":
            total += float((ours - theirs).square().sum()) / 2
        elif task == "sst2":
            total += kl(theirs, ours)
        else:
            total += sum(kl(p, q) for p, q, label in zip(theirs, ours, row["labels"], strict=True) if label != -100)
    assert total > 0
    assert divergence(net, dense, data_of(task)) == pytest.approx(total / limit, rel=1e-4)
    assert divergence(dense, dense, data_of(task)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("task", ["stsb", "wiki_qa"])
def test_it_is_spearmans(task):
    nets = [make_net("bert", task, seed=seed, dropout=0.0, initializer_range=0.3).eval() for seed in (0, 1)]
    data = data_of(task)

    def numbers(net):
        with torch.no_grad():
            masks = [(row["input_ids"][None], row["attention_mask"][None]) for row in rows(task)]
            return [float(net(ids, attention_mask=mask).logits) for ids, mask in masks]

    expected = stats.spearmanr(*(numbers(net) for net in nets)).statistic
    assert same_order(*nets, data) == pytest.approx(expected, abs=1e-5)
    assert same_order(nets[0], nets[0], data) == pytest.approx(1)


def test_classes_have_no_order():
    assert same_order(None, None, data_of("sst2")) is None
