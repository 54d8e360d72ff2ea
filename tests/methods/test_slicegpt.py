"""SliceGPT: the axes behind the slices before them, exact nets at full width, the budget, its mistakes in one line."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import logits, net_of
from tiny import make_batch, make_net

from lit_compress.methods import SliceGPT
from lit_compress.methods.slicegpt import SLICED, Axes
from lit_compress.models.accounting import count_params, stored_density
from lit_compress.models.projected.projections import identity_bases, insert_projections, narrowed
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.sites import blocks
from lit_compress.models.surgery import describe, rebuild
from lit_compress.stages.distillation import Distillation
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError

FAMILIES = ("bert", "mpnet", "bart", "opt", "llama")
WIDTH = 19


def stage_of(**settings):
    return SliceGPT(backbone="x", task="sst2", **settings).stages()[-1]


def slice_stream(net, axes, widths):
    """Give hidden states their bases, U [d, d] of every site, and keep the first of their directions, in place."""
    return narrowed(net, SLICED, {"hidden": torch.tensor(widths)}, replace(identity_bases(net), sites=axes))


def hookable(net):
    """A copy of the net whose residual path has modules that can be hooked."""
    if not residual_stream(net).pre_norm:
        return copy.deepcopy(net)
    return insert_projections(copy.deepcopy(net), identity_bases(net), SLICED)


def slice_by_hooks(net, site, kept):
    """Let all readers of a site have only some directions: its norms, and a change of basis after it."""
    stream, projector = residual_stream(net), (kept @ kept.mT).to(net.dtype)
    ends = [sublayer.junction for sublayer in stream.turns if sublayer.reads == site]
    for name in (*stream.sites[site].norms, *ends):
        net.get_submodule(name).register_forward_pre_hook(lambda _, args: (args[0] @ projector,))


def axes_of(net, width=WIDTH, batch=None):
    count = len(residual_stream(net).sites)
    batches = [make_batch(16, 12)] if batch is None else [batch]
    found = Axes([width] * count).answer(net, batches, task_type("classification"), None)
    assert list(found) == list(range(count))
    return list(found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_folded_slices_are_those_that_calibrated(family):
    """At full width nothing changes; narrower, the folded net is the one with hooks, and has the counted weights."""
    net = net_of(family)
    expected, hooked = logits(net), hookable(net)
    axes = axes_of(net)
    assert torch.equal(logits(net), expected)
    full = slice_stream(copy.deepcopy(net), axes, [32] * len(axes))
    assert torch.allclose(logits(full), expected, atol=1e-6)
    for i, u in enumerate(axes):
        assert torch.allclose(u.mT @ u, torch.eye(32).double())
        slice_by_hooks(hooked, i, u[:, :WIDTH])
    small = slice_stream(net, axes, [WIDTH] * len(axes))
    assert torch.allclose(logits(small), logits(hooked), atol=1e-6)
    assert not torch.allclose(logits(small), expected, atol=1e-3)


@pytest.mark.parametrize("family", ["bert", "opt"])
def test_what_is_trained_is_what_a_checkpoint_rebuilds(family):
    """Dropout draws for the same tensors, so that a resumed run ends like an unbroken one."""
    net = make_net(family, dropout=0.2)
    count = len(residual_stream(net).sites)
    small = slice_stream(copy.deepcopy(net), [torch.eye(32).double()] * count, [WIDTH] * count).train()
    again = rebuild(net, describe(small)).train()
    again.load_state_dict(small.state_dict())
    found = []
    for one in (small, again):
        torch.manual_seed(0)
        found.append(logits(one))
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_axes_are_of_what_the_sliced_net_computes(family):
    """The literal way: nets in which the sites before are sliced, their states at real tokens, one decomposition."""
    batch = make_batch(16, 12)
    axes, eye = axes_of(net_of(family), batch=batch), torch.eye(32).double()
    for i in range(1, 4):
        done = [*axes[:i], *[eye] * (4 - i)]
        net = slice_stream(net_of(family), done, [WIDTH] * i + [32] * (4 - i)).eval()
        states = []
        for name in residual_stream(net).sites[i].norms:
            net.get_submodule(name).register_forward_pre_hook(lambda _, args, own=states: own.append(args[0]))
        with torch.no_grad():
            net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        real = batch["attention_mask"].flatten().bool()
        x = torch.cat([state.reshape(-1, 32)[real] for state in states]).double()
        values, found = torch.linalg.eigh(x.mT @ x)
        first = found.flip(-1)[:, :WIDTH]
        assert values.flip(-1)[WIDTH - 1] > 1e-8  # so that they are what they are
        assert torch.allclose((first * axes[i][:, :WIDTH]).sum(0).abs(), torch.ones(WIDTH).double(), atol=1e-5)


def test_widths_meet_the_density():
    net = make_net("opt")
    stage = stage_of(density=0.6)
    widths = stage.compression.widths(net)
    assert widths == sorted(widths, reverse=True) and max(widths) - min(widths) == 1
    outlined = stage.outline(copy.deepcopy(net).to("meta"))
    small = slice_stream(net, [torch.eye(32).double()] * 4, widths)
    assert 0.58 < stored_density(small) <= 0.6
    assert count_params(outlined) == count_params(small)
    assert {width % 8 for width in stage_of(density=0.6, round_to=8).compression.widths(make_net("opt"))} == {0}
    # in BERT a W_R is a quarter of what stands beside it
    stage, net = stage_of(density=0.75 + 0.75**2 / 4), make_net("bert").to("meta")
    assert stage.compression.widths(net) == [24] * 5
    assert stored_density(stage.outline(net)) == pytest.approx(0.75 + 0.75**2 / 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distillation": Distillation(alpha_layers=1.0)}, r"distillation\.alpha_layers: 1\.0 compares hidden states"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(UserError, match=f"^{message}[^\n]*$"):
        SliceGPT(backbone="x", **settings)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "t5",
            {},
            r"model\.backbone: the hidden states of 't5' cannot be projected \(.*\); nearest: SecondOrder, or bert",
        ),
        ("albert", {}, r"model\.backbone: hidden states of 'albert' cannot be sliced: its blocks run more than once"),
        ("modernbert", {}, r"model\.backbone: hidden states of 'modernbert' cannot be sliced: its first attention"),
        ("bert", {"density": 0.01}, r"model\.density: 0\.01 cannot be reached .*; the smallest is 0\.03"),
    ],
)
def test_what_cannot_be_sliced(family, settings, message):
    with pytest.raises(UserError, match=f"^{message}[^\n]*$"):
        stage_of(**settings).check(make_net(family))


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_the_time_is_linear_in_the_number_of_blocks(family):
    """A block runs once for each of its two sites, and once for the states behind it; not for the sites after it."""
    net, calls = make_net(family, num_hidden_layers=6), []
    *_, (*_, block) = blocks(net)
    first = next(iter(blocks(net)))[-1]
    for module in (first, block):
        module.register_forward_pre_hook(lambda module, _: calls.append(module))
    axes_of(net)
    assert calls.count(block) <= 3 and calls.count(first) <= 4  # and once to see the form of its output


@pytest.mark.parametrize("family", ["bert", "opt"])
def test_a_process_without_examples_has_the_axes_of_the_others(family):
    net, batch, sums = make_net(family), make_batch(16, 12), []
    asked, kind = Axes([WIDTH] * len(residual_stream(net).sites)), task_type("classification")
    axes = asked.answer(net, [batch], kind, lambda total: sums.append(total.clone()))
    filled = batch | {"index": torch.full_like(batch["index"], -1)}
    others = asked.answer(net, [filled], kind, lambda total: total.copy_(sums.pop(0)))
    assert not sums and all(torch.equal(others[site], own) for site, own in axes.items())
