"""LoRA: the net begins as it is, only updates and new heads are trained, and the end is an ordinary net."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_batch, make_net

from lit_compress.__main__ import main
from lit_compress.methods import SVD
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import describe, factorize
from lit_compress.numerics.decompose import decompose
from lit_compress.stages.base import Training
from lit_compress.stages.lora import LoRA, LowRankUpdate, Retraining, add_updates, merge_updates
from lit_compress.utils.errors import UserError

ON = Retraining(parameters="lora", lora=LoRA(rank=2, alpha=3.0))


def trained(net):
    return {name for name, parameter in net.named_parameters() if parameter.requires_grad}


def low_rank_net(family="bert", rank=12):
    net = make_net(family).eval()
    sites = [site.name for site in find_sites(net) if site.role in ("q", "k", "up", "down")]
    return factorize(net, dict.fromkeys(sites, rank), lambda name, weight, rank: decompose(weight, rank))


def moved(net):
    """Give all updates some values, as training does."""
    torch.manual_seed(1)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, LowRankUpdate):
                module.up.normal_()
    return net


def test_the_update_is_the_papers():
    random = torch.Generator().manual_seed(0)
    update, weight = LowRankUpdate(3, 4, 2, 1.5, random), torch.randn(3, 4)
    assert torch.equal(update(weight) + 0, weight)  # B is zero
    torch.nn.init.normal_(update.up)
    for i in range(3):
        for j in range(4):
            product = sum(update.up[i, r].item() * update.down[r, j].item() for r in range(2))
            assert update(weight)[i, j].item() == pytest.approx(weight[i, j].item() + 1.5 * product, abs=1e-6)


def test_a_product_with_the_update_is_that_with_the_sum_and_has_no_gradient_of_its_size():
    """Under autocast, too; what `F.linear` keeps for the backward and gives back are small."""
    update, weight = LowRankUpdate(30, 40, 2, 1.5, torch.Generator().manual_seed(0)), torch.randn(30, 40)
    torch.nn.init.normal_(update.up)
    x, bias = torch.randn(5, 40, requires_grad=True), torch.randn(30)
    whole = update.merged(weight)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = torch.nn.functional.linear(x, update(weight), bias)
    assert torch.allclose(y, torch.nn.functional.linear(x, whole, bias), atol=1e-4)
    assert [t.data_ptr() == weight.data_ptr() for t in kept if t.numel() == weight.numel()] == [True]
    given = torch.randn_like(y)
    wanted = (update.up, update.down, x)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, whole, bias), wanted, given)
    for found, right in zip(torch.autograd.grad(y, wanted, given), expected, strict=True):
        assert torch.allclose(found, right, atol=1e-3)
    named = torch.nn.functional.linear(x, weight=update(weight), bias=bias)
    assert torch.allclose(named, y, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        z = torch.nn.functional.linear(x, update(weight), bias)
    assert z.dtype == torch.bfloat16 and torch.allclose(z.float(), y, atol=0.5)


@pytest.mark.parametrize("family", ["bert", "opt", "llama"])
def test_factors_and_matrices_get_updates_and_lose_them(family):
    net, inputs = low_rank_net(family), make_batch()
    inputs = {name: value for name, value in inputs.items() if name in ("input_ids", "attention_mask")}
    expected, structure = net(**inputs).logits, describe(net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    add_updates(net, ON, seed=0)
    assert torch.equal(net(**inputs).logits, expected) and describe(net) == structure
    updated = {name.rpartition(".parametrizations.")[0] for name in trained(net) if "parametrizations" in name}
    assert updated == {site.name for site in find_sites(net)}
    assert {name for name in trained(net) if "parametrizations" not in name} <= {
        "classifier.weight", "classifier.bias", "score.weight",
    }  # fmt: skip
    changed = moved(net)(**inputs).logits
    assert not torch.allclose(changed, expected, atol=1e-3)
    merge_updates(net)
    assert torch.allclose(net(**inputs).logits, changed, atol=1e-6) and describe(net) == structure
    assert net.state_dict().keys() == before.keys()
    for name, value in net.state_dict().items():
        if value.ndim < 2 or "embed" in name:
            assert torch.equal(value, before[name]), name


def test_the_rank_of_factors_stays_and_the_change_has_the_rank_of_the_update():
    net = low_rank_net()
    name = find_sites(net)[0].name
    before = net.get_submodule(name).left.detach().clone()
    merge_updates(moved(add_updates(net, ON, seed=0)))
    layer = net.get_submodule(name)
    assert layer.left.shape == before.shape
    assert int(torch.linalg.matrix_rank(layer.left.detach() - before)) == 2


def test_matrices_on_one_right_factor_keep_nothing_after_a_forward():
    """An input and a factor that are kept are memory, and a device beside the CPU does not give the factor up."""
    net, inputs = make_net("bert").eval(), make_batch()
    names = tuple(site.name for site in find_sites(net)[:3])
    stacks = {names[0]: names}
    factorize(net, {names[0]: 12}, lambda name, weight, rank: decompose(weight, rank), stacks=stacks)
    moved(add_updates(net, ON, seed=0))
    merges, merged = [], LowRankUpdate.merged
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LowRankUpdate, "merged", lambda *args: merges.append(args) or merged(*args))
        changed = net(input_ids=inputs["input_ids"]).logits
    assert merges == []  # no sum of a matrix and its update
    assert all(getattr(net.get_submodule(name), "_last", ()) == () for name in names)
    assert torch.allclose(merge_updates(net)(input_ids=inputs["input_ids"]).logits, changed, atol=1e-6)


def test_a_matrix_smaller_than_its_update_is_trained_itself():
    net = low_rank_net(rank=2)  # 2 (32 + 2) > 64: the factor itself is smaller than its update
    add_updates(net, ON, seed=0)
    name = find_sites(net)[0].name
    assert f"{name}.left" in trained(net) and f"{name}.right" in trained(net)


def test_the_output_layer_of_a_language_model_stays():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    net = add_updates(AutoModelForCausalLM.from_config(config), ON, seed=0)
    assert trained(net) and all("parametrizations" in name for name in trained(net))


def test_others_train_everything():
    for settings in (Training(), Retraining()):
        net = low_rank_net()
        assert trained(add_updates(net, settings, seed=0)) == {name for name, _ in net.named_parameters()}


def test_the_same_seed_gives_the_same_updates():
    first, second, other = (add_updates(low_rank_net(), ON, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match=r"^lora.rank: 0 is below 1"):
        LoRA(rank=0)


@pytest.mark.slow
def test_a_run_exports_an_ordinary_net_and_its_checkpoint_is_read_again(
    short_run, tiny_backbone, tmp_path, monkeypatch
):
    monkeypatch.setattr("lit_compress.run.folder.Run.remove_checkpoints", lambda run, stage: None)
    run = tmp_path / "run"
    main(["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--model.teacher", str(tiny_backbone),
          "--model.retrain.parameters", "lora", "--model.retrain.lora.rank", "2", "--trainer.logger", "false",
          "--run_dir", str(run)])  # fmt: skip
    exported = load_file(run / "export" / "model.safetensors")
    assert not any("parametrizations" in name for name in exported)
    checkpoint = torch.load(run / "retrain" / "best.ckpt", weights_only=True)
    method = SVD(backbone="unused", density=0.5, retrain=Retraining(parameters="lora", lora=LoRA(rank=2)))
    method.prepare(method.stages()[-1], 3, run / "dense" / "net", None, checkpoint["lit_compress"])
    method.configure_model()
    method.load_state_dict(checkpoint["state_dict"])
    merged = merge_updates(method.net).state_dict()
    assert exported.keys() <= merged.keys()
    assert all(torch.equal(merged[name], value) for name, value in exported.items())
