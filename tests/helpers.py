"""What tests of several rooms share: nets in the training forms of SP3 and CoFi, one step outside a trainer."""

import copy

import torch
from tiny import VARIANTS, make_batch, make_net
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lit_compress.export.fuse import fuse
from lit_compress.layers import BasisChange, ProjectedLinear, ProjectedNorm, StreamNorm
from lit_compress.layers.training.masked import MaskedLinear
from lit_compress.methods.cofi.gates import gated_size, possible_gates
from lit_compress.models.cut import close_empty_sublayers, cut_closed
from lit_compress.models.projected.gates import DIMENSIONS, GATES, GateSlots, gate_shapes
from lit_compress.models.projected.projections import Bases, fold_projections, insert_projections
from lit_compress.models.residual_stream import has_head_projections, residual_stream
from lit_compress.models.surgery import replace

ENCODERS = ["bert", "roberta", "mpnet", "electra", "distilbert"]
# hidden states keep their basis
FIXED = {"albert": ("albert", {}), "electra-small": ("electra", {"embedding_size": 16}),
         **{name: VARIANTS[name] for name in ("albert-groups", "opt-350m", "modernbert-biases")},
         "modernbert": ("modernbert", {}), "gpt2": ("gpt2", {}), "gpt_neox": ("gpt_neox", {})}  # fmt: skip
FAMILIES = [*ENCODERS, "bart", "opt", "llama", "phi3", "qwen2", "qwen3", *FIXED]
# an epsilon that is seen
SETTINGS = {"bert": {"layer_norm_eps": 0.05}, "electra": {"embedding_size": 32}, "bart": {"scale_embedding": True},
            **{name: {"rms_norm_eps": 0.05} for name in ("llama", "phi3", "qwen2", "qwen3")}}  # fmt: skip
TRAINED = (BasisChange, ProjectedLinear, ProjectedNorm, StreamNorm)
LLAMA = ("hidden", "neurons")
IN_FLOAT32 = ("llama", "phi3", "qwen2", "qwen3")  # whose own norms are computed in float32
OWN_GATES = {**dict.fromkeys(("llama", "mistral", "phi3", "qwen2", "qwen3"), LLAMA),
             **dict.fromkeys(("modernbert", "modernbert-biases", "gpt2", "gpt_neox"), ("neurons",))}  # fmt: skip


def gates_of(family):
    """All the gates that a family can have."""
    return OWN_GATES.get(family, GATES[1:] if family in FIXED else GATES)


def net_of(family, dtype=torch.float64, **settings):
    """A net whose LayerNorms and biases are not trivial."""
    kind, own = FIXED.get(family, (family, {}))
    net = make_net(kind, **SETTINGS.get(kind, {}) | own | settings).eval().to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in net.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.add_((0.3 * noise if p.ndim == 1 else 0.15 * noise).to(dtype))
    return net


def logits(net, **settings):
    batch = make_batch(**settings)
    ids = batch["input_ids"] % net.config.vocab_size  # the backbone of fits has fewer
    with torch.no_grad():
        return net(input_ids=ids, attention_mask=batch["attention_mask"]).logits


