"""Every method on a decoder: perplexity of WikiText-2 after the same training, and without any.

    python -m benchmarks.architectures.decoders --data DIR [--work DIR] [--only svd ...] [--densities ...]

DIR has wikitext2/, xsum/, cnn_dailymail/, squad/ and squad_v2/ as parquet files. WikiText-2's training split is not
there, so a Llama of 5 million parameters is trained from nothing on what is: WikiText-2's validation split, SQuAD's
paragraphs and news articles, written as WikiText-2 writes (words and marks apart). Paragraphs that share eight words in
a row with the test split are left out. Perplexity is that of the test split's first third, by piece and by word.

CoFi and block movement are not among the methods: Llama's sub-layers cannot be gated. SP3 has the gates that Llama has.
BERT-of-Theseus keeps whole blocks: two of four (0.5) in place of 0.6, one (0.25) in place of 0.25.

Writes benchmarks/architectures/results/decoders/<cell>-<density>.json, a run's report.json; existing ones are kept, so
the script can be stopped and started again. `python -m benchmarks.tables` makes the tables.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common

SCRIPT = "architectures/decoders"
LLAMA = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
         "intermediate_size": 704, "tie_word_embeddings": True}  # fmt: skip
PIECES, LENGTH, TESTED = 8000, 256, 80_000  # vocabulary; pieces of a block; words of the test split
TRAINED = (
    ("wikitext2/validation", "text"), ("squad/validation", "context"), ("squad/train", "context"),
    ("squad/train_extra", "context"), ("squad_v2/train", "context"), ("xsum/test", "document"),
    ("cnn_dailymail/validation", "article"), ("cnn_dailymail/test", "article"),
)  # fmt: skip
DENSITIES = (0.8, 0.6, 0.4, 0.25, 0.1)
DENSE: dict[str, Any] = {"epochs": 2, "rate": 1e-3}
TAUGHT = 10_000  # blocks that it is trained on
EXAMPLES, EPOCHS, RATE = 800, 2, 3e-4  # 100 updates of 16 blocks


def trained(*stages: str) -> list[object]:
    """Return the options of stages that share the epochs and the learning rate."""
    parts = ((f"--model.{s}.epochs", EPOCHS // len(stages), f"--model.{s}.learning_rate", RATE) for s in stages)
    return [word for part in parts for word in part]


MASKS = [*trained("prune"), "--model.prune.init", "finetuned", "--model.prune.start", 0.1, "--model.prune.end", 0.6]
LOW_RANK, STRUCTURES = trained("retrain"), ["--model.retrain.removes", "structures", "--model.shape", "uniform"]
FLOP = [*trained("prune"), *common.compared("FLOP")]
SP3 = [*trained("prune"), *common.compared("SP3")]
NONE, PRUNE_NONE = ["--model.retrain.epochs", 0], ["--model.prune.epochs", 0]
# cell -> class and options; the first ones train nothing
CELLS: dict[str, tuple[str, list[object]]] = {
    "slicegpt-0": ("SliceGPT", PRUNE_NONE),
    "llm_pruner-0": ("LLMPruner", PRUNE_NONE),
    "second_order-0": ("SecondOrder", NONE),
    "structures-0": ("SecondOrder", [*NONE, *STRUCTURES]),
    "svd-0": ("SVD", NONE),
    "fwsvd-0": ("FWSVD", NONE),
    "second_order": ("SecondOrder", LOW_RANK),
    "structures": ("SecondOrder", [*LOW_RANK, *STRUCTURES]),
    "slicegpt": ("SliceGPT", trained("prune")),
    "llm_pruner": ("LLMPruner", trained("prune")),
    "svd": ("SVD", LOW_RANK),
    "fwsvd": ("FWSVD", LOW_RANK),
    "lpaf": ("LPAF", trained("prune", "retrain")),
    "losparse": ("LoSparse", MASKS),
    "itp": ("ITP", MASKS),
    "flop": ("FLOP", FLOP),
    "sp3": ("SP3", SP3),
    # with the rates of compare.yaml, chosen for longer training, gates lag behind their target and then close too far
    "flop_fast": ("FLOP", [*FLOP, "--model.prune.gate_learning_rate", 0.3]),
    "sp3_fast": ("SP3", [*SP3, "--model.prune.gate_learning_rate", 0.4]),
    "theseus": ("Theseus", trained("replace")),
    "magnitude": ("Magnitude", MASKS),
    "movement": ("Movement", MASKS),
    "first_order": ("FirstOrder", MASKS),
    "platon": ("PLATON", MASKS),
}  # fmt: skip
BLOCKS = {0.6: 0.5, 0.25: 0.25}  # density -> Theseus'


def spaced(text: str) -> str:
    """Return a text as WikiText-2 writes it: marks apart from words, one paragraph per line."""
    text = re.sub(r"([^\w\s])", r" \1 ", text.replace("\n", " "))
    text = re.sub(r" ' (s|t|re|ve|ll|d|m)\b", r" '\1", text)
    return " " + " ".join(re.sub(r"(?<=\d) ([.,]) (?=\d)", r" @\1@ ", text).split()) + " "


def runs_of_words(text: str, length: int = 8) -> set[tuple[str, ...]]:
    """Return all ``length`` words in a row of a text, without marks."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}


