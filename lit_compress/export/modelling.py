"""The files of an exported model: an ordinary one of its family, or one with a modelling file of its own.

The modelling file has the source of the layers, and a class that puts them into the model.
``AutoModel...from_pretrained(OUT, trust_remote_code=True)`` runs it; it needs torch and transformers only. The
library's own class would draw the matrices that it does not find at random. So the configuration names an activation
function that does not exist, :data:`REFUSAL`, with which every version of the library ends as the error. The class of
the modelling file puts the real names back, which are under :data:`ACTIVATIONS`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from lit_compress.layers import LAYERS
from lit_compress.models.outline import ordinary_form
from lit_compress.models.own_code import MODULE
from lit_compress.models.storage import ACTIVATIONS, save_net
from lit_compress.models.surgery import describe, replace
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.types import Config, Model

_NAMED = ("feed_forward_proj",)  # T5's, e.g. gated-gelu
REFUSAL = "compressed: load this folder with trust_remote_code=True"

_TEMPLATE = '''"""{base} with compressed Linears, as config.structure lists them. Written by lit_compress."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import {base}


{layers}
LAYERS = {{layer.kind: layer for layer in [{names}]}}


class Compressed{base}({base}):
    """{base} with another layer at the sites of config.structure."""

    def __init__(self, config):
        for name, value in getattr(config, "{activations}", {{}}).items():
            setattr(config, name, value)
        super().__init__(config)
        for name, spec in config.structure.items():
            parent, _, child = name.rpartition(".")
            sizes = {{key: value for key, value in spec.items() if key != "kind"}}
            if spec["kind"] == "attributes":
                for key, value in sizes.items():
                    setattr(self.get_submodule(name), key, value)
            elif hasattr(layer := LAYERS[spec["kind"]], "adopt"):
                layer.adopt(self.get_submodule(name), **sizes)
            else:
                setattr(self.get_submodule(parent), child, layer(**sizes))
        for module in self.modules():
            if hasattr(module, "link"):
                module.link(self)

    def save_pretrained(self, *args, **kwargs):
        """Save the folder so that it loads with this code only, as it was."""
        activations = getattr(self.config, "{activations}", {{}})
        for name, value in activations.items():
            setattr(self.config, name, "{refusal}" if isinstance(value, str) else value)
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            for name, value in activations.items():
                setattr(self.config, name, value)
'''


@torch.no_grad()
def ordinary_net(net: Model) -> Model | None:
    """Return the ordinary model that the fused ``net`` is; None for any other.

    In one no matrix was replaced, or all layers have as many heads and neurons.
    """
    if (ordinary := ordinary_form(net)) is None:
        return None
    hand_over(net, ordinary)
    ordinary.tie_weights()
    for name, buffer in ordinary.named_buffers():  # of fewer kinds of blocks than there were, fewer
        buffer.copy_(net.get_buffer(name))
    return ordinary


def hand_over(module: nn.Module, ordinary: nn.Module) -> None:
    """Give the parameters of an ordinary module the values of those with the same names."""
    own = dict(module.named_parameters())
    for name, _ in list(ordinary.named_parameters()):
        replace(ordinary, name, nn.Parameter(own[name].detach()))


def write_model(net: Model, folder: Path) -> None:
    """Write weights, config and modelling file of the fused ``net``, or of the :func:`ordinary_net` that it equals."""
    write_as(net, ordinary_net(net), folder, save_net)


def write_as(net: Model, ordinary: Model | None, folder: Path, save: Callable[[Model, Path], None]) -> None:
    """Do the work of :func:`write_model`, where the ordinary model is known; ``save`` writes a model's own files."""
    base = type(net).__name__
    if ordinary is not None:
        net.config.architectures = ordinary.config.architectures = [base]
        if net.can_generate():
            ordinary.generation_config = net.generation_config
        save(ordinary, folder)
        return
    net.config.structure = describe(net)
    net.config.architectures = [f"Compressed{base}"]
    net.config.auto_map = {task_type_of_net(net.config).auto_class: f"{MODULE}.Compressed{base}"}
    save(net, folder)
    kinds = {spec["kind"] for spec in net.config.structure.values()} - {"attributes"}
    if net.config.structure:
        _refuse_other_classes(net.config, folder / "config.json")
    (folder / f"{MODULE}.py").write_text(code_of(base, kinds))


def code_of(base: str, kinds: Iterable[str]) -> str:
    """Return the modelling file of a model of class ``base`` of transformers with these layers."""
    wanted = [LAYERS[kind] for kind in sorted(kinds)]  # each comes after those that it extends
    layers = dict.fromkeys(base for layer in wanted for base in reversed(layer.__mro__) if "kind" in vars(base))
    code = "".join(f"{inspect.getsource(layer)}\n\n" for layer in layers)
    names = ", ".join(layer.__name__ for layer in layers)
    return _TEMPLATE.format(base=base, activations=ACTIVATIONS, refusal=REFUSAL, layers=code, names=names)


def _refuse_other_classes(config: Config, path: Path) -> None:
    """Write :data:`REFUSAL` for the activation functions in the file ``path`` of ``config``.

    Their names, and settings that are derived from them (T5 takes three from one), are under :data:`ACTIVATIONS`.
    """
    from transformers.activations import ACT2FN

    stored, own = json.loads(path.read_text()), config.to_dict()
    names = [name for name, value in own.items() if isinstance(value, str) and (value in ACT2FN or name in _NAMED)]
    assert names, f"{type(config).__name__} names no activation function"
    refused = own | dict.fromkeys(names, REFUSAL)
    read = type(config).from_dict(dict(refused)).to_dict()
    stored |= {name: REFUSAL for name in names}
    stored[ACTIVATIONS] = {name: own[name] for name in read if name in own and read[name] != own[name]}
    path.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
