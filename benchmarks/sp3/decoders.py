"""SP3 on a Llama: blocks that share a basis, PCA against identity, at one size of the blocks. Perplexity of plain text.

    python -m benchmarks.sp3.decoders --data DIR [--work DIR] [--threads 1]

DIR has tiny_shakespeare/ as parquet files. A small Llama of TinyLlama's shape (grouped queries, gated feed-forward
network) is drawn, trained on the plays, and brought to 0.75 of its blocks by gates of the hidden states, as in the
paper's Table 9; the matrices between the bases count. ``longer`` is the dense model, trained on for as many
steps. Writes benchmarks/sp3/results/decoders/<cell>.json; existing ones are kept. `python -m benchmarks.tables` makes
the table.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.architectures.run import Net, prepare
from lit_compress.layers import SizedLinear, StreamBlock
from lit_compress.models.storage import load_net

NET = Net(
    "llama",
    {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
     "intermediate_size": 704},
    "plain_text", ("tiny_shakespeare/train", "tiny_shakespeare/validation"), ("text",), (1_000_000, 50_000),
)  # fmt: skip
DENSITY, EPOCHS, RATE = 0.75, {"dense": 5, "prune": 4}, {"dense": 1e-3, "prune": 5e-4}
GROUPS = (1, 2, 4, 8)
SP3 = [
    "--model", "SP3", "--model.density", DENSITY, "--model.prune.epochs", EPOCHS["prune"],
    "--model.prune.learning_rate", RATE["prune"], "--model.prune.gates", "[hidden]", "--model.prune.start", 0,
    "--model.prune.target_warmup", 0.5, "--model.distillation.alpha", 0, "--model.distillation.alpha_layers", 0,
    "--model.distillation.alpha_labels", 1,
]  # fmt: skip
LONGER = [  # nothing is factorized at 1: the dense model, trained on
    "--model", "SVD", "--model.density", 1.0, "--model.retrain.epochs", EPOCHS["prune"],
    "--model.retrain.learning_rate", RATE["prune"],
]  # fmt: skip
NEURONS = [*SP3, "--model.prune.group", 8, "--model.prune.gates", "[hidden,neurons]"]
IDENTITY = ["--model.prune.projections", "identity"]
# name -> options; the ones with neurons also leave those out
CELLS: dict[str, list[object]] = {
    **{f"pca-{group}": [*SP3, "--model.prune.group", group] for group in GROUPS},
    **{f"identity-{group}": [*SP3, "--model.prune.group", group, *IDENTITY] for group in (1, 8)},
    "pca-neurons-8": NEURONS, "identity-neurons-8": [*NEURONS, *IDENTITY], "longer": LONGER,
}  # fmt: skip


def between(folder: Path) -> int:
    """Return the weights of the matrices between bases in an exported model."""
    hosts = [m for m in load_net(folder).modules() if isinstance(m, StreamBlock)]
    turns = [getattr(host, name, None) for host in hosts for name in ("middle", "end")]
    return sum(turn.weight.numel() for turn in turns if isinstance(turn, SizedLinear))


def main() -> None:
    """Run what is not there yet."""
    options: Any = common.parser(
        "sp3/decoders", __doc__, "data", "work", "teachers", "precision", only=tuple(CELLS)
    ).parse_args()
    backbone, texts = prepare(options, NET, options.work)
    shared = [
        *common.shared(options, NET.task, texts, backbone=backbone), "--data.batch_size", 16, "--data.max_length", 128,
        "--trainer.accelerator", "cpu",
    ]  # fmt: skip

    def dense() -> Path:
        return common.dense_net(options, NET.family, *shared, epochs=EPOCHS["dense"], rate=RATE["dense"])

    def more(cell: str, run: Path) -> dict[str, Any]:
        return {"cell": cell, "between": between(run / "export")}

    for cell in options.only:
        common.fit(
            options, cell, *CELLS[cell], *shared, "--trainer.gradient_clip_val", 1.0, teacher=dense,
            more=partial(more, cell),
        )  # fmt: skip


if __name__ == "__main__":
    main()
