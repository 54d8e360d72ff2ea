"""SP3's stage: when what is learned, what is kept, and that a run can be told to stay as it is."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import as_deployed, logits, random_bases
from tiny import make_batch, make_net

from lit_compress.layers import ProjectedLinear
from lit_compress.methods import SP3
from lit_compress.methods.sp3 import ProjectedPruning, ProjectedStage, SP3Distillation
from lit_compress.models.accounting import count_params, dense_site_params
from lit_compress.models.projected.gates import DIMENSIONS, GATES
from lit_compress.models.projected.projections import identity_bases
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe
from lit_compress.numerics.hard_concrete import probability
from lit_compress.numerics.losses import matched_layers_loss
from lit_compress.utils.errors import UserError

QUICK = ProjectedPruning(
    epochs=2, learning_rate=1e-3, tokens=200, examples=60, start=0.2, target_warmup=0.3, structure_start=0.6
)


def sp3(prune=QUICK, task="sst2", **settings):
    settings = {"density": 0.4, "distillation": SP3Distillation()} | settings
    return SP3(task=task, backbone="unused", prune=prune, **settings)


def based(stage, bases=identity_bases):
    """A stage whose projections are drawn or the identity, without a calibration."""
    stage._bases = lambda _, net: bases(net)
    return stage


class Built:
    """A stage over a tiny net with identity projections, without a fit."""

    def __init__(self, tmp_path, settings=QUICK, density=0.4, steps=100):
        save_net(make_net(), tmp_path)
        self.stage = based(ProjectedStage(settings, density))
        self.net = self.stage.begin(load_net(tmp_path), None, None).eval()
        self.stage.attach(self.net)
        self.stage.set_total_steps(steps)

    @torch.no_grad()
    def learn(self, seed=0, low=-3.0, high=3.0):
        for i, gate in enumerate(self.stage.gates.values()):
            gate.log_alpha.uniform_(low, high, generator=torch.Generator().manual_seed(seed + i))


def test_gates_and_target_by_step(tmp_path):
    stage = Built(tmp_path).stage
    assert stage.active(19) == set() and stage.active(20) == set(DIMENSIONS) == stage.active(59)
    assert stage.active(60) == set(GATES)
    first = 7 / 6 - (1 / 6 - 2 * 2 * 32**2 / dense_site_params(make_net()))  # 1 + 2 n d^2 / M_0
    assert stage.initial == pytest.approx(first, abs=1e-3)
    assert stage.target(20) == stage.initial and stage.target(50) == 0.4 == stage.target(99)
    assert stage.target(35) == pytest.approx((stage.initial + 0.4) / 2)
    assert not stage.at_budget(49) and stage.at_budget(50)


@pytest.mark.parametrize("density", [0.06, 0.3, 0.5])
def test_the_budget_is_exact(tmp_path, density):
    """Counted in the fused net: at most the budget, and as near as the cheapest unit allows."""
    built = Built(tmp_path, QUICK, density)
    built.learn()
    built.stage.deterministic(built.net, 100)
    fused, dense = as_deployed(built.net), dense_site_params(built.net)
    assert 0 <= round(density * dense) - count_params(fused).sites < 2 * 32
    assert torch.allclose(logits(fused), logits(built.net), atol=1e-5)
    masks = built.stage.kept_masks(100)
    for name, mask in masks.items():
        alpha = built.stage.gates[name].log_alpha
        for row, a in zip(mask, alpha, strict=True):
            if row.any() and not row.all():
                assert a[row].min() >= a[~row].max()
        if name not in DIMENSIONS:  # whole parts as they are expected, the offset is for dimensions
            assert torch.equal(mask.sum(1), (probability(alpha).sum(1) + 0.5).floor().long())


def test_before_the_end_of_the_ramp_as_many_as_expected(tmp_path):
    built = Built(tmp_path)
    built.learn()
    masks = built.stage.kept_masks(40)
    for name, mask in masks.items():
        expected = (probability(built.stage.gates[name].log_alpha).sum(1) + 0.5).floor().long()
        assert torch.equal(mask.sum(1), expected) if name in DIMENSIONS else mask.all()
    z = built.stage.deterministic(built.net, 40)
    assert all((z[name] == 1).all() for name in GATES if name not in DIMENSIONS)
    assert 0 < z["neurons"][masks["neurons"]].min() < 1  # soft, not made binary


def test_projections_of_heads_are_trained_and_resumed(tmp_path):
    built = Built(tmp_path)
    again = ProjectedStage(built.stage.settings, 0.4).begin(load_net(tmp_path), None, describe(built.net))
    for net in (built.net, again):
        layers = [module for module in net.modules() if isinstance(module, ProjectedLinear) and module.side]
        assert len(layers) == 8
        assert all(layer.projection.shape == (32, 32) and layer.projection.requires_grad for layer in layers)


def test_a_fit(fit, dense):
    """Gradients and AdamW's state appear with the gates; multipliers ascend; the originals stay."""
    before = load_net(dense).state_dict()
    seen = []

    def look(trainer, method):
        stage, step, state = method.stage, trainer.global_step, trainer.optimizers[0].state
        seen.append((step, stage.status(method.net, step)))
        learned = {id(parameter) for parameter in state if state[parameter]}
        for name, gate in stage.gates.items():
            assert (id(gate.log_alpha) in learned) == (name in stage.active(step - 1))
        for multiplier in (stage.linear, stage.quadratic):
            assert (id(multiplier) in learned) == bool(stage.active(step - 1))
        if stage.active(step - 2):  # at the first of them the target has not moved yet
            assert stage.quadratic > 0

    method = fit(sp3(), "prune", dense, look, teacher=dense, gradient_clip_val=1.0)
    names = {group.get("maximize", False) for group in method.trainer.optimizers[0].param_groups}
    assert names == {False, True}
    above = [s for _, s in seen if s["density"] > s["target"]]
    assert len(above) > 2 and above[-1]["lambda1"] > 0
    after = method.net.state_dict()
    for name in ("word_embeddings.weight", "encoder.layer.0.attention.self.query.weight",
                 "encoder.layer.1.output.dense.bias"):  # fmt: skip
        full = next(key for key in before if key.endswith(name))
        assert torch.equal(before[full], after[full])
    for name in ("encoder.layer.0.attention.self.query.projection", "encoder.layer.1.output.LayerNorm.p_in"):
        assert any(key.endswith(name) for key in after)
    assert not torch.equal(method.stage.map, torch.eye(32))


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_a_turned_stream_is_compared_where_the_teacher_is(tmp_path, family):
    """Nothing is lost while all gates are open, whatever the bases; the matrices that hold them are trained."""
    save_net(teacher := make_net(family).eval(), tmp_path)
    stage = based(ProjectedStage(QUICK, 0.5), random_bases)
    net = stage.begin(load_net(tmp_path), SimpleNamespace(distillation=SP3Distillation()), None).eval()
    stage.attach(net)
    batch = {n: v for n, v in make_batch().items() if n in ("input_ids", "attention_mask")}
    with torch.no_grad():
        own, theirs = (n(**batch, output_hidden_states=True).hidden_states for n in (net, teacher))
        assert float((own[0] - theirs[0]).abs().max()) > 1e-2
        assert float(stage.layer_loss(own, theirs, batch["attention_mask"], False)) < 1e-10
        z = {n: torch.ones(len(g.log_alpha), g.log_alpha.shape[1] * g.copies) for n, g in stage.gates.items()}
        z["hidden"] = torch.rand(z["hidden"].shape, generator=torch.Generator().manual_seed(2))
        stage.set_gates(net, z)
        own = net(**batch, output_hidden_states=True).hidden_states
        found = float(stage.layer_loss(own, theirs, batch["attention_mask"], False))
        sites = (0, 2)  # of the sub-layers that begin a layer
        bases = random_bases(teacher).sites
        own = [(z["hidden"][site] * h) @ bases[site].T.float() for site, h in zip(sites, own, strict=False)]
        means = [h.mean(-1, keepdim=True) if family == "opt" else 0 for h in theirs]
        theirs = [h - mean for h, mean in zip(theirs, means, strict=True)]
        assert found == pytest.approx(float(matched_layers_loss(own, theirs[:-1], batch["attention_mask"])), rel=1e-5)
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert any(name.endswith("q_proj.weight") for name in trained) and not any("embed" in name for name in trained)


