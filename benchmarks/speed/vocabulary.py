"""Peak memory of whole commands on a decoder with a vocabulary of 49,152, or 262,144, and texts of 512 tokens.

    python -m benchmarks.speed.vocabulary --data DIR [--backbone DIR] [--only factorize validate ...] [--shapes ...]

`smollm2` is SmolLM2-135M, which `python -m benchmarks.speed.smollm2` gets. `gemma` is a random Gemma 3 of two blocks
with Gemma's vocabulary and SmolLM2's tokenizer. DIR has wikitext2/ as parquet files: its validation split trains, its
test split is the dev set. Options are the defaults, and the 8 texts in a batch of the recipes for WikiText-2. Memory
depends on neither the number of calibration examples nor that of dev rows, if these fill a batch, so there are few.
`fit` makes two steps, that of SmolLM2 with `--model.recompute true`. `onnx` is `export --format onnx` of an export of
SVD. Reports time forwards in 5 rounds in place of 30, as no time is read here. The goal is what the commands
load, the optimizer's moments, and 2.5 GB. Writes benchmarks/speed/results/vocabulary/<shape>-<part>.json.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common, timing
from benchmarks.speed.smollm2 import folder

SCRIPT = "speed/vocabulary"
GEMMA = {"vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}  # fmt: skip
PARTS = ("factorize", "validate", "fit", "by_block", "onnx")
SHAPES = ("smollm2", "gemma")
DENSITY, BATCH, STEPS, EXAMPLES, ROOM = 0.5, 8, 2, 2, 2.5e9
ROUNDS = 5  # the fewest that are timed
START = ("-c", "import functools, runpy; from lit_compress.models import accounting as a; "
         f"a.in_turns = functools.partial(a.in_turns, seconds=0, least={ROUNDS}); "
         "runpy.run_module('lit_compress', run_name='__main__')")  # fmt: skip
ROWS = {"smollm2": 24, "gemma": 4}  # a whole batch of evaluation at least


def random_gemma(tokenizer: Path, to: Path) -> Path:
    """Write a random Gemma 3 with the tokenizer of the folder ``tokenizer`` to ``to``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **GEMMA)).save_pretrained(to)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(to)
    return to


def measure(options: Any, part: str, net: Path, rows: int, data: Path, work: Path) -> dict[str, Any]:
    """Return the peak of a command, and the bytes that it is to have at most."""
    own = ["--data.task", "wikitext2", "--data.path", data, "--data.validation_examples", rows]
    few = ["--model.retrain.calibration_examples", EXAMPLES, "--model.density", DENSITY]
    out, dense = work / part, sum(path.stat().st_size for path in net.glob("*.safetensors"))
    if part == "validate":
        peak = common.command(options, "validate", net, *own)
        return {"peak": peak * 2**20, "loaded": dense, "moments": 0}
    if part in ("factorize", "by_block"):
        blocks = ["--by_block", "float32"] if part == "by_block" else []
        peak = common.command(options, "factorize", net, out, *own, *few, *blocks, start=START)
    elif part == "onnx":
        common.command(options, "factorize", net, work / "small", *own, "--weighting", "none", "--model.density",
                       DENSITY, start=START)  # fmt: skip
        peak = common.command(options, "export", work / "small", out, "--format", "onnx", "--data.path", data)
    else:
        again = ["--model.recompute", "true"] if net == options.backbone else []
        peak = common.command(
            options, "fit", "--model", "SVD", "--model.density", DENSITY, "--model.teacher", net,
            "--model.backbone", net, *own, "--data.batch_size", BATCH,
            "--data.train_examples", STEPS * BATCH, "--model.retrain.epochs", 1, *again,
            "--run_dir", out, "--trainer.enable_progress_bar", "false", start=START,
        )  # fmt: skip
    if part in ("by_block", "onnx"):
        return {"peak": peak * 2**20, "loaded": dense, "moments": 0}
    report = json.loads((out / "report.json").read_text())
    dense, small = (4 * report[which]["params"]["total"] for which in ("dense", "compressed"))
    return {"peak": peak * 2**20, "loaded": dense + small, "moments": 2 * small if part == "fit" else 0}


def main() -> None:
    """Measure what was asked for and is not there yet."""
    parser = common.parser(SCRIPT, __doc__, "data", backbone=folder(), only=PARTS, shapes=SHAPES)
    options = parser.parse_args()
    options.list = None
    with tempfile.TemporaryDirectory() as work:
        data = Path(work) / "data"
        data.mkdir()
        for split, source in (("train", "validation"), ("validation", "test")):
            shutil.copyfile(options.data / "wikitext2" / f"{source}.parquet", data / f"{split}.parquet")
        for shape in options.shapes:
            net = options.backbone if shape == "smollm2" else random_gemma(options.backbone, Path(work) / shape)
            for part in options.only:
                if not common.missing(options, f"{shape}-{part}"):
                    continue
                found = measure(options, part, net, ROWS[shape], data, Path(work) / shape)
                found["goal"] = found["loaded"] + found["moments"] + ROOM
                setting = {"threads": options.threads, "length": 512, "batch": BATCH, "rows": ROWS[shape]}
                setting |= {"rounds": ROUNDS} if part != "validate" else {}
                timing.store(options, f"{shape}-{part}", found, setting=setting)


if __name__ == "__main__":
    main()
