"""Models on disk: saving and loading a folder with its structure, and files that stages write next to a model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from lit_compress.models.backbones import empty_net
from lit_compress.models.checks import check_finite
from lit_compress.models.files import WHOLE, load_tensors, net_shapes, stored_dtype, write_shard
from lit_compress.models.own_code import check_code, forget_code, is_exported, read_config
from lit_compress.models.surgery import check_structure, describe, empty_parameters, rebuild, replace
from lit_compress.utils.devices import move
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of
from lit_compress.utils.manifest import check_manifest
from lit_compress.utils.types import Config, Model

ACTIVATIONS = "activations"  # in the configuration of an export: the functions whose names only its own code knows


def tied(net: nn.Module) -> dict[str, str]:
    """Return {name: first name of the same tensor}, e.g. of an output layer that is the embedding."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(value), name) for name, value in net.state_dict(keep_vars=True).items()}
    return {name: other for name, other in names.items() if name != other}


def _load_tensors(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a model of empty parameters values of its names and shapes; tied names may be missing, or untie it."""
    for name in tied(net).keys() & tensors.keys():
        replace(net, name, nn.Parameter(torch.empty_like(tensors[name])))
    aliases, own = tied(net), net.state_dict()
    copies = {name: value.to(own[name].dtype, copy=True) if name in own else value for name, value in tensors.items()}
    copies |= {name: copies[first] for name, first in aliases.items() if first in copies}
    net.load_state_dict(copies, assign=True)
    for name, first in aliases.items():
        replace(net, name, net.get_parameter(first))


def save_net(net: Model, folder: Path) -> None:
    """Write config.json, model.safetensors and structure.json into the existing ``folder``.

    With an empty structure this is an ordinary Hugging Face folder. Of tied tensors only the first is written.
    """
    save_form(net, folder)
    aliases = tied(net)
    write_shard({k: value for k, value in net.state_dict().items() if k not in aliases}, folder / WHOLE)


def save_form(net: Model, folder: Path) -> None:
    """Write the files of :func:`save_net` without values."""
    if not any(name.endswith(type(net).__name__) for name in net.config.architectures or ()):
        net.config.architectures = [type(net).__name__]  # names the task head
    net.config.save_pretrained(folder)
    forget_code(folder)
    if net.can_generate():
        net.generation_config.save_pretrained(folder)
    (folder / "structure.json").write_text(json.dumps(describe(net), indent=2) + "\n")


def load_net(folder: Path, as_stored: bool = False) -> Model:
    """Load a model that :func:`save_net` wrote, in float32; ``as_stored``: in the dtype of the file.

    Raises:
        UserError: the folder differs from its manifest, is incomplete or broken; a tensor is missing, unexpected, of
            another shape or not finite.
    """
    from transformers import GenerationConfig

    check_manifest(f"'{folder}'", folder)
    try:
        structure = json_of(folder / "structure.json")
        with empty_parameters():
            net = empty_net(config_of(folder))
            net.tie_weights()  # which the initialization does
            check_structure(structure, net, net_shapes(folder))
            rebuild(net, structure)
        if net.can_generate():
            net.generation_config = GenerationConfig.from_pretrained(folder)
        _load_tensors(net, load_tensors(folder))
        check_finite(f"'{folder}'", net)
        if as_stored:
            move(net, getattr(torch, stored_dtype(folder)))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"cannot load a model from '{folder}': {reason or type(error).__name__}") from error
    return net.eval()


def config_of(folder: Path) -> Config:
    """Return the configuration of a model that was saved or exported, with the classes of the dense model.

    Raises:
        UserError: it has code of its own.
    """
    check_code(f"'{folder}'", folder)
    config = read_config(f"'{folder}'", folder)
    names = config.__dict__.pop(ACTIVATIONS, None)
    if is_exported(folder):  # its class puts layers of its own into the model
        for name, value in (names or {}).items():
            if hasattr(config, name) and name[:1] != "_" and not isinstance(value, dict | list):
                setattr(config, name, value)
    return config
