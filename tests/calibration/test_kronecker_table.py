"""Kronecker factors of a table of embeddings, against plain autograd."""

import torch
from in_memory import collect_kronecker
from test_kronecker_factors import batch_of, cut, losses_of, make

from lit_compress.calibration import moments
from lit_compress.tasks import KINDS


def test_the_table_is_a_matrix_that_reads_one_hot_vectors():
    """By plain autograd, one example after the other: how often every token occurs, and the gradients of its rows."""
    net, name = make(), "bert.embeddings.word_embeddings"
    batch, table = batch_of(net), net.bert.embeddings.word_embeddings
    counts, outer = torch.zeros(table.num_embeddings, dtype=torch.float64), 0.0
    for row in cut(batch, *[1] * 4):
        outputs = []
        handle = table.register_forward_hook(lambda _, args, y, seen=outputs: seen.append((args[0], y)))
        logits = net(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).logits
        handle.remove()
        ((ids, y),) = outputs
        counts += torch.bincount(ids.flatten(), minlength=len(counts))
        for weight, loss in losses_of(KINDS["classification"], logits, row, "exact", 0):
            (d,) = torch.autograd.grad(loss, y, retain_graph=True)
            outer = outer + weight * torch.einsum("...i,...j->ij", d, d)
    found = collect_kronecker(net, cut(batch, 3, 1), "classification", labels="exact", table=name)
    plain = collect_kronecker(net, [batch], "classification", labels="exact")
    tokens = int(counts.sum())
    torch.testing.assert_close(found[name].inputs(), (counts + moments.UNSEEN) / tokens)
    torch.testing.assert_close(found[name].gradients(), outer / 4)
    assert found[name].tokens == tokens and not found[name].mean.numel()
    assert found.keys() - plain.keys() == {name}
    for site in plain:
        torch.testing.assert_close(found[site].gradients(), plain[site].gradients())
