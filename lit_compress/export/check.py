"""The check of an export: another process, which cannot import this package, loads it and answers as the model did."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_compress.export.program import TOLERANCE
from lit_compress.models.accounting import random_inputs
from lit_compress.models.own_code import references
from lit_compress.models.padding import usable_positions
from lit_compress.models.sites import Model
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.errors import UserError

RELOADED = 1e-5  # largest difference of logits in the other process, relative above 1
ELEMENTS = 1 << 24  # most logits of a batch; a vocabulary of 262,144 leaves 16 tokens of each of four texts

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


def check_export(net: Model, folder: Path, before: Model | None = None) -> float:
    """Load ``folder`` in another process and return the largest difference of its logits from the logits of ``net``.

    All get a random batch with padding. The code in the folder runs, which is the package's.
    ``net`` was loaded from ``folder`` here. The logits of ``before``, the model before the export, must be the same,
    relative above 1 within ``TOLERANCE``; None if choices change them.

    Raises:
        UserError: the folder does not load, names code that is not in it, or has other logits.
    """
    from safetensors.torch import load_file, save_file

    named = list(references(folder))
    if elsewhere := next((ref for ref in named if "--" in ref or "/" in ref), None):
        raise UserError(f"export: '{folder}' names code that is not in it: '{elsewhere}'; nothing was exported")
    kind = task_type_of_net(net.config)
    length = min(37, usable_positions(net.config) or 37)
    if kind.over_vocabulary:
        length = max(1, min(length, ELEMENTS // (4 * net.config.vocab_size)))
    probe = random_inputs(net, 4, length, seed=1, padded=True)

    def results(output: Any) -> Tensor:
        """Return the results at tokens as one tensor [n, b, ...]; a single one is not copied."""
        values = [output[name] for name in kind.results]
        return kind.at_tokens(torch.stack(values) if values[1:] else values[0][None], probe)

    allowed = {"": (net, RELOADED), " from the model's before export": (before, TOLERANCE["hf"])}
    with torch.inference_mode():
        expected = {than: results(one.eval()(**probe)) for than, (one, _) in allowed.items() if one is not None}
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
        loaded = results(load_file(Path(work) / "result.safetensors"))
    differences = {than: float((loaded - logits).abs().max()) for than, logits in expected.items()}
    for than, difference in differences.items():
        if not difference <= (most := allowed[than][1]) * max(1.0, float(expected[than].abs().max())):
            raise UserError(
                f"export: the reloaded logits differ by {difference:.2e}{than}, more than {most:.0e}; nothing was "
                "exported"
            )
    return differences[""]
