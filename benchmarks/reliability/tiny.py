"""A tiny model, a few sentences, and a run of seconds of every method over them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

WORDS = "a film of great bad warm dull charm wit the plot is so not very fine poor story cast and but".split()  # noqa: SIM905
METHODS = (
    "BlockMovement", "CoFi", "CoFiLoSparse", "FLOP", "FWSVD", "FirstOrder", "ITP", "LLMPruner", "LPAF", "LoSparse",
    "Layers", "LowRankI", "LowRankII", "Magnitude", "Movement", "PLATON", "SP3", "SVD", "SecondOrder", "SliceGPT",
    "Theseus",
)  # fmt: skip
PRUNE = ["--model.prune.epochs=2", "--model.prune.learning_rate=1e-3"]
RETRAIN = ["--model.retrain.epochs=2", "--model.retrain.learning_rate=1e-3"]
# of a run of two epochs per stage; the scores of PLATON must have a whole window before they rank
OWN = {
    "BlockMovement": [*PRUNE, *RETRAIN, "--model.prune.block=8"],
    "CoFi": [*PRUNE, *RETRAIN, "--model.distil.epochs=1"],
    "CoFiLoSparse": [*PRUNE, *RETRAIN, "--model.distil.epochs=1"],
    "PLATON": [*PRUNE, "--model.prune.interval=2", "--model.prune.start=0.2"],
    "Theseus": ["--model.replace.epochs=2", "--model.replace.learning_rate=1e-3"],
}
WHOLE = ("CoFi", "LPAF", "SecondOrder")  # train their teacher; the others are given it


def prepare(place: Path) -> None:
    """Write the model and the sentences, and use a cache of their own, without network or GPU."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "LIT_COMPRESS_CACHE": str(place / "cache"),
    }  # fmt: skip
    import datasets  # noqa: F401  imported once, before the forks
    import torch
    import torch.distributed.fsdp
    import torch.utils.flop_counter
    import torch.utils.tensorboard
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    import lit_compress.cli.commands
    import lit_compress.methods  # noqa: F401

    torch.set_num_threads(1)
    write_sentences(place / "data", 48, 24)
    if (place / "net" / "config.json").is_file():
        return
    folder = place / "net"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, max_position_embeddings=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)


def write_sentences(folder: Path, train: int, validation: int) -> None:
    """Write files in the form of SST-2; every second sentence is positive."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for split, count in (("train", train), ("validation", validation)):
        with (folder / f"{split}.jsonl").open("w") as file:
            for number in range(count):
                words = rng.choices(WORDS, k=rng.randint(2, 12))
                words += rng.choices(["great", "warm"] if number % 2 else ["bad", "dull"], k=2)
                file.write(json.dumps({"sentence": " ".join(words), "label": number % 2}) + "\n")


def options(method: str, place: Path, teacher: Path | None = None) -> list[str]:
    """Return the words of a ``fit`` of a few seconds, but for its folder.

    Two batches make an optimizer step, and every second step a checkpoint.
    """
    from inspect import signature

    from lit_compress import methods

    own = signature(getattr(methods, method)).parameters
    words = OWN.get(method) or [word for word in (*PRUNE, *RETRAIN) if word.split(".")[1] in own]
    given = [f"--model.teacher={teacher}"] if teacher else ["--model.dense.epochs=1"]
    return [
        "fit", f"--model={method}", f"--model.backbone={place / 'net'}", "--model.density=0.5", *words, *given,
        "--model.dense.learning_rate=3e-3", "--data.task=sst2", f"--data.path={place / 'data'}",
        "--data.batch_size=4", "--trainer.accumulate_grad_batches=2", "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false", "--trainer.logger=false", "--checkpoint_every=2",
    ]  # fmt: skip
