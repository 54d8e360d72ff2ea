"""Tiny random nets and batches for the tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from lit_compress.models.surgery import as_linears
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task, get_task

WORDS = "a film of great bad warm dull charm wit the plot is so not very fine poor story cast and but".split()  # noqa: SIM905

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
PAIRED = SIZES | {"num_key_value_heads": 2, "pad_token_id": 1}  # queries share keys
ENDS = {"pad_token_id": 1, "bos_token_id": 3, "eos_token_id": 2}
TINY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "camembert", "xlm-roberta", "mpnet"), SIZES),
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "electra": SIZES | {"embedding_size": 16},
    "albert": SIZES | {"embedding_size": 16, "num_hidden_layers": 3},
    "deberta-v2": SIZES | {
        "relative_attention": True, "position_buckets": 6, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    },
    "modernbert": SIZES | ENDS | {
        "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 3, "sep_token_id": 2,
    },
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64},
    "gpt2": ENDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64, "n_positions": 64},
    "gpt_neox": SIZES | ENDS,
    "llama": PAIRED,
    "qwen3": PAIRED | {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": PAIRED | {"sliding_window": 4},
    "qwen2": PAIRED | {"tie_word_embeddings": True},
    "phi3": PAIRED | ENDS | {"sliding_window": 4},
    "gemma2": PAIRED | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": PAIRED | {
        "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2,
    },
    "bart": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "pad_token_id": 1, "eos_token_id": 2,
           "decoder_start_token_id": 1},
}  # fmt: skip

DECODERS = ("opt", "gpt2", "gpt_neox", "phi3", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")

SOFTMAX_IN_FLOAT32 = ("gemma2",)  # its own attention, also in a net of float64

# name -> family and settings: what published models of a family have and the net above has not
VARIANTS = {
    "albert-groups": ("albert", {"num_hidden_groups": 3, "inner_group_num": 2}),
    "deberta-v2-conv": ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "deberta-v2-own-positions": ("deberta-v2", {"share_att_key": False}),
    "deberta-v2-absolute": ("deberta-v2", {"relative_attention": False, "position_biased_input": True}),
    "modernbert-biases": ("modernbert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True,
                                         "classifier_pooling": "mean"}),
    "opt-350m": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "llama-one-key": ("llama", {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "qwen3-sliding": ("qwen3", {"num_key_value_heads": 1, "head_dim": 8, "attention_bias": True, "sliding_window": 4,
                                "tie_word_embeddings": False, "use_sliding_window": True, "max_window_layers": 1}),
    "bart-uneven": ("bart", {"encoder_attention_heads": 2, "decoder_layers": 1, "decoder_ffn_dim": 48,
                             "scale_embedding": True}),
    "t5-gated": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 1}),
}  # fmt: skip
ALL = {**{family: (family, {}) for family in TINY}, **VARIANTS}


def make_net(family: str = "bert", task: str | Task = "sst2", seed: int = 0, dropout: float | None = None, **settings):
    """Build a tiny random net of a family with the head of a task; ``settings`` of its configuration come last."""
    import transformers

    config = transformers.AutoConfig.for_model(
        family,
        **task_type(get_task(task)).head(get_task(task)),
        **{"vocab_size": 100, "max_position_embeddings": 64} | TINY.get(family, {}) | settings,
    )
    if dropout is not None:
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout",
                     "embedding_dropout", "mlp_dropout", "classifier_dropout_prob", "summary_last_dropout",
                     "dropout_rate", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"):  # fmt: skip
            if hasattr(config, name):
                setattr(config, name, dropout)
        config.seq_classif_dropout = dropout
    torch.manual_seed(seed)
    return as_linears(getattr(transformers, task_type(get_task(task)).auto_class).from_config(config))


def make_batch(size: int = 4, length: int = 9, seed: int = 1) -> dict[str, torch.Tensor]:
    """Build a batch with padding in its second row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 100, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    ids[range(size), mask.sum(1) - 1] = 2  # BART and T5 read a class from the end of the text
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (size,), generator=generator),
        "index": torch.arange(size),
    }


def make_inputs(*size: int) -> dict[str, torch.Tensor]:
    """Build what a net reads of a batch."""
    batch = make_batch(*size)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def write_bert(folder: Path, task: str | Task = "sst2", family: str = "bert", **settings) -> Path:
    """Write a tiny net, a BERT by default, and a WordPiece tokenizer of a few words into ``folder``; return it."""
    from transformers import BertTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    make_net(family, task, **{"dropout": 0.1} | settings).save_pretrained(folder)
    return folder


def short_options(backbone: Path, data: Path) -> list[str]:
    """Return the options of a whole run in a second or two, but for method, density and run folder."""
    return [
        "--model.backbone", str(backbone), "--data.task", "sst2", "--data.path", str(data),
        "--data.batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false",
        "--model.dense.epochs", "2", "--model.dense.learning_rate", "3e-3",
        "--model.retrain.epochs", "2", "--model.retrain.learning_rate", "1e-3",
    ]  # fmt: skip


def write_backbone(folder, family: str, task: str, words: list[str] = WORDS, **settings):
    """Write a tiny net that generates, and a tokenizer of whole words for it, into ``folder``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<pad>", "</s>", "<s>"]  # the ids that the families above have
    pieces = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *words])}, unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if family in ("bart", "t5"):
        pieces.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    tokenizer.save_pretrained(folder)
    make_net(family, task, dropout=0.1, **settings).save_pretrained(folder)
    return folder


def write_model(folder, family: str, task: str, **settings):
    """Write a net of three blocks with large weights, and biases, into ``folder``; return the folder."""
    layers = {"gpt2": "n_layer"}.get(family, "num_hidden_layers")
    write_backbone(folder, family, task)
    net = make_net(family, task, initializer_range=0.2, **({layers: 3} | settings))
    with torch.no_grad():
        for name, value in net.named_parameters():
            if name.endswith("bias"):
                value.normal_(std=0.3)
    net.save_pretrained(folder)
    return folder


def write_rows(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    """Write the rows of every split as a file of JSON lines into ``folder``; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_sentences(folder: Path, train: int = 100, validation: int = 40) -> Path:
    """Write SST-2-shaped files, half of whose sentences are positive, into ``folder``; return the folder."""
    rng, ends = random.Random(0), (["bad", "dull"], ["great", "warm"])

    def row(i: int) -> dict[str, Any]:
        words = rng.choices(WORDS, k=rng.randint(2, 12)) + rng.choices(ends[i % 2], k=2)
        return {"sentence": " ".join(words), "label": i % 2}

    return write_rows(folder, train=[row(i) for i in range(train)], validation=[row(i) for i in range(validation)])


def write_texts(folder: Path, shortest: int = 1) -> Path:
    """Write 60 training and 13 validation lines of up to 12 words into ``folder``; return the folder."""
    rng = random.Random(0)
    for split, lines in (("train", 60), ("validation", 13)):
        rows = [" ".join(rng.choices(WORDS, k=rng.randint(shortest, 12))) for _ in range(lines)]
        (folder / f"{split}.txt").write_text("\n".join(rows) + "\n")
    return folder
