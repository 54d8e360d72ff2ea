"""BART, T5, OPT and Llama through the whole pipeline on real text: data, fit, export, generate. Small random nets.

    python -m benchmarks.architectures.run --data DIR [--work DIR] [--only bart t5 opt llama] [--threads 1]

DIR has xsum/, cnn_dailymail/, tiny_shakespeare/ and wikitext2/ as parquet files. A tokenizer is trained and a net of a
million parameters drawn for each; SVD and LoSparse bring the blocks to half their size. What such nets write is no
English: the numbers say that everything runs, keeps its budget and answers alike elsewhere, not how good a method is.
Writes benchmarks/architectures/results/<net>-<method>.json; existing ones are kept. `python -m benchmarks.tables` makes
the table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common

STUDY = "architectures"
WIDTH, LAYERS, HEADS, INNER, POSITIONS = 128, 2, 4, 512, 256
_SIZE = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}


@dataclass(frozen=True)
class Net:
    """A random net and what it is trained on.

    Attributes:
        family: of Hugging Face.
        settings: of its configuration.
        task: its task.
        files: of training and validation, in the folder of the data sets.
        columns: of the texts; two for summaries.
        rows: of training and validation, of plain text letters.
    """

    family: str
    settings: dict[str, Any]
    task: str
    files: tuple[str, str]
    columns: tuple[str, ...]
    rows: tuple[int, int]

    @property
    def summarizes(self) -> bool:
        """Whether it is an encoder and a decoder."""
        return len(self.columns) == 2


NETS = {
    net.family: net
    for net in (
        Net("bart",
            {"d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
             "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER},
            "xsum", ("xsum/train", "xsum/test"), ("document", "summary"), (200, 24)),
        Net("t5",
            {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS,
             "feed_forward_proj": "gated-gelu"},
            "cnn_dailymail", ("cnn_dailymail/validation", "cnn_dailymail/test"), ("article", "highlights"), (200, 24)),
        Net("opt", {**_SIZE, "ffn_dim": INNER}, "plain_text",
            ("tiny_shakespeare/train", "tiny_shakespeare/validation"), ("text",), (150_000, 30_000)),
        Net("llama", {**_SIZE, "num_key_value_heads": 2, "intermediate_size": INNER}, "wikitext2",
            ("wikitext2/validation", "wikitext2/test"), ("text",), (150_000, 30_000)),
    )
}  # fmt: skip
METHODS: dict[str, list[str]] = {
    "SVD": ["--model.retrain.epochs", "1", "--model.retrain.learning_rate", "1e-3"],
    "LoSparse": ["--model.prune.epochs", "2", "--model.prune.learning_rate", "1e-3", "--model.prune.low_rank", "0.25",
                 "--model.prune.init", "finetuned", "--model.prune.start", "0.05", "--model.prune.end", "0.3"],
}  # fmt: skip

# in a process of its own, where the package cannot be imported
WRITE = """
import json, sys
sys.modules["lit_compress"] = None
import torch, transformers
from transformers import AutoTokenizer
folder, auto, text = sys.argv[1:]
net = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=64, return_token_type_ids=False)
ids = {**ids, "min_new_tokens": 24, "max_new_tokens": 24}
found = [net.generate(**ids, use_cache=cache)[0].tolist() for cache in (True, False)]
written = tokenizer.decode(found[0], skip_special_tokens=True)
print(json.dumps({"written": written, "cache_equal": found[0] == found[1]}))
"""


def prepare(options: Any, net: Net, work: Path) -> tuple[Path, Path]:
    """Write a random backbone and the rows of training and validation; return their folders in ``work``."""
    backbone, texts = work / "backbone", work / "data"
    if options.list or (backbone / "config.json").is_file():
        return backbone, texts
    import torch
    import transformers
    from datasets import load_dataset
    from tokenizers import ByteLevelBPETokenizer, processors

    texts.mkdir(parents=True, exist_ok=True)
    corpus: list[str] = []
    for split, file, count in zip(("train", "validation"), net.files, net.rows, strict=True):
        found = load_dataset("parquet", data_files=str(options.data / f"{file}.parquet"), split="train")
        if not net.summarizes:
            text = "".join(row["text"].rstrip("\n") + "\n" for row in found)[:count]
            (texts / f"{split}.txt").write_text(text)
            rows_read = [{"text": line} for line in text.splitlines()]
        else:
            found = found.select(range(count))
            found.to_parquet(texts / f"{split}.parquet")
            rows_read = list(found)
        corpus += [row[column] for row in rows_read for column in net.columns] if split == "train" else []
    pieces = ByteLevelBPETokenizer()
    pieces.train_from_iterator(corpus, 4000, show_progress=False, special_tokens=["<unk>", "<pad>", "</s>", "<s>"])
    if net.summarizes:
        pieces._tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        net.family, **net.settings, vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, pad_token_id=1,
        eos_token_id=2, bos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    auto = transformers.AutoModelForSeq2SeqLM if net.summarizes else transformers.AutoModelForCausalLM
    tokenizer.save_pretrained(backbone)
    auto.from_config(config).save_pretrained(backbone)
    return backbone, texts


def writing(net: Net, texts: Path, run: Path) -> dict[str, Any]:
    """Let the export write in a process without the package, with and without its cache."""
    from datasets import load_dataset

    file = sorted(texts.glob("validation.*"))[0]
    suffix = {".txt": "text", ".parquet": "parquet"}[file.suffix]
    rows = load_dataset(suffix, data_files=str(file), split="train")
    text = next(row[net.columns[0]].strip() for row in rows if len(row[net.columns[0]]) > 30)[:300]
    auto = "AutoModelForSeq2SeqLM" if net.summarizes else "AutoModelForCausalLM"
    line = [sys.executable, "-I", "-c", WRITE, str(run / "export"), auto, text]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(options: Any, net: Net, method: str) -> None:
    """Run one `fit`, let the export write, keep the report."""
    backbone, texts = prepare(options, net, options.work / net.family)
    dense = options.work / f"{net.family}-svd" / "dense" / "net"
    common.fit(
        options, f"{net.family}-{method.lower()}", "--model", method, "--model.density", 0.5,
        *common.shared(options, net.task, texts, backbone=backbone), "--data.batch_size", 16, "--data.max_length", 128,
        "--trainer.accelerator", "cpu", "--model.dense.epochs", 2, "--model.dense.learning_rate", 1e-3,
        *(["--data.target_length", 32, "--data.num_beams", 2] if net.summarizes else []), *METHODS[method],
        teacher=None if method == "SVD" else lambda: dense, more=partial(writing, net, texts),
    )  # fmt: skip


def main() -> None:
    """Run what is not there yet."""
    options = common.parser(STUDY, __doc__, "data", "work", only=tuple(NETS), precision="32-true").parse_args()
    for family in options.only:
        for method in METHODS:
            if common.missing(options, f"{family}-{method.lower()}"):
                run(options, NETS[family], method)


if __name__ == "__main__":
    main()
