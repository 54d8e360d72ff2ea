"""The check of an export: load it in another process that cannot import this package, and compare logits."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.models.accounting import padded_inputs
from lit_compress.models.own_code import references
from lit_compress.models.padding import usable_positions
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.tasks import TaskType

TOLERANCE = 1e-5
ELEMENTS = 1 << 24  # most logits of a batch; a vocabulary of 262,144 leaves 16 tokens of each text

_LOADER = """
import sys
sys.modules["lit_compress"] = None  # an import of it fails from here on
import torch, transformers
from safetensors.torch import load_file, save_file
folder, trust, probe, result, auto_class, *names = sys.argv[1:]
auto_class = getattr(transformers, auto_class)
net = auto_class.from_pretrained(folder, trust_remote_code=trust == "True", dtype=torch.float32).eval()
with torch.inference_mode():
    output = net(**load_file(probe))
    save_file({name: output[name].clone() for name in names}, result)
"""


def check_export(net: PreTrainedModel, folder: Path) -> float:
    """Load ``folder`` in another process and return the largest difference of its logits from the logits of ``net``.

    Both get a random batch with padding. The code in the folder runs, which is the package's, or was trusted before.

    Raises:
        UserError: the folder does not load, or the logits differ by more than ``TOLERANCE`` (relative above 1); or it
            names code that is not in it.
    """
    from safetensors.torch import load_file, save_file

    named = list(references(folder))
    if elsewhere := next((ref for ref in named if "--" in ref or "/" in ref), None):
        raise UserError(f"export: '{folder}' names code that is not in it: '{elsewhere}'; nothing was exported")
    kind = task_type_of_net(net.config)
    length = min(37, usable_positions(net.config) or 37)
    if kind.over_vocabulary:
        length = max(1, min(length, ELEMENTS // (4 * net.config.vocab_size)))
    probe = padded_inputs(net, 4, length, seed=1)
    with torch.inference_mode():
        expected = kind.at_tokens(_results(net.eval()(**probe), kind), probe)
    with tempfile.TemporaryDirectory() as work:
        save_file({name: value.contiguous() for name, value in probe.items()}, Path(work) / "probe.safetensors")
        environment = os.environ | {"HF_MODULES_CACHE": work, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "-I", "-c", _LOADER, str(folder.resolve()), str(bool(named)), "probe.safetensors",
             "result.safetensors", kind.auto_class, *kind.results],
            cwd=work, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"export: '{folder}' does not load by itself: {done.stderr.strip().splitlines()[-1]}")
        loaded = kind.at_tokens(_results(load_file(Path(work) / "result.safetensors"), kind), probe)
    difference = float((loaded - expected).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise UserError(
            f"export: the reloaded logits differ by {difference:.2e}, more than {TOLERANCE:.0e}; nothing was exported"
        )
    return difference


def _results(output: Any, kind: TaskType) -> Tensor:
    """Return the results of ``kind`` in ``output``, by name, as one tensor [n, b, ...]; a single one is not copied."""
    values = [output[name] for name in kind.results]
    return torch.stack(values) if values[1:] else values[0][None]
