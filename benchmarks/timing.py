"""What the scripts share that measure time and memory: random models and batches, ratios, processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import frame, module, write
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import save_net
from lit_compress.utils.devices import current_device, synchronize
from lit_compress.utils.memory import peak_mib

MINILM, BERT_BASE = "minilm-l6-h384", "bert-base"
SHAPES: dict[str, dict[str, int]] = {
    BERT_BASE: {},
    MINILM: {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
BATCH, LENGTH = 32, 128
# glibc keeps freed tensors below 32 MiB in a heap that fragments; mapped one by one, the resident size is what is alive
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
PRECISIONS = ("32", "bf16")
# kinds of operations that PyTorch's profiler counts, without its prefix
KINDS = {
    "products": ("mm", "addmm", "bmm"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"),
    "norms": ("native_layer_norm", "layer_norm", "rms_norm", "pow", "mean", "sum", "rsqrt", "mul", "div_"),
    "sums and copies": ("add", "add_", "fill_", "copy_", "cat", "zero_"),
}
DEVICES = tuple(dict.fromkeys([current_device().type, "cpu", "cuda"]))


class At:
    """Stands for a trainer at a step."""

    def __init__(self, step: int) -> None:
        self.global_step = step


def random_bert(shape: str = BERT_BASE, **settings: Any) -> Any:
    """Return a BERT with random weights; ``settings`` come last."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **SHAPES[shape] | settings)
    return AutoModelForSequenceClassification.from_config(config)


def make_folder(shape: str, folder: Path, **settings: Any) -> None:
    """Write a random model with a random row importance, as a pruning stage would leave it."""
    from safetensors.torch import save_file

    net = random_bert(shape, **settings)
    rows: dict[str, torch.Tensor] = {}
    for site in find_sites(net):
        weight = net.get_submodule(site.name).weight
        rows[f"{site.name}/scores"] = torch.rand(len(weight), dtype=torch.float64)
    save_file(rows, folder / "importance.safetensors")
    save_net(net, folder)


def random_batch(net: Any, device: str, batch: int = BATCH, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens, with labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, net.config.vocab_size, (batch, length), generator=generator).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}


def wait(device: str) -> None:
    """Wait until the device has done what it was given."""
    synchronize(torch.device(device))


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """Return the median over rounds of above / below of the same round, and the range."""
    found = sorted(a / b for a, b in zip(above, below, strict=True))
    return {"median": median(found), "min": found[0], "max": found[-1]}


def shares(forward: Any, passes: int) -> dict[str, dict[str, float]]:
    """Return per kind of operation the milliseconds of a forward and how many operations there are.

    Of the same operation on the same shapes the shortest time counts for all: other processes only make times longer.
    """
    from torch.profiler import ProfilerActivity, profile

    forward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        for _ in range(passes):
            forward()
    of = {f"aten::{name}": kind for kind, names in KINDS.items() for name in names}
    times: dict[tuple[str, str], list[float]] = {}
    for event in profiled.events():
        times.setdefault((event.name, str(event.input_shapes)), []).append(event.self_cpu_time_total / 1000)
    found = {kind: {"milliseconds": 0.0, "operations": 0.0} for kind in [*KINDS, "others"]}
    for (name, _), record in times.items():
        kind = found[of.get(name, "others")]
        kind["milliseconds"] += min(record) * len(record) / passes
        kind["operations"] += len(record) / passes
    return found


def again(script: str, *words: object, **environment: str) -> str:
    """Run a script once more, in a process of its own, and return what it prints."""
    line = [sys.executable, "-m", module(script), *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=True, env=os.environ | environment).stdout


def print_peak(step: Callable[[], Any], device: str) -> None:
    """Do a step twice and print the peak MiB, on an accelerator its allocator's; the empty process is not counted."""
    step()
    step()
    print(torch.accelerator.max_memory_allocated() / 2**20 if device != "cpu" else peak_mib())


def store(options: Any, name: str, value: dict[str, Any], ending: str = "", **about: Any) -> None:
    """Write what was measured with where it was; ``ending`` belongs to the file's name only."""
    write(options, name + ending, {"name": name, **value, **about, **frame()})
    shown = {key: value[key] for key in ("ratio", "state", "share of ideal") if key in value} or value
    print(name + ending, shown, flush=True)
