"""Parameters, density, FLOPs, latency and memory, found in the same way for the models of all methods."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_compress.models.sites import Model, Site, base_prefix, embedding_params, find_sites, module_at
from lit_compress.models.surgery import as_linears, with_random_values, without_values
from lit_compress.utils.timing import in_turns, pinned

Graph = Literal["none", "parameters", "sites"]
_DENSE = dict[tuple[type[Any], str], dict[Site, nn.Linear]]()  # by class and configuration, of the last four


@dataclass(frozen=True)
class Params:
    """Numbers of stored parameters; ``sites`` are weights of sites and of residual paths, without biases."""

    sites: int
    non_embedding: int
    total: int


def weights(module: nn.Module) -> list[Tensor]:
    """Return the weights of a site that count: its parameters without the bias. An index is a buffer, not a weight."""
    return [p for name, p in module.named_parameters(recurse=False) if name != "bias"]


def counted_weights(net: Model) -> list[Tensor]:
    """Return the stored weights of the sites, and those that layers have added (``counted_weights()``), each once."""
    counted = [w for site in find_sites(net) for w in weights(net.get_submodule(site.name))]
    counted += [w for module in net.modules() for w in getattr(module, "counted_weights", tuple)()]
    return list({id(w): w for w in counted}.values())


def dense_site_params(net: Model) -> int:
    """Return the number of weights that the sites of ``net`` had before compression: sum of in x out."""
    return sum(layer.weight.numel() for layer in set(dense_layers(net).values()))


def dense_layers(net: Model) -> dict[str, nn.Linear]:
    """Return {site: the Linear before compression}, without values."""
    return {site.name: layer for site, layer in dense_sites(net).items()}


def dense_sites(net: Model, dense: Model | None = None) -> dict[Site, nn.Linear]:
    """Return the sites that ``net`` had before compression, and their Linears; models of the same sizes share them.

    ``dense`` is the model before compression, without values, which nobody changes; None: it is built.
    """
    kind: Any = type(net)
    config = json.loads(net.config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "architectures", "structure"):  # say where a model is, not what
        config.pop(name, None)
    if (key := (kind, json.dumps(config))) not in _DENSE:
        dense = dense or without_values(lambda: as_linears(kind(kind.config_class.from_dict(config))))
        while len(_DENSE) >= 4:
            del _DENSE[next(iter(_DENSE))]
        _DENSE[key] = {site: module_at(dense, site.name, nn.Linear) for site in find_sites(dense)}
    return _DENSE[key]


def count_params(net: Model) -> Params:
    """Count stored parameters; a shared one counts once, a stored zero counts like any other value."""
    total = sum(p.numel() for p in net.parameters())
    sites = sum(p.numel() for p in counted_weights(net))
    return Params(sites, total - sum(p.numel() for p in embedding_params(net)), total)


def density(net: Model) -> float:
    """Return remaining / original parameters of the sites; zeros do not count as remaining."""
    return sum(int(torch.count_nonzero(p)) for p in counted_weights(net)) / dense_site_params(net)


def stored_density(net: Model) -> float:
    """Return stored / original parameters of the sites; stored zeros count."""
    return count_params(net).sites / dense_site_params(net)


def flops(net: Model, length: int, batch: int = 1) -> int:
    """Return the floating-point operations of one forward (2 per multiply-add) on ``batch`` x ``length`` tokens.

    An encoder-decoder that generates text gets ``length`` tokens to read and a quarter as many to write, all at once.
    If the code of a model without values looks at values, a copy with values takes its place.
    """
    if net.device.type == "meta":
        by_shape = shape_flops(net, length, batch)
        return flops(with_random_values(net), length, batch) if by_shape is None else by_shape
    own = {name: value.detach() for name, value in net.named_parameters()}  # the counter would hook gradients
    return _counted_flops(net, random_inputs(net, batch, length), own)


def shape_flops(net: Model, length: int, batch: int = 1) -> int | None:
    """Return :func:`flops` of a model without values; None if its code looks at values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = random_inputs(net, batch, length)
    del inputs["attention_mask"]  # whether it masks anything would be asked
    with FakeTensorMode():  # said to be on the CPU, as layers ask more of a device than ``meta`` can say
        own, inputs = (
            {name: torch.empty(value.shape, dtype=value.dtype) for name, value in tensors}
            for tensors in ([*net.named_parameters(), *net.named_buffers()], inputs.items())
        )
        try:
            return _counted_flops(net, inputs, own)
        except (RuntimeError, NotImplementedError):
            return None


