"""LPAF step by step: the weighted factorization, the coins, the two forwards, the whole loss."""

from types import SimpleNamespace

import pytest
import torch
from helpers import begun
from safetensors.torch import load_file, save_file
from tiny import make_batch, make_net

from lit_compress.methods import LPAF
from lit_compress.methods.lpaf import MixedRank, by_density
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe
from lit_compress.numerics.losses import consistency_loss, task_loss
from lit_compress.stages.rank_rule import RankRule


@pytest.fixture
def pruned(tmp_path):
    """The folder of a sparse net with row importances, as the pruning stage leaves it."""
    return make_pruned(tmp_path / "pruned", make_net(dropout=0.0))


def make_pruned(folder, net, seed=3):
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for site in find_sites(net):
        weight = net.get_submodule(site.name).weight
        with torch.no_grad():
            weight.normal_(generator=generator).mul_(torch.rand(weight.shape, generator=generator) < 0.4)
        importance = torch.rand(len(weight), generator=generator, dtype=torch.float64) ** 4 + 1e-3
        rows[f"{site.name}/scores"] = importance
    save_file(rows, folder / "importance.safetensors")
    save_net(net, folder)
    return folder


def module(pruned, density=0.5, seed=0, **settings):
    """LPAF in its last stage, built from ``pruned``."""
    method = begun(LPAF(backbone="unused", density=density, retrain=MixedRank(**settings)), pruned, seed=seed)
    method.step_seed = 5
    return method


@pytest.fixture
def at(monkeypatch):
    """Let a method stand at a step: at(method, step) -> method."""

    def stand(method, step):
        monkeypatch.setattr(LPAF, "trainer", SimpleNamespace(global_step=step))
        return method

    return stand


def test_factors_are_the_literal_formula(pruned):
    """Eqs. 9-11 with the inverse, row importance on the output side: A = D^-1 U_k Sigma_k, B = V_k^T."""
    net, rows = load_net(pruned), load_file(pruned / "importance.safetensors")
    built = module(pruned).net
    for site in find_sites(net):
        weight = net.get_submodule(site.name).weight.detach().double()
        d = rows[f"{site.name}/scores"].sqrt()
        u, s, vh = torch.linalg.svd(torch.diag(d) @ weight)
        layer = built.get_submodule(site.name)
        k = layer.rank
        literal = torch.diag(1 / d) @ u[:, :k] @ torch.diag(s[:k]) @ vh[:k]
        assert torch.allclose(layer.left.double() @ layer.right.double(), literal, atol=1e-5)


def test_p_falls_linearly_to_zero_at_half_time(pruned):
    """Invariant 29."""
    stage = module(pruned, p_init=0.6).stage
    assert [stage.p(step) for step in (0, 25, 50, 51, 100)] == pytest.approx([0.6, 0.3, 0.0, 0.0, 0.0])
    stage.set_total_steps(101)
    assert stage.p(50) > 0 == stage.p(51)


@pytest.mark.parametrize(("density", "p", "v"), [(0.5, 0.1, 0.5), (0.25, 0.3, 0.25), (0.16, 0.7, 0.1), (0.1, 0.7, 0.1)])
def test_defaults_follow_the_density(density, p, v):
    _, prune, retrain = LPAF(backbone="unused", density=density).stages()
    assert (retrain.first_p(make_net()), prune.kept(make_net())) == (p, v)
    assert by_density(density, 0.1, 0.3, 0.7) == p


@pytest.mark.parametrize(("rank", "p", "v"), [(260, 0.1, 0.5), (130, 0.3, 0.25), (80, 0.7, 0.1)])
def test_defaults_follow_the_rank(rank, p, v, bert_base):
    """The paper's ranks for BERT-base at 50, 25 and 16 % (Tables 4 and 7); ``density`` does not count beside one."""
    _, prune, retrain = LPAF(backbone="unused", rank=rank).stages()
    assert (retrain.first_p(bert_base), prune.kept(bert_base)) == (p, v)


def test_a_stage_that_begins_follows_the_rank(tmp_path):
    """Also where nothing was checked before: continued in another process, from the factorized net's structure."""
    save_net(make_net(), tmp_path)
    _, prune, retrain = LPAF(backbone="unused", rank=3).stages()
    density = 2 * (4 * 3 * 64 + 2 * 3 * 96) / (2 * (4 * 32 * 32 + 2 * 32 * 64))
    assert RankRule(rank=3).density_of(make_net()) == pytest.approx(density) and density < 0.205
    prune.begin(load_net(tmp_path), None, None)
    names = [site.name for site in find_sites(make_net())]
    retrain.begin(load_net(tmp_path), None, {name: {"rank": 3} for name in names})
    assert (retrain.p_init, prune.density) == (0.7, 0.1)


