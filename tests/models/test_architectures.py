"""One record per architecture: its paths exist, and what it lacks is refused in one line."""

import pytest
from tiny import ALL, TINY, make_net

from lit_compress.models.architectures import ARCHITECTURES, families_with
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.sites import blocks, has, sublayers
from lit_compress.utils.errors import UserError


def test_every_family_is_tested():
    assert set(ARCHITECTURES) == set(TINY)


def test_every_path_of_a_record_exists():
    """One of the tiny nets of its family has it, at least."""
    missing = {}
    for family, settings in (*ALL.values(), ("deberta-v2", {"type_vocab_size": 2})):
        net, record = make_net(family, **settings), ARCHITECTURES[family]
        paths = {
            path for spec in record.sublayers for path in (*spec.linears, spec.norm, spec.module, *spec.also) if path
        }
        paths |= {path for spec in record.sublayers for path in spec.when_removed or ()}
        absent = {path for path in paths if not any(has(block, path) for *_, block in blocks(net))}
        base = {path for stack in record.stacks.values() for path in (*stack.writers, stack.norm) if path}
        absent |= {path for path in (*base, *record.embeddings) if not has(net.base_model, path)}
        missing[family] = missing.get(family, absent) & absent
    assert {family: paths for family, paths in missing.items() if paths} == {}


@pytest.mark.parametrize("family", TINY)
def test_a_record_is_whole(family):
    """Either all sub-layers have what a capability asks for, or none; the activation is in the configuration."""
    record, config = ARCHITECTURES[family], make_net(family).config
    assert len({spec.when_removed is None for spec in record.sublayers}) == 1
    norms = [stack.norm for stack in record.stacks.values()] + [spec.norm for spec in record.sublayers]
    assert record.keeps_basis or len({norm is None for norm in norms}) == 1
    assert isinstance(getattr(config, record.activation), str)
    assert not record.cuts_stream or (record.has_removable_sublayers and not record.pre_norm)


@pytest.mark.parametrize("family", TINY)
def test_head_attributes_are_those_of_the_attention(family):
    """A net with all heads has the values that would be set."""
    record, net = ARCHITECTURES[family], make_net(family)
    if record.head_attributes is None:
        return
    attention = next(block for *_, block in blocks(net)).get_submodule(record.sublayers[0].module)
    assert {name: getattr(attention, name) for name in record.head_attributes(8, 4)} == record.head_attributes(8, 4)


def test_what_a_family_lacks_is_one_line():
    """The error names the families that have it."""
    able = families_with(lambda record: record.has_removable_sublayers)
    assert set(able.split(", ")) == {"bert", "roberta", "camembert", "xlm-roberta", "mpnet", "electra", "distilbert",
                                     "deberta-v2", "modernbert", "opt", "gpt2", "gpt_neox", "bart", "t5"}  # fmt: skip
    one = f"'albert' cannot be gated .one block runs in all layers, so they have one shape.; those of {able} can"
    for family, named in {"albert": one, "llama": "'llama' cannot be gated; those of bert"}.items():
        with pytest.raises(UserError, match=named):
            sublayers(make_net(family))
    with pytest.raises(UserError, match="350m"):
        sublayers(make_net("opt", do_layer_norm_before=False))
    able = families_with(lambda record: record.has_residual_stream)
    assert set(able.split(", ")) == set(TINY) - {"deberta-v2", "t5", "gemma2", "gemma3_text"}
    with pytest.raises(
        UserError, match=rf"the hidden states of 't5' cannot be projected \(.*\); nearest: SecondOrder, or {able}"
    ):
        residual_stream(make_net("t5"))
