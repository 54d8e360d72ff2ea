"""The models of run.py as OpenVINO programs with integers of 8 and 4 bits: perplexity and bytes.

    python -m benchmarks.decoder.integers --backbone DIR --data DIR [--work DIR] [--only dense even-0.8 ...]

Needs ``pip install '.[openvino]'``, and the models that run.py left in ``--work``. Programs are made as by
``export --format openvino --dtype int8`` and ``int4``: 8 bits for weights and activations, whose ranges are those of
the calibration texts, or 4 bits for the matrices of the blocks and 8 for the table. Writes
benchmarks/decoder/results/integers/<model>-<dtype>.json; existing ones are kept.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import common
from benchmarks.decoder import run, texts

SCRIPT = "decoder/integers"
MODELS = ("dense", "even-0.9", "even-0.8", "even-0.6")
DTYPES = ("int8", "int4")


def measure(options: Any, name: str, dtypes: list[Any]) -> None:
    """Write a model as a program, quantize it and store its losses."""
    from lit_compress.export.program import FILES, program_bytes, read_program, write_program
    from lit_compress.export.quantize import quantize, training_feeds
    from lit_compress.models.storage import load_net

    data, measured = run.command_line(options, "svd").build().data, torch.load(options.work / "data" / "measured.pt")
    feeds = training_feeds(data, "integers")
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / FILES["openvino"]
        told = write_program(load_net(options.work / name), data.tokenizer, whole.parent, "openvino")
        for dtype in dtypes:
            small = whole.with_name(f"{dtype}.xml")
            quantize(whole, small, feeds, dtype)
            program = read_program(small, tuple(told["outputs"]))

            def answer(input_ids: torch.Tensor, program: Any = program) -> Any:
                inputs = {"input_ids": input_ids.contiguous(), "attention_mask": torch.ones_like(input_ids)}
                return SimpleNamespace(logits=program(inputs)["logits"])

            made = {
                "name": f"{name}-{dtype}", "of": name, "dtype": dtype, "bytes": program_bytes(small),
                "losses": {key: texts.losses(answer, rows) for key, rows in measured.items()},
                "threads": options.threads,
            }  # fmt: skip
            common.write(options, made["name"], made | common.frame())
            print(made["name"], made["bytes"], flush=True)


def main() -> None:
    """Measure what is missing."""
    parser = common.parser(SCRIPT, __doc__, "backbone", "data", only=MODELS, work=Path("runs/decoder"))
    run.add_sizes(parser)
    options = parser.parse_args()
    options.list = None
    torch.set_num_threads(options.threads)
    run.prepare(options)
    for name in options.only:
        if todo := [dtype for dtype in DTYPES if common.missing(options, f"{name}-{dtype}")]:
            measure(options, name, todo)


if __name__ == "__main__":
    main()