def cached_logits(net):
    """A decoder's logits in two steps with a cache, and in one without."""
    ids = make_batch(size=2)["input_ids"]
    with torch.no_grad():
        whole = net(ids, use_cache=False).logits
        first = net(ids[:, :5], use_cache=True)
        second = net(ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    return torch.cat([first.logits, second.logits], 1), whole


def alone(folder, texts):
    """The logits that transformers alone gives to single texts, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    net = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([net(**tokenizer(text, return_tensors="pt")).logits for text in texts])


class Tokenizer:
    """What an export asks of one: the names of what it makes."""

    def __init__(self, *names):
        self.names = ("input_ids", *names, "attention_mask")

    def __call__(self, text):
        return dict.fromkeys(self.names)


def narrow(net):
    """A head, an attention and a feed-forward network are dead, the last two in one layer."""
    gates = gates_of(net.config.model_type)
    insert_projections(net, random_bases(net), gates)
    disturb(net, gates, kill=[("heads", 0), ("attention_layer", 1), ("ffn_layer", 1)])
    return net


def gated(net):
    """Units, heads and whole sub-layers are gone."""
    cut_closed(net, random_z(net, possible_gates(net)))
    return net


def evaluated(net):
    return logits(net.eval())


def random_bases(net, seed=0):
    """Orthogonal axes, and any pair of matrices that are each other's inverse for queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    d, heads, stream = net.config.hidden_size, net.config.num_attention_heads, residual_stream(net)
    count = len(stream.attentions) * has_head_projections(net)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    mixes = [torch.eye(d // heads).double() + 0.2 * draw(heads, d // heads, d // heads) for _ in range(count)]
    return Bases(
        [torch.linalg.qr(draw(d, d))[0] for _ in range(len(stream.rotatable))],
        mixes,
        [torch.linalg.inv(mix).mT for mix in mixes],
        [torch.linalg.qr(draw(heads, d // heads, d // heads))[0] for _ in range(count)],
    )


@torch.no_grad()
def disturb(net, gates=GATES, kill=()):
    """Gates of any value with zeros, projections that were trained, shifts that are not zero; return what is kept.

    ``kill``: (gate, group) whose units go, but one of a dimension's.
    """
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, TRAINED):
            for name in ("p_in", "p_out", "projection", "shift", "scale", "offset", "weight"):
                value = getattr(module, name, None)
                if value is not None:
                    value.add_(0.1 * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype))
    kept, z = {}, {}
    for name, (groups, size) in gate_shapes(net, gates).items():
        kept[name] = torch.rand(groups, size, generator=generator) < 0.6
        if name in DIMENSIONS:
            kept[name][:, 2] = True
        for gate, group in kill:
            if gate == name and group < groups:
                kept[name][group] = False
                kept[name][group, 2:3] = name in DIMENSIONS
        values = kept[name] * (0.1 + 0.9 * torch.rand(groups, size, generator=generator))
        z[name] = values.repeat(1, net.config.num_attention_heads if name in ("qk", "vo") else 1).to(net.dtype)
    GateSlots(net, gates).set(z)
    return kept


def random_z(net, gates, seed=0):
    """Soft values in [0.6, 1], some closed: a head or two, whole sub-layers, a layer without open units."""
    generator = torch.Generator().manual_seed(seed)
    z = {}
    for name, shape in gated_size(net, gates).shapes.items():
        value = 0.6 + 0.4 * torch.rand(shape, generator=generator)
        z[name] = value * (torch.rand(shape, generator=generator) > 0.35)
    for name in ("attention_layer", "ffn_layer"):
        if name in z:
            z[name] = torch.tensor([[0.9], [0.0], [0.8], [0.7]]).repeat(2, 1)[: len(z[name])]
    for name, other in (("heads", "attention_layer"), ("neurons", "ffn_layer")):
        if name in z:
            z[name][3] = 0.0 if other in z else z[name][3]  # no unit is left, so the sub-layer goes
            z[name][0] = torch.maximum(z[name][0], torch.tensor(0.6)) if name == "heads" else z[name][0]
            z[name][:, 0] = torch.maximum(z[name][:, 0], torch.tensor(0.0 if other in z else 0.7))
    return close_empty_sublayers(z)


def taken_out(net):
    """A copy of a net in a training form, without what its stage put in (``Stage.deploy``)."""
    net = copy.deepcopy(net)
    if any(isinstance(module, TRAINED) for module in net.modules()):
        fold_projections(net)
    for name, module in list(net.named_modules()):
        if isinstance(module, MaskedLinear):
            replace(net, name, module.zeroed())
    return net


def as_deployed(net):
    """A net in a training form as its export stores it."""
    return fuse(taken_out(net))


def begun(method, folder, steps=100, seed=0, structure=None):
    """A method at the beginning of its last stage, from the net in ``folder``."""
    method.prepare(method.stages()[-1], seed, folder, None, {"structure": structure})
    method.configure_model()
    method.stage.set_total_steps(steps)
    return method


def started(fit, method, dense, **settings):
    """The net of a method right after the factorization of its stage ``retrain``, before any step."""
    seen = []
    fit(method, "retrain", dense, max_steps=1, look=lambda _, module: seen.append(module.net), **settings)
    return seen[0]


def step(method, batch):
    """One training_step outside a trainer."""
    found = {}
    method.log = lambda *_, **__: None
    method.log_dict = lambda terms: found.update(terms)
    loss = method.training_step(batch, 0)
    return loss, {name.removeprefix("train/"): value for name, value in found.items()}