def prepare(options: Any) -> tuple[Path, Path]:
    """Write the texts, and a random Llama with a tokenizer; return their folders in ``--work``, the model's first."""
    backbone, texts = options.work / "backbone", options.work / "data"
    if options.list or (backbone / "config.json").is_file():
        return backbone, texts
    import torch
    import transformers
    from datasets import load_dataset
    from tokenizers import ByteLevelBPETokenizer

    def read(file: str, column: str) -> list[str]:
        found = load_dataset("parquet", data_files=str(options.data / f"{file}.parquet"), split="train")
        return list(dict.fromkeys(text for row in found if (text := row[column].strip())))

    texts.mkdir(parents=True, exist_ok=True)
    tested: list[str] = []
    for text in read("wikitext2/test", "text"):
        if sum(len(line.split()) for line in tested) < TESTED:
            tested.append(f" {text} ")
    known = set().union(*map(runs_of_words, read("wikitext2/test", "text")))
    corpus = []
    for file, column in TRAINED:
        own = (f" {text} " if "wikitext2" in file else spaced(text) for text in read(file, column))
        corpus += [text for text in own if not runs_of_words(text) & known]
    (texts / "validation.txt").write_text("\n".join(tested) + "\n")
    (texts / "train.txt").write_text("\n".join(corpus) + "\n")
    pieces = ByteLevelBPETokenizer()
    pieces.train_from_iterator(corpus, PIECES, show_progress=False, special_tokens=["<unk>", "<pad>", "</s>", "<s>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "llama", **LLAMA, vocab_size=len(tokenizer), max_position_embeddings=LENGTH, pad_token_id=1, eos_token_id=2,
        bos_token_id=3,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(backbone)
    tokenizer.save_pretrained(backbone)
    return backbone, texts


def counts(backbone: Path, texts: Path) -> dict[str, int]:
    """Return the number of pieces and of words (and ends of lines) of the dev set."""
    from transformers import AutoTokenizer

    text = (texts / "validation.txt").read_text()
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    return {"pieces": len(tokenizer(text)["input_ids"]), "words": len(text.split()) + text.count("\n")}


def main() -> None:
    """Make what is missing, cell by cell."""
    parser = common.parser(
        SCRIPT, __doc__, "data", "work", "teachers", "precision", "examples", only=tuple(CELLS), precision="32-true"
    )
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    options = parser.parse_args()
    backbone, texts = prepare(options)

    def shared(examples: int | None) -> list[object]:
        return [
            *common.shared(options, "wikitext2", texts, examples, backbone), "--data.batch_size", 16,
            "--data.max_length", LENGTH, "--trainer.accelerator", "cpu", "--trainer.gradient_clip_val", 1.0,
        ]  # fmt: skip

    def dense() -> Path:
        return common.dense_net(options, "llama", *shared(options.examples or TAUGHT), **DENSE)

    def more(cell: str, density: float, run: Path) -> dict[str, Any]:
        return {"cell": cell, "target": density, **counts(backbone, texts)}

    for cell in options.only:
        method, words = CELLS[cell]
        taught = [] if cell.endswith("-0") else ["--model.distillation.alpha", 0.5]
        for density in filter(None, map(BLOCKS.get, options.densities) if cell == "theseus" else options.densities):
            common.fit(
                options, f"{cell}-{density:g}", *shared(options.examples or EXAMPLES), "--model", method,
                "--model.density", density, *words, *taught, teacher=dense,
                more=partial(more, cell, density),
            )  # fmt: skip


if __name__ == "__main__":
    main()
