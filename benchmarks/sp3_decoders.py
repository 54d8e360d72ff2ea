"""SP3 on a Llama: blocks that share a basis, PCA against identity, at one size of the blocks. Perplexity of plain text.

    python benchmarks/sp3_decoders.py --data DIR [--work DIR] [--threads 1]

DIR has tiny_shakespeare/ as parquet files. A small Llama of TinyLlama's shape (grouped queries, gated feed-forward
network) is drawn, trained on the plays, and brought to 0.75 of its blocks by gates of the hidden states, as in the
paper's Table 9; the matrices between the bases count. ``longer`` is the dense net, trained on for as many
steps. Writes benchmarks/results/sp3_decoders/<cell>.json; existing ones are kept. `python benchmarks/tables.py` makes
the table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from architectures import prepare
from common import RESULTS, command, dense_net, report_of, write

from lit_compress.layers import SizedLinear, StreamBlock
from lit_compress.surgery import load_net

NET = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 704,
}  # fmt: skip
FILES, LETTERS = ("tiny_shakespeare/train", "tiny_shakespeare/validation"), (1_000_000, 50_000)
DENSITY, EPOCHS, RATE = 0.75, {"dense": 5, "prune": 4}, {"dense": 1e-3, "prune": 5e-4}
GROUPS = (1, 2, 4, 8)
SP3 = [
    "--model", "SP3", "--model.density", DENSITY, "--model.prune.epochs", EPOCHS["prune"],
    "--model.prune.learning_rate", RATE["prune"], "--model.prune.gates", "[hidden]", "--model.prune.start", 0,
    "--model.prune.target_warmup", 0.5, "--model.distillation.alpha", 0, "--model.distillation.alpha_layers", 0,
    "--model.distillation.alpha_labels", 1,
]  # fmt: skip
LONGER = [  # nothing is factorized at 1: the dense net, trained on
    "--model", "SVD", "--model.density", 1.0, "--model.retrain.epochs", EPOCHS["prune"],
    "--model.retrain.learning_rate", RATE["prune"],
]  # fmt: skip
NEURONS = [*SP3, "--model.prune.group", 8, "--model.prune.gates", "[hidden,ffn]"]
IDENTITY = ["--model.prune.projections", "identity"]
# name -> options; the ones with neurons also leave those out
CELLS: dict[str, list[object]] = {
    **{f"pca-{group}": [*SP3, "--model.prune.group", group] for group in GROUPS},
    **{f"identity-{group}": [*SP3, "--model.prune.group", group, *IDENTITY] for group in (1, 8)},
    "pca-neurons-8": NEURONS, "identity-neurons-8": [*NEURONS, *IDENTITY], "longer": LONGER,
}  # fmt: skip


def between(folder: Path) -> int:
    """Return the weights of the matrices between bases in an exported net."""
    hosts = [m for m in load_net(folder).modules() if isinstance(m, StreamBlock)]
    turns = [getattr(host, name, None) for host in hosts for name in ("middle", "end")]
    return sum(turn.weight.numel() for turn in turns if isinstance(turn, SizedLinear))


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="folder of the data sets")
    parser.add_argument("--work", default=Path("runs/sp3_decoders"), type=Path, help="folder for backbone and runs")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="bf16-mixed")
    options = parser.parse_args()
    backbone, texts = prepare("llama", NET, FILES, ("text",), LETTERS, options.data, options.work)
    shared = [
        "--model.backbone", backbone, "--data.task", "plain_text", "--data.path", texts, "--data.batch_size", 16,
        "--data.max_length", 128, "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false",
        "--trainer.precision", options.precision,
    ]  # fmt: skip
    dense = dense_net(
        options.work / "dense", *shared, epochs=EPOCHS["dense"], rate=RATE["dense"], threads=options.threads
    )
    for cell in options.cells:
        if (RESULTS / "sp3_decoders" / f"{cell}.json").is_file():
            continue
        run = options.work / cell
        command(
            "fit", *CELLS[cell], *shared, "--model.teacher", dense,
            "--trainer.gradient_clip_val", 1.0, "--run_dir", run, "--ckpt_path", "last", threads=options.threads,
        )  # fmt: skip
        result = {"cell": cell, "between": between(run / "export"), **report_of(run)}
        write("sp3_decoders", cell, result)


if __name__ == "__main__":
    main()