@pytest.mark.parametrize("log_alpha", [10.0, 0.0])
def test_where_the_gates_begin(tmp_path, log_alpha):
    """P(z > 0) = sigmoid(log_alpha - 2/3 log(0.1 / 1.1)); the target falls from the density that is then expected."""
    stage = Built(tmp_path, replace(QUICK, log_alpha=log_alpha), 0.6).stage
    assert all((gate - log_alpha).abs().max() < 0.06 for gate in stage.log_alphas.values())
    opened = 1 / (1 + math.exp(-log_alpha) * (0.1 / 1.1) ** (2 / 3))
    units = {name: torch.full((groups,), opened * count) for name, (groups, count) in stage.size.shapes.items()}
    assert stage.target(0) == pytest.approx(float(stage.size(units)) / stage.size.total, abs=1e-3)


def test_regression_hears_the_teacher():
    """KL of one logit is 0; the program left the classifier without a gradient."""
    from lit_compress.numerics.losses import logits_losses

    target = torch.tensor([[1.0], [2.0]])
    student = torch.tensor([[0.5], [2.0]], requires_grad=True)
    settings = SP3Distillation()
    losses = logits_losses(student, target, "regression", teacher=target)
    term = settings.logits_weight("regression") * losses["distillation"]
    assert float(term) == pytest.approx(0.3 * 0.125)
    term.backward()
    assert student.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": 0.5, "target_warmup": 0.5}, "leave no step at the target"),
        ({"tokens": 0}, "prune.tokens: 0 is below 1"),
        ({"log_alpha": 13.0}, r"prune.log_alpha: 13.0 is not in \[-12, 12\]; usual: 10"),
        ({"structure_start": 1.0}, r"prune.structure_start: 1.0 is not in \[0, 1\)"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(UserError, match=message):
        ProjectedPruning(**settings)


def test_a_start_behind_the_last_step_is_refused():
    stage = ProjectedStage(ProjectedPruning(start=0.95, target_warmup=0.01), 0.4)
    stage.set_total_steps(100)
    with pytest.raises(UserError, match=r"prune\.start: 0\.95 leaves none of the 10 steps .*; nearest valid 0\.9$"):
        stage.set_total_steps(10)


def test_what_a_net_cannot():
    net = make_net()

    def check(net=net, density=0.4, **settings):
        sp3(replace(QUICK, **settings), density=density).stages()[-1].check(net)

    def refused(words, *net, **settings):
        with pytest.raises(UserError, match=words):
            check(*net, **settings)

    check()
    refused("prune.tokens: 31 tokens are fewer than the 32 dimensions; give at least 32", tokens=31)
    beyond = r"model.density: 0.06 cannot be reached with the gates neurons; reachable: 0.\d+ to 1, [\d,]+ to"
    refused(beyond, make_net("modernbert"), density=0.06)
    refused(r"the hidden states of 't5' cannot be projected \(its sub-layers ", make_net("t5"))
    check(make_net("albert"))


def test_parts_that_are_closed_as_wholes_stay_closed(tmp_path):
    """Also where all that is open is less than the budget: a warning says so."""
    built = Built(tmp_path, density=0.9)
    built.learn(low=2.0)
    with torch.no_grad():
        built.stage.gates["ffn_layer"].log_alpha.copy_(torch.tensor([[-4.0], [4.0]]))
        built.stage.gates["heads"].log_alpha[0, 1:] = -4.0
    with pytest.warns(UserWarning, match="closed so many heads and layers that a density of 0.8"):
        built.stage.deterministic(built.net, 100)
    masks = built.stage.kept_masks(100)
    assert masks["ffn_layer"].flatten().tolist() == [False, True] and masks["heads"][0].tolist() == [True] + [False] * 3
    assert all(masks[name].all() for name in ("hidden", "qk", "vo", "neurons", "attention_layer"))
