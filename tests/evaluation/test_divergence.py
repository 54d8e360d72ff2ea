"""Two nets on the same examples: their divergence against loops."""

from types import SimpleNamespace

import pytest
import torch
from tiny import make_net
from torch.utils.data import DataLoader

from lit_compress.evaluation.evaluate import divergence
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
