"""Nets that write: with the cache as without, compressed as dense at full rank, elsewhere as here."""

import pytest
import torch
from helpers import as_deployed, disturb, gates_of, random_bases
from moments import decompose
from tiny import ALL, DECODERS, make_inputs, make_net

from lit_compress.export.check import check_export
from lit_compress.export.modelling import write_model
from lit_compress.layers import LowRankSparseLinear
from lit_compress.layers.training.mixed_rank import MixedRankLinear
from lit_compress.models import accounting as budget
from lit_compress.models.projected.gates import GATES
from lit_compress.models.projected.projections import insert_projections
from lit_compress.models.record import join_parts, parts_of
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net, save_net, tied
from lit_compress.models.surgery import describe, factorize
from lit_compress.stages.rank_rule import RankRule

WRITERS = {
    **{name: "xsum" for name in ("bart", "bart-uneven", "t5", "t5-gated")},
    **{name: "plain_text" for name in (*DECODERS, "opt-350m", "llama-one-key", "qwen3-sliding")},
}


def make_writer(variant, **more):
    """A net whose next token hangs on what it has read: weights are far from 0."""
    family, settings = ALL[variant]
    net = make_net(family, WRITERS[variant], dropout=0.0, **settings, **more).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in net.named_parameters():
            mean = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            p.copy_(mean + 0.2 * torch.randn(p.shape, generator=generator))
    return net


def compressed(net):
    return factorize(net, RankRule(0.5).allocate(net), lambda _, w, r: decompose(w, r))


def mixed(net):
    factorize(net, RankRule(0.5).allocate(net), lambda _, w, r: decompose(w, r), MixedRankLinear)
    return as_deployed(net)


def cut(net):
    """Whole heads and neurons are gone, of all attentions of the first blocks."""
    factorize(net, {site.name: 0 for site in find_sites(net)}, None, LowRankSparseLinear)
    for site in find_sites(net):
        parts = parts_of(site.role)
        if site.layer == 0 and {"v", "gate", "up"} & {*parts}:
            layer = net.get_submodule(site.name)
            size = layer.out_features // len(parts)
            dead = join_parts(site.role, [torch.arange(size) < size // 2] * len(parts), 8)
            layer.sparse.data[: len(dead)][dead] = 0
    return as_deployed(net)


def turned(net):
    """SP3's: directions of the stream are gone, and of heads and neurons."""
    gates = gates_of(net.config.model_type)
    insert_projections(net, random_bases(net), gates)
    disturb(net, gates, kill=[("heads", 0), ("attention_layer", 1)] if gates == GATES else [])
    return as_deployed(net)


def write(net, **settings):
    """The written tokens and the scores of every step."""
    inputs = make_inputs()
    if not net.config.is_encoder_decoder:  # what is padded stands before the text
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    found = net.generate(
        **inputs, max_new_tokens=7, min_new_tokens=7, do_sample=False, return_dict_in_generate=True,
        output_scores=True, **settings,
    )  # fmt: skip
    return found.sequences, torch.stack(found.scores)


TURNED = ("bart", "opt", "gpt2", "phi3", "llama", "llama-one-key", "mistral", "qwen2", "qwen3", "qwen3-sliding")


@pytest.mark.parametrize(
    ("variant", "change"),
    [*((v, compressed) for v in ("bart", "t5-gated", "gpt2", "llama")), *((v, cut) for v in WRITERS),
     *((v, turned) for v in TURNED)],
)  # fmt: skip
def test_cache_changes_nothing(variant, change):
    net = change(make_writer(variant))
    assert describe(net)
    with_cache, scores = write(net, num_beams=3, use_cache=True)
    without, other = write(net, num_beams=3, use_cache=False)
    assert torch.equal(with_cache, without)
    torch.testing.assert_close(scores, other, atol=1e-4, rtol=1e-4)
    first = write(net)[1][3]
    assert not torch.allclose(first[0], first[2], atol=1e-3)  # it depends on the text


@pytest.mark.parametrize("variant", WRITERS)
def test_tied_tensors_are_stored_once(variant, tmp_path):
    """And are tied again; what has parted (T5 v1.1's output layer) stays apart."""
    from safetensors.torch import load_file

    net = compressed(make_writer(variant))
    assert bool(tied(net)) == (
        variant not in ("gpt_neox", "phi3", "llama", "llama-one-key", "mistral", "qwen3-sliding")
    )
    save_net(net, tmp_path)
    assert not tied(net).keys() & load_file(tmp_path / "model.safetensors").keys()
    again = load_net(tmp_path)
    assert tied(again) == tied(net) and torch.equal(write(again)[0], write(net)[0])
    assert budget.count_params(again) == budget.count_params(net)
    net.lm_head.weight = torch.nn.Parameter(torch.randn_like(net.lm_head.weight))
    save_net(net, tmp_path)
    again = load_net(tmp_path)
    assert "lm_head.weight" not in tied(again)
    assert torch.equal(write(again)[1], write(net)[1])


def test_generation_settings_travel(tmp_path):
    net = make_writer("bart")
    net.generation_config.update(num_beams=5, length_penalty=0.7, max_new_tokens=9)
    save_net(net, tmp_path)
    settings = load_net(tmp_path).generation_config
    assert (settings.num_beams, settings.length_penalty, settings.max_new_tokens) == (5, 0.7, 9)


@pytest.mark.parametrize("variant", ["bart", "llama"])
def test_flops_of_a_writer(variant):
    """The output layer and, of an encoder-decoder, 8 tokens written after 32 were read; by hand."""

    def attention(queries, keys):
        return 2 * queries * keys * 32

    wide, length, out = 32 * 64, 32, 8
    if variant == "llama":
        expected = 2 * (length * (2 * 32 * 32 + 2 * 16 * 32 + 3 * wide) + attention(length, length)) + length * 32 * 100
    else:
        expected = 2 * (length * (4 * 32 * 32 + 2 * wide) + attention(length, length))
        second = 2 * (out + length) * 32 * 32 + attention(out, length)
        expected += 2 * (out * (4 * 32 * 32 + 2 * wide) + attention(out, out) + second) + out * 32 * 100
    assert budget.flops(make_writer(variant), length) == 2 * expected


@pytest.mark.parametrize(
    ("variant", "change"),
    [*((v, turned) for v in ("bart", "opt", "llama-one-key", "qwen3", "qwen3-sliding")),
     *((v, mixed) for v in ("bart-uneven", "t5-gated", "opt-350m", "llama-one-key", "qwen3-sliding"))],
)  # fmt: skip
def test_exports_write_elsewhere(variant, change, tmp_path):
    fused = change(make_writer(variant))
    assert change is mixed or (not fused.config.tie_word_embeddings and not tied(fused))
    write_model(fused, tmp_path)
    assert check_export(fused, tmp_path) <= 1e-5