def _counted_flops(net: Model, inputs: dict[str, Tensor], tensors: dict[str, Tensor]) -> int:
    """Return the FLOPs of a forward with some other ``tensors`` in the places of parameters and buffers."""
    from torch.utils.flop_counter import FlopCounterMode

    was, attention = net.training, net.config._attn_implementation
    net.eval()
    net.set_attn_implementation("eager")  # the counter counts every matmul, but not every fused kernel
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            torch.func.functional_call(net, tensors, (), inputs)
    finally:
        net.set_attn_implementation(attention)
        net.train(was)
    return int(counter.get_total_flops())


def random_inputs(net: Model, batch: int, length: int, seed: int = 0, padded: bool = False) -> dict[str, Tensor]:
    """Return the inputs of ``net`` for texts [batch, length] of random tokens.

    ``padded``: the second half of the second text is padding, as a tokenizer would pad.
    """
    generator, config = torch.Generator().manual_seed(seed), net.config
    first = min(5, config.vocab_size - 1)  # behind special tokens, if there are others
    ids = torch.randint(first, config.vocab_size, (batch, length), generator=generator).to(net.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        ids[:, -1] = config.eos_token_id  # BART classifies from the state at this token, one in every text
        if net.can_generate():
            inputs["decoder_input_ids"] = ids[:, : max(1, length // 4)]
    if padded and batch > 1:
        end = length // 2
        inputs["attention_mask"][1, end:] = 0
        if (pads := getattr(config, "pad_token_id", None)) is not None and pads >= 0:
            ids[1, end:] = pads
        if config.is_encoder_decoder:
            ids[1, end - 1] = config.eos_token_id
    return inputs


def forward_times(
    nets: Sequence[Model], length: int, batch: int = 1, threads: int = 1, repeats: int = 30
) -> list[list[float]]:
    """Return the milliseconds of ``repeats`` forwards of each model on random tokens; the models take turns."""
    forwards = [partial(net, **random_inputs(net, batch, length)) for net in nets]
    with pinned(threads):
        return in_turns(forwards, repeats, device=nets[0].device.type)


def measure(net: Model, length: int) -> dict[str, Any]:
    """Return density, parameters and FLOPs of ``net`` as the report stores them; without values, of its shapes."""
    of_shapes = net.device.type == "meta"
    left, forward = (stored_density, shape_flops) if of_shapes else (density, flops)
    return {"density": left(net), "params": asdict(count_params(net)), "flops": forward(net, length)}


class _Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, without those that are ``known``."""

    def __init__(self, known: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages = weakref.WeakKeyDictionary({value.untyped_storage(): 0 for value in known.values()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and (storage := value.untyped_storage()) not in self._storages:
                self._storages[storage] = size = storage.nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, size)
        return output

    def _free(self, size: int) -> None:
        self.now -= size


def forward_bytes(net: Model, texts: int, length: int, graph: Graph, half: bool = False) -> int | None:
    """Return the most bytes that a forward takes besides the parameters, without the output layer over a vocabulary.

    Args:
        net: in any form, with values or without.
        texts, length: of the batch, in tokens. An encoder-decoder writes a quarter as many.
        graph: ``parameters``: it is a forward of training, with dropout, that keeps activations for all gradients;
            ``sites``: it keeps activations for gradients by the sites' outputs; ``none``: it keeps nothing.
        half: under autocast to 16 bits.

    Returns None if the model's code looks at values.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    prefix, was = base_prefix(net), net.training
    ids = random_inputs(net, 1, length)
    del ids["attention_mask"]  # whether it masks anything would be asked
    net.train(graph == "parameters")
    sites = [net.get_submodule(site.name) for site in find_sites(net)] if graph == "sites" else []
    hooks = [site.register_forward_hook(lambda _, args, output: output.requires_grad_()) for site in sites]
    try:
        with FakeTensorMode():
            own = {
                name.removeprefix(prefix): torch.empty(
                    value.shape, dtype=value.dtype, requires_grad=graph == "parameters" and value.requires_grad
                )
                for name, value in [*net.named_parameters(), *net.named_buffers()] if name.startswith(prefix)
            }  # fmt: skip
            inputs = {name: torch.empty(texts, value.shape[1], dtype=value.dtype) for name, value in ids.items()}
            cast = torch.autocast("cpu", torch.bfloat16, enabled=half)
            with _Live(own) as live, torch.set_grad_enabled(graph != "none"), cast:
                output = torch.func.functional_call(net.base_model, own, (), inputs | {"use_cache": False})
                logits = output.get("logits") if net.can_generate() else None
                return live.peak - (0 if logits is None else logits.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    finally:
        net.train(was)
        for hook in hooks:
            hook.remove()