def test_coins_have_the_right_mean_and_depend_on_the_seed_only(pruned):
    """Invariant 33."""
    stage = module(pruned).stage
    coins = torch.cat([stage._throw(0.3, seed, 2) for seed in range(400)]).float()
    assert float(coins.mean()) == pytest.approx(0.3, abs=0.02)
    assert torch.equal(stage._throw(0.3, 9, 2), stage._throw(0.3, 9, 2))
    assert not torch.equal(stage._throw(0.5, 9, 2), stage._throw(0.5, 10, 2))
    assert not torch.equal(*(row for row in stage._throw(0.5, 9, 2)))


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "t5", "llama"])
@pytest.mark.parametrize("mode", ["concat", "sequential"])
def test_two_forwards_equal_two_plain_ones(family, mode, tmp_path):
    """Invariant 32: same coins, no dropout: every mode gives the logits and the gradients of two passes."""
    pruned = make_pruned(tmp_path / "pruned", make_net(family, dropout=0.0))
    method, batch = module(pruned), make_batch()
    stage = method.stage
    assert stage._concats(torch.device("cuda")) == (family != "deberta-v2") and not stage._concats(torch.device("cpu"))
    stage._concats = lambda _: mode == "concat" and family != "deberta-v2"
    coins = stage._throw(0.5, 3, 2)
    assert not torch.equal(coins[0], coins[1])
    found = stage._two_forwards(method, batch, coins)
    (found**2).sum().backward()
    grads = {n: p.grad.clone() for n, p in method.net.named_parameters() if p.grad is not None}
    method.zero_grad()
    expected = []
    for row in coins:
        stage._set(row[None])
        expected.append(method.logits(batch))
    (torch.cat(expected) ** 2).sum().backward()
    assert torch.allclose(found, torch.cat(expected), atol=1e-5)
    for name, p in method.net.named_parameters():
        if p.grad is not None:
            assert torch.allclose(grads[name], p.grad, atol=1e-3, rtol=1e-3), name


def test_loss_is_task_plus_consistency(pruned, at):
    """Eq. 14 added to the mean of the two task losses, by hand."""
    method, batch = at(module(pruned, p_init=0.5, consistency=0.7), 10), make_batch()
    terms = method.stage.losses(method, batch)
    coins = method.stage._throw(method.stage.p(10), 5, 2)
    logits = []
    for row in coins:
        method.stage._set(row[None])
        logits.append(method.logits(batch))
    task = sum(task_loss(y, batch["labels"], "classification") for y in logits) / 2
    assert torch.allclose(terms["task"], task, atol=1e-6)
    assert torch.allclose(terms["consistency"], 0.7 * consistency_loss(*logits, "classification"), atol=1e-6)
    assert terms["consistency"] > 0


def test_equal_coins_have_no_consistency_loss(pruned, at):
    """Invariant 31, without dropout."""
    method = at(module(pruned, p_init=0.0), 0)
    assert float(method.stage.losses(method, make_batch())["consistency"]) == pytest.approx(0, abs=1e-10)


def test_after_the_decay_the_matrices_are_released(pruned, at):
    method = at(module(pruned, p_init=0.5), 60)
    assert "consistency" in method.stage.losses(method, make_batch())
    assert all(layer.weight is None for layer in method.stage._layers)


def test_no_consistency_is_a_single_forward(pruned, at):
    method = at(module(pruned, consistency=0.0), 0)
    assert set(method.stage.losses(method, make_batch())) == {"task"}
    assert {len(layer.z) for layer in method.stage._layers} == {1}


def test_restoring_builds_the_same_shapes_without_an_svd(pruned, monkeypatch):
    full = module(pruned)
    monkeypatch.setattr("lit_compress.stages.low_rank.weighted_svd", None)
    method = begun(LPAF(backbone="unused", density=0.5), pruned, structure=describe(full.net))
    assert {k: v.shape for k, v in method.state_dict().items()} == {k: v.shape for k, v in full.state_dict().items()}
