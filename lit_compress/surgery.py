"""Swap submodules at sites; describe, save and rebuild a structure.

A structure is JSON, {site name: spec}, with the spec of the layer that stands there, e.g.
{"kind": "low_rank", "in_features": 768, "out_features": 768, "rank": 64, "bias": true}. With the configuration
of the net it is enough to build every shape empty, before any checkpoint is read or any strategy wraps the net.
The sizes may be smaller than the configuration's: cut.py, shrink.py. A spec of kind "attributes" sets numbers of the
host module itself, e.g. how many heads an attention has left.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.backbones import empty_net
from lit_compress.errors import UserError
from lit_compress.layers import LAYERS, LowRankLinear, LowRankSparseLinear
from lit_compress.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Structure = dict[str, dict[str, Any]]


def replace(net: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` at ``name`` in ``net``; the host model's code stays untouched."""
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, module)


def set_attributes(module: nn.Module, values: dict[str, int]) -> None:
    """Set numbers of a module of the host model, and remember that they belong to the structure."""
    for name, value in values.items():
        setattr(module, name, value)
    module.changed = getattr(module, "changed", {}) | values  # type: ignore[assignment]


def describe(net: nn.Module) -> Structure:
    """Return the structure of ``net``: every replaced module with its kind and sizes."""
    structure = {}
    for name, module in net.named_modules():
        if isinstance(module, tuple(LAYERS.values())):
            structure[name] = module.spec()  # type: ignore[operator]
        elif hasattr(module, "changed"):
            structure[name] = {"kind": "attributes", **module.changed}
    return structure


Factors = Callable[[str, Tensor, int], tuple[Tensor, Tensor]]


def factorize(
    net: PreTrainedModel,
    ranks: dict[str, int],
    factors: Factors | None,
    layer: type[LowRankLinear | LowRankSparseLinear] = LowRankLinear,
) -> PreTrainedModel:
    """Replace the Linears named in ``ranks`` by ``layer``.

    Args:
        net: changed in place.
        ranks: site name -> rank.
        factors: (name, weight [out, in], rank) -> left [out, rank], right [rank, in]; None leaves the values
            to a checkpoint.
        layer: what takes the place.
    """
    for name, rank in track(ranks.items(), "factorize", len(ranks)):
        linear = net.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is {type(linear).__name__}"
        if factors is None:
            left, right = torch.zeros(linear.out_features, rank), torch.zeros(rank, linear.in_features)
        else:
            left, right = factors(name, linear.weight.detach(), rank)
        replace(net, name, layer.from_factors(linear, left, right))
    return net


def rebuild(net: PreTrainedModel, structure: Structure) -> PreTrainedModel:
    """Give ``net`` the shapes of ``structure``; the values of replaced modules are not initialised."""
    for name, spec in structure.items():
        parent, _, child = name.rpartition(".")
        module = getattr(net.get_submodule(parent), child, None)
        sizes = {key: value for key, value in spec.items() if key != "kind"}
        if spec["kind"] == "attributes":
            set_attributes(module, sizes)
        elif hasattr(layer := LAYERS[spec["kind"]], "adopt"):
            layer.adopt(module, **sizes)
        else:
            replace(net, name, layer(**sizes))
    return net


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``folder``; rename it into place when all is written.

    An interrupted write leaves what stood at ``folder`` before as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
            folder.rename(old)
            temporary.rename(folder)
            shutil.rmtree(old)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def tied(net: nn.Module) -> dict[str, str]:
    """Return {name: first name of the same tensor}, e.g. of an output layer that is the embedding."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(value), name) for name, value in net.state_dict(keep_vars=True).items()}
    return {name: other for name, other in names.items() if name != other}


def _load_tensors(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load ``tensors`` into ``net``; those of tied names may be missing, and part from the first if they are not."""
    aliases = tied(net)
    for name in aliases.keys() & tensors.keys():
        replace(net, name, nn.Parameter(torch.empty_like(tensors[name])))  # type: ignore[arg-type]
    whole = {name: tensors[first] for name, first in tied(net).items()}
    net.load_state_dict({**tensors, **whole})


def save_net(net: PreTrainedModel, folder: Path) -> None:
    """Write config.json, model.safetensors and structure.json into the existing ``folder``.

    A net with an empty structure is an ordinary Hugging Face folder. Of tied tensors the first is written, as the
    library does; a net that generates brings its ``generation_config.json``.
    """
    from safetensors.torch import save_file

    if not any(name.endswith(type(net).__name__) for name in net.config.architectures or ()):
        net.config.architectures = [type(net).__name__]  # says which head it has
    net.config.save_pretrained(folder)
    if net.can_generate():
        net.generation_config.save_pretrained(folder)
    aliases = tied(net)
    tensors = {k: value.detach().contiguous().cpu() for k, value in net.state_dict().items() if k not in aliases}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "structure.json").write_text(json.dumps(describe(net), indent=2) + "\n")


def load_net(folder: Path) -> PreTrainedModel:
    """Rebuild the net that :func:`save_net` wrote.

    Raises:
        UserError: the folder is incomplete or broken.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(folder)
        structure = json.loads((folder / "structure.json").read_text())
        net = rebuild(empty_net(config), structure)
        if net.can_generate():
            net.generation_config = GenerationConfig.from_pretrained(folder)
        _load_tensors(net, load_file(folder / "model.safetensors"))
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:160]
        raise UserError(f"cannot load a net from '{folder}': {reason or type(error).__name__}") from error
    return net.eval()
