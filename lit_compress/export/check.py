"""Load an export in another process where this package is not importable, and compare the logits."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lit_compress.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-5

_LOADER = """
import sys
sys.modules["lit_compress"] = None  # an import of it fails from here on
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification
folder, probe, result = sys.argv[1:]
net = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
with torch.inference_mode():
    save_file({"logits": net(**load_file(probe)).logits.clone()}, result)
"""


def check_export(net: PreTrainedModel, folder: Path) -> float:
    """Reload ``folder`` elsewhere and return the largest difference of its logits from those of ``net``.

    The probe is a random batch with padding, at a length of its own.

    Raises:
        UserError: it does not load, or the logits differ by more than ``TOLERANCE`` (relative above 1).
    """
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(1)
    length = min(37, net.config.max_position_embeddings - 4)
    ids = torch.randint(5, net.config.vocab_size, (4, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    probe = {"input_ids": ids, "attention_mask": mask}
    with torch.inference_mode():
        expected = net.eval()(**probe).logits
    with tempfile.TemporaryDirectory() as work:
        save_file(probe, Path(work) / "probe.safetensors")
        environment = os.environ | {
            "HF_MODULES_CACHE": work,
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [sys.executable, "-I", "-c", _LOADER, str(folder), "probe.safetensors", "result.safetensors"],
            cwd=work, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"export: '{folder}' does not load by itself: {done.stderr.strip().splitlines()[-1]}")
        found = load_file(Path(work) / "result.safetensors")["logits"]
    difference = float((found - expected).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise UserError(
            f"export: the reloaded logits differ by {difference:.2e}, more than {TOLERANCE:.0e}; nothing was exported"
        )
    return difference
