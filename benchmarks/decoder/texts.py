"""Texts of the study: WikiText-2 as people write, news articles, and a model's losses on them.

WikiText-2 is stored with spaces around marks, and rare words are ``<unk>``. No model meets such text. So headings and
sentences with ``<unk>`` are left out, and the spaces are removed. News articles stay as they are.
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

UNKNOWN, HEADING = "<unk>", " ="
AT_ONCE, GIVEN = 32, 16  # texts that a decoder writes at once; tokens with which each begins
JUDGES = 8  # texts of the calibration that choose parts by measured divergence
# as WikiText-2 writes -> as people write
RULES = (
    (r" @(\S)@ ", r"\1"),  # 10 @,@ 000, top @-@ ten
    (r"(\d) : (?=\d)", r"\1:"),
    (r" ([.,;:!?%)\]])", r"\1"),
    (r"([(\[$£€]) ", r"\1"),
    (r" ('(?:s|t|re|ve|ll|d|m)\b)", r"\1"),
    (r'" ([^"]*?) ?"', r'"\1"'),
)


def natural(line: str) -> str:
    """Return a line of WikiText-2 as people write it, without sentences that have an unknown word.

    >>> natural(' The group \\'s song , " Kiss You " , sold 500 @,@ 000 copies ( in 2013 ) . <unk> wrote it . \\n')
    'The group\\'s song, "Kiss You", sold 500,000 copies (in 2013).'
    """
    sentences = re.split(r"(?<= [.!?]) (?=[A-Z\"'(<])", line.strip())
    text = " ".join(sentence for sentence in sentences if UNKNOWN not in sentence)
    for pattern, written in RULES:
        text = re.sub(pattern, written, text)
    return text


def wikitext(file: Path) -> list[str]:
    """Return the paragraphs of a split of WikiText-2 (parquet) as people write them."""
    lines = (row["text"] for row in _rows(file))
    return [text for line in lines if not line.startswith(HEADING) and (text := natural(line))]


def articles(file: Path, letters: int) -> str:
    """Return the first news articles (parquet) that together have so many letters, one a line."""
    made: list[str] = []
    for row in _rows(file):
        if sum(map(len, made)) >= letters:
            break
        made.append(" ".join(row["article"].split()))
    return "\n".join(made)


def column(name: str, *files: Path) -> list[str]:
    """Return the different texts of a column of parquet files, without breaks of lines."""
    return list(dict.fromkeys(" ".join(row[name].split()) for file in files for row in _rows(file)))


def blocks(tokenizer: Any, paragraphs: list[str], count: int, length: int) -> Tensor:
    """Return ``count`` evenly spaced blocks of ``length`` + 1 tokens of a long text, int64 [count, length + 1]."""
    tokens = torch.tensor(tokenizer("\n".join(paragraphs), add_special_tokens=False)["input_ids"])
    whole = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)
    return whole[torch.arange(count) * len(whole) // count]


def beginnings(tokenizer: Any, file: Path, count: int, length: int) -> Tensor:
    """Return the first ``length`` + 1 tokens of the first ``count`` articles that have so many."""
    articles = (row["article"] for row in _rows(file))
    tokens = (tokenizer(text, add_special_tokens=False)["input_ids"][: length + 1] for text in articles)
    return torch.tensor(list(islice((own for own in tokens if len(own) > length), count)))


def write(net: Any, tokenizer: Any, given: Path, file: Path, count: int, length: int) -> None:
    """Let a decoder write texts to ``file``, one a line, until there are ``count``; those that are there stay.

    A text begins with the first tokens of a place in the text file ``given``; the others, up to ``length``, are drawn
    by the model at a temperature of 1. The places and the draws of a batch have the seed of its first text.
    """
    tokens = torch.tensor(tokenizer(given.read_text(), add_special_tokens=False)["input_ids"])
    done, own = file.read_text().count("\n") if file.exists() else 0, min(GIVEN, length // 2)
    for first in range(done, count, AT_ONCE):
        torch.manual_seed(first)
        places = torch.randint(len(tokens) - own, (min(AT_ONCE, count - first), 1)) + torch.arange(own)
        begun = tokens[places].to(net.device)
        made = net.generate(
            begun, attention_mask=torch.ones_like(begun), min_length=length, max_length=length, do_sample=True,
            temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        texts = tokenizer.batch_decode(made, skip_special_tokens=True)
        with file.open("a") as written:
            written.writelines(" ".join(text.split()) + "\n" for text in texts)


@torch.no_grad()
def losses(net: Any, texts: Tensor) -> list[float]:
    """Return the mean loss of a token in every text, in nats: each is predicted from those before it.

    Args:
        net: a decoder in evaluation mode, or a function with the same outputs.
        texts: tokens, int64 [texts, length + 1]; the first token of a text is not predicted.
    """
    logits = (net(input_ids=text[None, :-1]).logits[0].float() for text in texts)
    return [float(torch.nn.functional.cross_entropy(own, text[1:])) for own, text in zip(logits, texts, strict=True)]


def _rows(file: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return pq.read_table(file).to_pylist()
