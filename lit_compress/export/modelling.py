"""The modelling file of an export: the layers' own source under a few lines that put them in place.

``AutoModel...from_pretrained(OUT, trust_remote_code=True)`` runs it; it needs torch and transformers only.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from lit_compress.condense import stock
from lit_compress.kinds import kind_of_net
from lit_compress.layers import LAYERS
from lit_compress.surgery import describe, save_net

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODULE = "modeling_compressed"

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
'''


def write_model(net: PreTrainedModel, folder: Path) -> None:
    """Write weights, config with ``auto_map`` and structure, and the modelling file of the fused ``net``.

    One that is equal to a net the library has is written as that, without such a file.
    """
    base = type(net).__name__
    if (ordinary := stock(net)) is not None:
        net.config.architectures = ordinary.config.architectures = [base]
        save_net(ordinary, folder)
        return
    net.config.structure = describe(net)
    net.config.architectures = [f"Compressed{base}"]
    net.config.auto_map = {kind_of_net(net.config).auto_class: f"{MODULE}.Compressed{base}"}
    save_net(net, folder)
    kinds = {spec["kind"] for spec in net.config.structure.values()} - {"attributes"}
    layers = [LAYERS[kind] for kind in sorted(kinds)]
    source = _TEMPLATE.format(
        base=base,
        layers="".join(f"{inspect.getsource(layer)}\n\n" for layer in layers),
        names=", ".join(layer.__name__ for layer in layers),
    )
    (folder / f"{MODULE}.py").write_text(source)
