"""BART, T5, OPT and Llama through the whole pipeline on real text: data, fit, export, generate. Small random nets.

    python benchmarks/architectures.py --data DIR --work DIR [--nets bart t5 opt llama] [--threads 1]

DIR has xsum/, cnn_dailymail/, tiny_shakespeare/ and wikitext2/ as parquet files. A tokenizer is trained and a net of a
million parameters drawn for each; SVD and LoSparse bring the blocks to half their size. What such nets write is no
English: the numbers say that everything runs, keeps its budget and answers alike elsewhere, not how good a method is.
Writes benchmarks/results/architectures/<net>-<method>.json; existing ones are kept. `benchmarks/tables.py` makes the
table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, command, report_of, write

WIDTH, LAYERS, HEADS, INNER, POSITIONS = 128, 2, 4, 512, 256
_SIZE = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
# family -> configuration, task, files of training and validation, text columns, rows (plain text: letters) of both
NETS: dict[str, tuple[dict[str, Any], str, tuple[str, str], tuple[str, ...], tuple[int, int]]] = {
    "bart": (
        {"d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
         "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER},
        "xsum", ("xsum/train", "xsum/test"), ("document", "summary"), (200, 24),
    ),
    "t5": (
        {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS,
         "feed_forward_proj": "gated-gelu"},
        "cnn_dailymail", ("cnn_dailymail/validation", "cnn_dailymail/test"), ("article", "highlights"), (200, 24),
    ),
    "opt": ({**_SIZE, "ffn_dim": INNER}, "plain_text", ("tiny_shakespeare/train", "tiny_shakespeare/validation"),
            ("text",), (150_000, 30_000)),
    "llama": ({**_SIZE, "num_key_value_heads": 2, "intermediate_size": INNER}, "wikitext2",
              ("wikitext2/validation", "wikitext2/test"), ("text",), (150_000, 30_000)),
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


def prepare(
    family: str,
    settings: dict[str, Any],
    files: tuple[str, str],
    columns: tuple[str, ...],
    rows: tuple[int, int],
    data: Path,
    work: Path,
) -> tuple[Path, Path]:
    """Write a random backbone of ``family`` and the rows of training and validation; return their folders."""
    import torch
    import transformers
    from datasets import load_dataset
    from tokenizers import ByteLevelBPETokenizer, processors

    backbone, texts = work / "backbone", work / "data"
    if (backbone / "config.json").is_file():
        return backbone, texts
    texts.mkdir(parents=True, exist_ok=True)
    corpus: list[str] = []
    for split, file, count in zip(("train", "validation"), files, rows, strict=True):
        found = load_dataset("parquet", data_files=str(data / f"{file}.parquet"), split="train")
        if columns == ("text",):
            text = "".join(row["text"].rstrip("\n") + "\n" for row in found)[:count]
            (texts / f"{split}.txt").write_text(text)
            rows_read = [{"text": line} for line in text.splitlines()]
        else:
            found = found.select(range(count))
            found.to_parquet(texts / f"{split}.parquet")
            rows_read = list(found)
        corpus += [row[column] for row in rows_read for column in columns] if split == "train" else []
    pieces = ByteLevelBPETokenizer()
    pieces.train_from_iterator(corpus, 4000, show_progress=False, special_tokens=["<unk>", "<pad>", "</s>", "<s>"])
    if len(columns) == 2:
        pieces._tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, **settings, vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, pad_token_id=1,
        eos_token_id=2, bos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    auto = transformers.AutoModelForSeq2SeqLM if len(columns) == 2 else transformers.AutoModelForCausalLM
    tokenizer.save_pretrained(backbone)
    auto.from_config(config).save_pretrained(backbone)
    return backbone, texts


def fit(family: str, method: str, options: argparse.Namespace) -> None:
    """Run one `fit`, let the export write, keep the report."""
    from datasets import load_dataset

    work = Path(options.work)
    settings, task, files, columns, rows = NETS[family]
    backbone, texts = prepare(family, settings, files, columns, rows, Path(options.data), work / family)
    writes = ["--data.target_length", "32", "--data.num_beams", "2"]
    run, dense = work / family / method, work / family / "SVD" / "dense" / "net"
    command(
        "fit", "--model", method, "--model.backbone", backbone, "--model.density", "0.5", "--data.task", task,
        "--data.path", texts, "--data.batch_size", "16", "--data.max_length", "128", "--trainer.accelerator", "cpu",
        "--trainer.enable_progress_bar", "false", "--model.dense.epochs", "2", "--model.dense.learning_rate", "1e-3",
        *(writes if len(columns) == 2 else []),
        *(["--model.teacher", dense] if method != "SVD" else []), *METHODS[method],
        "--run_dir", run, "--ckpt_path", "last", threads=options.threads,
    )  # fmt: skip
    texts = sorted(texts.glob("validation.*"))[0]
    suffix = {".txt": "text", ".parquet": "parquet"}[texts.suffix]
    rows = load_dataset(suffix, data_files=str(texts), split="train")
    text = next(row[columns[0]].strip() for row in rows if len(row[columns[0]]) > 30)[:300]
    auto = "AutoModelForSeq2SeqLM" if len(columns) == 2 else "AutoModelForCausalLM"
    done = subprocess.run(
        [sys.executable, "-I", "-c", WRITE, str(run / "export"), auto, text], check=True, capture_output=True, text=True
    )
    write("architectures", f"{family}-{method.lower()}", report_of(run) | json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the data sets")
    parser.add_argument("--work", required=True, help="folder for backbones and runs")
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for family in options.nets:
        for method in METHODS:
            if not (RESULTS / "architectures" / f"{family}-{method.lower()}.json").is_file():
                fit(family, method, options)


if __name__ == "__main__":
    main()
