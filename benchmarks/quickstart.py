"""The data and the backbone of ``make quickstart``, without a download: docstrings of Python, a small BERT.

    python -m benchmarks.quickstart [FOLDER]

writes ``areas``, a folder of tables whose texts come from one area of the library each, and ``bert``, a 4-layer BERT
with random weights and a tokenizer of these texts, into FOLDER (default: runs/made). A folder that is whole stays. The
sources are read with :mod:`ast`, never imported; they depend on the version of Python.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_compress.utils.cache import build_once

# Area -> its top-level modules. A module that this Python does not have is not read.
AREAS: dict[str, str] = {
    "concurrency": "_threading_local asyncio concurrent contextvars multiprocessing queue sched selectors "
    "signal threading",
    "files": "_compression _pyio aifc bz2 chunk dbm filecmp fileinput fnmatch genericpath glob gzip io lzma "
    "ntpath os pathlib pickle platform posixpath shelve shutil sqlite3 stat subprocess sunau tarfile tempfile "
    "wave zipfile zipimport",
    "gui": "curses idlelib tkinter turtle turtledemo",
    "language": "abc ast code codeop compileall contextlib ctypes dataclasses dis distutils enum functools "
    "importlib inspect lib2to3 modulefinder pickletools pkgutil py_compile pyclbr pydoc runpy site symtable "
    "sysconfig token tokenize types typing venv weakref",
    "network": "asynchat asyncore cgi ftplib http imaplib ipaddress netrc nntplib poplib smtpd smtplib socket "
    "socketserver ssl telnetlib urllib uuid webbrowser wsgiref xmlrpc",
    "numbers": "_collections_abc _pydecimal bisect calendar collections colorsys copy datetime _pydatetime "
    "fractions graphlib hashlib heapq hmac numbers operator random secrets statistics struct zoneinfo",
    "testing": "bdb cProfile cgitb doctest logging pdb profile pstats timeit trace traceback tracemalloc "
    "unittest warnings",
    "text": "_strptime base64 codecs configparser csv difflib email encodings gettext html json locale mailbox "
    "mimetypes plistlib pprint quopri re shlex string textwrap tomllib xml",
}
SKIPPED = {"__pycache__", "idle_test", "lib-dynload", "site-packages", "test", "tests"}
PASSAGE_WORDS = 20  # a passage ends with the sentence that reaches this many words
SHORTEST_PASSAGE = 10  # words; a shorter rest of a docstring is dropped
PER_AREA = 1300  # passages kept of one area, so that no class is much larger than another
SPLITS = (("train", 80), ("validation", 90), ("test", 100))  # name, upper bound of hash percent
VOCABULARY = 4000
BACKBONE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
}
SEED = 0
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of one source file; a file that cannot be read or parsed has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library's own sources
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    yield from filter(None, (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)))


def _passages(docstring: str, module: str) -> Iterator[str]:
    """Split a docstring into passages of one or a few sentences, in lower case, with spaces between tokens.

    The module's own name, which would reveal the area, is replaced by ``module``.
    """
    own_name = re.compile(rf"\b{re.escape(module.strip('_').lower())}\b")
    words: list[str] = []
    for sentence in re.split(r"(?<=[.!?:])\s+|\n\s*\n", own_name.sub("module", docstring.lower())):
        if len(re.findall(r"[a-z']{2,}", sentence)) < 3:
            continue  # an example's output, a rule of dashes
        words += re.findall(r"[a-z0-9']+|[^\sa-z0-9']", sentence)
        if len(words) >= PASSAGE_WORDS:
            yield " ".join(words)
            words = []
    if len(words) >= SHORTEST_PASSAGE:
        yield " ".join(words)


def _read_passages(files: list[tuple[str, str, Path]]) -> dict[str, list[tuple[str, str]]]:
    """Return the rows (text, area) by split; a text that occurs in two areas is left out."""
    area_of: dict[str, str | None] = {}
    for area, module, file in files:
        for docstring in _docstrings(file):
            for text in _passages(docstring, module):
                area_of[text] = area if area_of.get(text, area) == area else None
    kept: dict[str, int] = dict.fromkeys(AREAS, 0)
    splits: dict[str, list[tuple[str, str]]] = {name: [] for name, _ in SPLITS}
    for digest, text in sorted((hashlib.sha256(text.encode()).digest(), text) for text in area_of):
        if (only := area_of[text]) is None or kept[only] == PER_AREA:
            continue
        kept[only] += 1
        percent = int.from_bytes(digest[:4]) % 100  # the same on every machine
        splits[next(name for name, bound in SPLITS if percent < bound)].append((text, only))
    return splits


def read_splits() -> dict[str, list[tuple[str, str]]]:
    """Return the rows (text, area) by split: no text is in two splits, and their order is always the same.

    Raises:
        SystemExit: the standard library has no sources here.
    """
    root = Path(sysconfig.get_path("stdlib"))
    area_of = {module: area for area, modules in AREAS.items() for module in modules.split()}
    paths = sorted(path for name in area_of for path in (*root.glob(f"{name}.py"), *(root / name).rglob("*.py")))
    named = [(file.relative_to(root).parts[0].removesuffix(".py"), file) for file in paths]
    files = [(area_of[module], module, file) for module, file in named if not SKIPPED & {*file.relative_to(root).parts}]
    if not files:
        raise SystemExit(f"error: no sources of the standard library in '{root}'")
    return _read_passages(files)


def write(folder: Path) -> None:
    """Write the tables and the backbone into ``folder``."""
    splits = read_splits()
    (folder / "areas").mkdir()
    for name, rows in splits.items():
        with (folder / "areas" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "area"), *rows])
    _write_backbone(folder / "bert", [text for text, _ in splits["train"]])


def _write_backbone(folder: Path, texts: list[str]) -> None:
    """Train the tokenizer, make random weights, save both as the transformers library does."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertConfig, BertModel, BertTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # Ties between merges go by piece number, and the trainer numbers "##x" pieces in a random order unless
    # they are there from the start: without them every process would train another vocabulary.
    inner = [f"##{character}" for character in sorted(set("".join(texts)) - {" "})]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL, *inner], show_progress=False, min_frequency=2
    )
    pieces.train_from_iterator(texts, trainer)
    tokenizer = BertTokenizer(
        vocab=pieces.get_vocab(), do_lower_case=True, model_max_length=BACKBONE["max_position_embeddings"]
    )
    tokenizer.save_pretrained(folder)
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **BACKBONE)
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random numbers alone
        torch.manual_seed(SEED)
        BertModel(config).save_pretrained(folder)


def main() -> None:
    """Write the folder if it is not there."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.quickstart", description=__doc__, formatter_class=form)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/made"), metavar="FOLDER")
    print(build_once(parser.parse_args().folder, write))


if __name__ == "__main__":
    main()
