"""FWSVD as a method: Eqs. 3-6 of the paper, literally, on the data of the run."""

import pytest
import torch
from helpers import started

from lit_compress.data.datamodule import DataModule
from lit_compress.methods import FWSVD
from lit_compress.methods.fwsvd import Weighted
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net
from lit_compress.utils.errors import UserError


def weighted(**settings):
    retrain = Weighted(epochs=1, learning_rate=1e-9, **settings)
    return FWSVD(backbone="unused", rank_ratio=0.33, retrain=retrain)


def literal_fisher(net, data):
    """Eq. 3 with one backward pass per example: mean of the squared gradients, [out, in] per site."""
    net = net.double().eval()
    total, count = {s.name: 0.0 for s in find_sites(net)}, 0
    for batch in data.train_dataloader():
        for i in range(len(batch["labels"])):
            net.zero_grad()
            inputs = {k: batch[k][i : i + 1] for k in ("input_ids", "attention_mask", "token_type_ids") if k in batch}
            torch.nn.functional.cross_entropy(net(**inputs).logits, batch["labels"][i : i + 1]).backward()
            count += 1
            for name in total:
                total[name] = total[name] + net.get_submodule(name).weight.grad ** 2
    return {name: value / count for name, value in total.items()}


def test_factors_are_the_papers(fit, dense, tiny_backbone, tiny_data):
    """I W = U S V^T with I = diag(sqrt of row sums) in the paper's orientation; A = I^-1 U_r S_r, B = V_r^T."""
    net = started(fit, weighted(), dense)
    data = DataModule("sst2", str(tiny_backbone), str(tiny_data), batch_size=8)
    fisher = literal_fisher(load_net(dense), data)
    reference = load_net(dense).double()
    for site in find_sites(net):
        layer = net.get_submodule(site.name)
        paper_w = reference.get_submodule(site.name).weight.detach().T  # [in, out]
        importance = torch.diag(fisher[site.name].T.sum(1).sqrt())
        u, s, vh = torch.linalg.svd(importance @ paper_w, full_matrices=False)
        r = int(0.33 * min(paper_w.shape))
        a, b = torch.linalg.inv(importance) @ u[:, :r] @ torch.diag(s[:r]), vh[:r]
        assert layer.rank == r
        assert torch.allclose((layer.left @ layer.right).double(), (a @ b).T, atol=1e-5)


def test_a_weighting_has_a_smaller_error_of_equation_five(fit, dense, tiny_backbone, tiny_data):
    """The importance of each weight is its own there; one for each column comes nearer to it than none."""
    data = DataModule("sst2", str(tiny_backbone), str(tiny_data), batch_size=8)
    fisher, reference = literal_fisher(load_net(dense), data), load_net(dense).double()

    def error(weighting):
        net = started(fit, weighted(weighting=weighting), dense)
        total = 0.0
        for site in find_sites(net):
            layer = net.get_submodule(site.name)
            weight, product = reference.get_submodule(site.name).weight.detach(), (layer.left @ layer.right).double()
            total += float((fisher[site.name] * (weight - product.detach()) ** 2).sum())
        return total

    assert error("fisher") < error("none")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: FWSVD(backbone="x", density=0.5, rank=3), "model.density 0.5, model.rank 3: only one"),
        (lambda: Weighted(fisher_examples=0), "retrain.fisher_examples: 0"),
    ],
)
def test_mistakes_are_one_line(build, words):
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        build()
