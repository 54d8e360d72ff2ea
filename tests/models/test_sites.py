"""Every Linear of the blocks is a site, nothing else is."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers import logits
from moments import decompose
from tiny import ALL, SIZES, VARIANTS, make_inputs, make_net
from torch import nn

from lit_compress.calibration.statistics import watched
from lit_compress.export.check import check_export
from lit_compress.export.fuse import fuse
from lit_compress.export.modelling import write_model
from lit_compress.models import accounting as budget
from lit_compress.models.architectures import ARCHITECTURES
from lit_compress.models.record import Architecture, Stack, SubLayerSpec
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.sites import blocks, find_sites, shared_inputs, sublayers
from lit_compress.models.storage import load_net
from lit_compress.models.surgery import factorize
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError


def unplaced(net):
    """The names of the Linears inside the blocks that are no sites in the record of the family."""
    sites = {site.name for site in find_sites(net)}
    inside = [f"{name}.{path}" for *_, name, block in blocks(net) for path, module in block.named_modules()
              if isinstance(module, nn.Linear)]  # fmt: skip
    return [name for name in inside if name not in sites]


@pytest.mark.parametrize("variant", ALL)
def test_sites_are_all_linears_of_the_blocks(variant):
    """Invariant 10: embeddings, projections, pooler and head are untouched."""
    family, settings = ALL[variant]
    net = make_net(family, **settings)
    inside = {site.name for site in find_sites(net)}
    assert all(isinstance(net.get_submodule(name), nn.Linear) for name in inside)
    assert all(s.name.rpartition(".")[2].startswith(s.role) for s in find_sites(net) if s.role in ("q", "k", "v"))
    # own projections of relative positions (old DeBERTa-v2), which the record leaves out on purpose
    assert [name for name in unplaced(net) if not name.endswith(("pos_key_proj", "pos_query_proj"))] == []
    outside = {name for name, m in net.named_modules() if isinstance(m, nn.Linear)} - inside
    allowed = ("pooler", "classifi", "head", "score", "project", "embedding_hidden_mapping_in", "pos_")
    assert all(any(word in name for word in allowed) for name in outside)


def test_blocks_of_groups_are_numbered_through():
    """ALBERT with 2 blocks in each of 3 groups."""
    found = [(layer, name) for _, layer, name, _ in blocks(make_net("albert", **VARIANTS["albert-groups"][1]))]
    path = "albert.encoder.albert_layer_groups.{}.albert_layers.{}"
    assert found == [(2 * group + inner, path.format(group, inner)) for group in range(3) for inner in range(2)]


def test_base_model_alone_has_sites_too():
    net = make_net("bert").base_model
    assert find_sites(net)[0].name == "encoder.layer.0.attention.self.query"


@pytest.mark.parametrize("variant", ALL)
def test_sites_that_read_one_input(variant):
    """The groups read the very same tensor at every use, and no two groups of a block do."""
    net, read = make_net(ALL[variant][0], **ALL[variant][1]), {}
    for site in find_sites(net):
        module = net.get_submodule(site.name)
        module.register_forward_hook(lambda _, args, y, name=site.name: read.setdefault(name, []).append(args[0]))
    net(**make_inputs())
    groups = shared_inputs(net)
    fused = any("qkv" in site.role for site in find_sites(net))  # q, k and v are one site: every group has one
    assert any(len(group) > 1 for group in groups) != fused
    assert sorted(name for group in groups for name in group) == sorted(read)
    assert [site.name for site in find_sites(net)] == list(read)  # in forward order
    for group in groups:
        for name in group[1:]:
            assert [id(x) for x in read[name]] == [id(x) for x in read[group[0]]]
    sites = {site.name: site for site in find_sites(net)}
    leaders = [group[0] for group in groups if not sites[group[0]].cross]
    if not getattr(net.config, "position_buckets", None):
        assert len({tuple(map(id, read[name])) for name in leaders}) == len(leaders)


@pytest.fixture(scope="module")
def unknown():
    return make_net("megatron-bert", **SIZES).eval()


@pytest.fixture
def own(monkeypatch):
    """A record of a module of the user's: where the blocks and the embeddings are, and the role of each Linear."""
    attention = {f"attention.self.{name}": name[0] for name in ("query", "key", "value")}
    record = Architecture(
        stacks={"encoder": Stack("encoder.layer.*", ("embeddings",))},
        sublayers=(
            SubLayerSpec("attention", {**attention, "attention.output.dense": "o"}),
            SubLayerSpec("ffn", {"intermediate.dense": "up", "output.dense": "down"}),
        ),
    )
    monkeypatch.setitem(ARCHITECTURES, "megatron-bert", record)


def test_a_record_of_a_module_of_its_own_is_enough_for_low_rank(unknown, own, tmp_path):
    net = copy.deepcopy(unknown)
    assert len(find_sites(net)) == 12 and unplaced(net) == []
    params = budget.count_params(net)
    inputs = net.base_model.embeddings.parameters()
    assert params.total - params.non_embedding == sum(value.numel() for value in inputs)
    full = {site.name: min(net.get_submodule(site.name).weight.shape) for site in find_sites(net)}
    whole = factorize(copy.deepcopy(net), full, lambda _, w, r: decompose(w, r))
    torch.testing.assert_close(logits(whole), logits(unknown), atol=1e-5, rtol=0)
    small = fuse(factorize(net, RankRule(0.5).allocate(net), lambda _, w, r: decompose(w, r)))
    write_model(small, tmp_path)
    assert check_export(small, tmp_path) <= 1e-5
    assert budget.stored_density(load_net(tmp_path)) == budget.stored_density(small) <= 0.5


def test_matrices_that_read_no_tokens_of_the_texts_are_one_line():
    """A model may pad its inputs by itself, or read the states of its encoder under a name of its own."""
    fc, sums = nn.ModuleDict({"fc": nn.Linear(4, 2)}), SimpleNamespace(by_token=True, use=lambda *_: None)
    with watched(fc, sums, {}, [torch.ones(2, 5)], 2, ["fc"]):
        fc["fc"](torch.ones(2, 5, 4))
        with pytest.raises(UserError, match=r"calibration: 'fc' reads \(2, 7, 4\), not the tokens of 2 texts; choose"):
            fc["fc"](torch.ones(2, 7, 4))


def test_what_a_record_does_not_name_is_one_line(unknown, own):
    with pytest.raises(UserError, match="sub-layers of 'megatron-bert' cannot be gated; those of bert, "):
        sublayers(unknown)
    with pytest.raises(UserError, match="hidden states of 'megatron-bert' cannot be projected; nearest: SecondOrder"):
        residual_stream(unknown)


def test_an_architecture_without_a_record_is_one_line(unknown):
    with pytest.raises(UserError, match=r"'megatron-bert' is not supported; .* Else add a record .*add_an_arch"):
        find_sites(unknown)
