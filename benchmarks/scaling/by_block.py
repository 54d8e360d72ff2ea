"""Peak memory and seconds of ``factorize --by_block`` on random Llamas, which are never whole in memory.

    python -m benchmarks.scaling.by_block [--shapes small 1b] [--examples 8] [--blocks 1]

Writes a Llama of every shape as bfloat16 shards, block by block, then runs ``factorize`` by K-FAC, with one block at a
time in memory, in a process of its own. Of the shape ``7b``, and with ``--blocks`` of any, only the first blocks are
made and run: memory does not depend on their number, and the seconds are multiplied. Writes
benchmarks/scaling/results/by_block/SHAPE.json.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import common

if TYPE_CHECKING:
    from torch import Tensor

SCRIPT = "scaling/by_block"
LENGTH = 128
WORDS = [f"word{i}" for i in range(500)]
BASE = "small"  # what libraries take is measured on this shape


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, of which ``run`` blocks are made."""

    blocks: int
    width: int
    inner: int
    heads: int
    vocabulary: int = 32000
    run: int | None = None

    @property
    def made(self) -> int:
        """Number of blocks that are made and run."""
        return self.run or self.blocks


SHAPES = {
    "small": Shape(4, 256, 688, 4, 1000),
    "1b": Shape(16, 2048, 5632, 32),
    "7b": Shape(32, 4096, 11008, 32, run=2),
}


def block_tensors(shape: Shape, layer: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a block."""
    import torch

    generator = torch.Generator().manual_seed(layer)
    sizes = {f"self_attn.{role}_proj": (shape.width, shape.width) for role in "qkvo"}
    sizes |= {f"mlp.{role}_proj": (shape.inner, shape.width) for role in ("gate", "up")}
    sizes["mlp.down_proj"] = (shape.width, shape.inner)
    for name, size in sizes.items():
        value = torch.randn(*size, generator=generator) * size[1] ** -0.5
        yield f"model.layers.{layer}.{name}.weight", value.bfloat16()
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"model.layers.{layer}.{name}.weight", torch.ones(shape.width, dtype=torch.bfloat16)


def write_model(folder: Path, shape: Shape) -> None:
    """Write a random Llama with a tokenizer of whole words, one block in memory at a time."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    special = ["<unk>", "<pad>", "</s>", "<s>"]
    pieces = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=pieces, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner, pad_token_id=1,
        num_hidden_layers=shape.made, num_attention_heads=shape.heads, bos_token_id=3, eos_token_id=2,
    )  # fmt: skip
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    places, size = dict[str, str](), 0
    for number in range(shape.made + 1):
        name = f"model-{number + 1:05}-of-{shape.made + 1:05}.safetensors"
        if number < shape.made:
            tensors = dict(block_tensors(shape, number))
        else:
            generator = torch.Generator().manual_seed(number)
            tables = ("model.embed_tokens.weight", "lm_head.weight")
            tensors = {t: torch.randn(shape.vocabulary, shape.width, generator=generator) * 0.02 for t in tables}
            tensors["model.norm.weight"] = torch.ones(shape.width)
            tensors = {t: value.bfloat16() for t, value in tensors.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        size += sum(value.numel() * 2 for value in tensors.values())
        del tensors
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_texts(folder: Path, examples: int) -> None:
    """Write so many examples of random words to train on, and two to measure."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", examples), ("validation", 2)):
        rows = [" ".join(rng.choices(WORDS, k=LENGTH - 1)) + " </s>" for _ in range(count)]
        (folder / f"{split}.txt").write_text("\n".join(rows) + "\n")


def measure(options: Any, name: str) -> dict[str, Any]:
    """Return the peak memory and the seconds of one shape."""
    shape, work = SHAPES[name], options.work / name
    if options.blocks:
        shape = replace(shape, run=min(options.blocks, shape.blocks))
    if not options.list:
        write_model(work / "net", shape)
        write_texts(work / "texts", options.examples)
    start = time.monotonic()
    peak = common.command(
        options, "factorize", work / "net", work / "out", "--density", 0.5, "--by_block", "--data.task",
        "plain_text", "--data.path", work / "texts", "--data.max_length", LENGTH, "--dtype", "bfloat16",
    )  # fmt: skip
    if options.list:
        return {}
    seconds = time.monotonic() - start
    report = json.loads((work / "out" / "report.json").read_text())
    found = report["by_block"]
    result = {
        "name": name, "blocks": shape.blocks, "run": shape.made, "width": shape.width, "inner": shape.inner,
        "vocabulary": shape.vocabulary, "examples": options.examples, "length": LENGTH, "threads": options.threads,
        "peak_mib": peak, "memory": found["memory"], "seconds": {"whole": seconds},
        "parameters": report["dense"]["params"]["total"], "dense_bytes": report["dense"]["bytes"],
        "bytes": report["compressed"]["bytes"], "density": report["compressed"]["density"], **common.frame(),
    }  # fmt: skip
    shutil.rmtree(work)
    return result


def main() -> None:
    """Make the results that are missing."""
    made = common.parser(SCRIPT, __doc__, "work", shapes=(*SHAPES,), examples=8)
    made.add_argument("--blocks", type=int, help="make and run only so many blocks of every shape")
    options = made.parse_args()
    for name in options.shapes:
        if common.missing(options, name) and (result := measure(options, name)):
            common.write(options, name, result)


if __name__ == "__main__":
    main()
