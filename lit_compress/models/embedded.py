"""Data and a backbone that need no download: docstrings of the standard library, and a small BERT.

The task ``docstrings`` asks which area of the library a passage comes from. The sources are read with
:mod:`ast`, never imported. Results are kept in the cache folder.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_compress.tasks.records import Task, get_task
from lit_compress.utils.cache import build_once, cache_folder, short_hash
from lit_compress.utils.errors import UserError

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


def _read_passages(files: list[tuple[str, str, Path]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows (text, area) by split; a text that occurs in two areas is left out."""
    area_of: dict[str, str | None] = {}
    for area, module, file in files:
        for docstring in _docstrings(file):
            for text in _passages(docstring, module):
                area_of[text] = area if area_of.get(text, area) == area else None
    kept: dict[str, int] = dict.fromkeys(AREAS, 0)
    splits: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in SPLITS}
    for digest, text in sorted((hashlib.sha256(text.encode()).digest(), text) for text in area_of):
        if (only := area_of[text]) is None or kept[only] == PER_AREA:
            continue
        kept[only] += 1
        percent = int.from_bytes(digest[:4]) % 100  # the same on every machine
        splits[next(name for name, bound in SPLITS if percent < bound)].append({"text": text, "area": only})
    return splits


@functools.lru_cache(maxsize=2)
def _docstring_splits(cache: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of ``docstrings`` by split, from the cache if the same library was read before."""
    root = Path(sysconfig.get_path("stdlib"))
    area_of = {module: area for area, modules in AREAS.items() for module in modules.split()}
    paths = sorted(path for name in area_of for path in (*root.glob(f"{name}.py"), *(root / name).rglob("*.py")))
    named = [(file.relative_to(root).parts[0].removesuffix(".py"), file) for file in paths]
    files = [(area_of[module], module, file) for module, file in named if not SKIPPED & {*file.relative_to(root).parts}]
    if not files:
        raise UserError(f"data.task: 'docstrings' found no sources of the standard library in '{root}'")
    sizes = [(str(file.relative_to(root)), file.stat().st_size) for _, _, file in files]
    key = short_hash(AREAS, PASSAGE_WORDS, SHORTEST_PASSAGE, PER_AREA, SPLITS, sizes)

    def fill(folder: Path) -> None:
        (folder / "splits.json").write_text(json.dumps(_read_passages(files)), encoding="utf-8")

    folder = build_once(cache / f"docstrings-{key}", fill)
    splits: dict[str, list[dict[str, Any]]] = json.loads((folder / "splits.json").read_text(encoding="utf-8"))
    return splits


def load_texts(task: Task) -> dict[str, list[dict[str, Any]]]:
    """Return the rows ``{"text": str, "label": int}`` by split of a task whose data the package makes itself.

    No text is in two splits, and their order is always the same. They depend on the Python version that runs. A
    UserError if the standard library has no sources here, or the cache cannot be written.
    """
    if task.name != "docstrings":
        raise UserError(f"data.task: '{task.name}' has neither a hub name nor embedded data; give --data.path")
    splits = _docstring_splits(cache_folder())
    return {
        name: [{"text": row["text"], "label": task.labels.index(row["area"])} for row in rows]
        for name, rows in splits.items()
    }


def build_backbone(task: Task) -> Path:
    """Return the folder of a small random BERT and its tokenizer, made on first use, without a head.

    The tokenizer is trained on the embedded training texts for every task; the weights are random with a fixed seed.
    """
    if task.max_length > (most := BACKBONE["max_position_embeddings"]):
        raise UserError(
            f"model.backbone: 'embedded' reads {most} tokens, task '{task.name}' has {task.max_length}; give another "
            "backbone"
        )
    texts = [row["text"] for row in load_texts(get_task("docstrings"))["train"]]
    key = short_hash(texts, VOCABULARY, BACKBONE, SEED, SPECIAL)
    return build_once(cache_folder() / f"backbone-{key}", lambda folder: _write_backbone(folder, texts))


def _write_backbone(folder: Path, texts: list[str]) -> None:
    """Train the tokenizer, make random weights, save both as the transformers library does."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertConfig, BertModel, BertTokenizer

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
