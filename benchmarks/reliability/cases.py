"""Cases of the fuzz test: Hypothesis strategies that damage configs, data files, exports and models.

A case is plain values: what is damaged, and how. ``benchmarks/reliability/checks.py`` tries one; the tests of CI draw
few of them, ``benchmarks/reliability/fuzz.py`` thousands.
"""

from __future__ import annotations

import copy
import io
import json
from typing import Any

from hypothesis import strategies as st

# numbers, words and shapes at which readers of configs fail
EDGES = [
    0, -1, 1, 2, 3, 7, 64, 1000, 30000, 2**31 - 1, 2**31, 2**63, 10**9, 10**30, 0.0, -0.0, 0.5, 1.5, 1e-300, 1e308,
    float("nan"), float("inf"), float("-inf"), "", " ", "x", "0", "1e3", "null", "true", "../x", "a" * 5000, "é\ud7ff",
    "{x", "[1", "a.b.c", "os.system", "lit_compress.methods.SVD", [], {}, [[]], [{}], [None], {"": 0}, {"a": {"b": []}},
    {"class_path": "os.system", "init_args": {"command": "touch ran"}}, {"class_path": "x"}, None, True, False,
]  # fmt: skip

_leaves = st.one_of(
    st.sampled_from(EDGES), st.integers(), st.floats(), st.text(max_size=4), st.sampled_from([10**n for n in range(12)])
)
values = st.one_of(
    _leaves,
    st.recursive(
        _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    ),
)  # fmt: skip
json_edits = st.lists(
    st.tuples(st.sampled_from(["set", "set", "set", "remove", "add", "nest", "scale"]), st.integers(0, 10**6), values),
    min_size=1, max_size=2,
)  # fmt: skip
_pieces = st.one_of(
    st.binary(max_size=6),
    st.sampled_from(
        [b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b'"', b"\\", b"\r", b"\n", b"\t", b",", b";", b"{", b"}", b"[", b"]",
         b"null", b"NaN", b"-1", b"1e999", b"9" * 400, b"[" * 2000, b'{"a":' * 2000, b"\\ud800", b"\xc3\x28", b":",
         b'""', b"a" * 70_000, b"\xf0\x9f\x98\x80", b"\x1a", b"#", b"true", b"\n\n\n", b'"""']
    ),
)  # fmt: skip
byte_edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "flip", "insert", "insert", "cut", "remove", "repeat", "overwrite", "zero"]),
        st.integers(0, 10**6), st.integers(0, 10**4), _pieces,
    ),
    min_size=1, max_size=2,
)  # fmt: skip


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of every value in nested dicts and lists, the outermost first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(path for key, child in inner for path in paths(child, (*prefix, key)))]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def edit_json(value: Any, edits: list[tuple[str, int, Any]]) -> Any:
    """Return nested dicts and lists with some of their values set, removed, added, wrapped or scaled."""
    box = {"": copy.deepcopy(value)}
    for kind, where, new in edits:
        found = paths(box)[1:]
        if where % 4:  # mostly a value, and not a whole group of them
            found = [path for path in found if not isinstance(_at(box, path), dict | list)] or found
        *above, last = found[where % len(found)]
        holder, new = box, copy.deepcopy(new)  # a later edit may go into it
        for key in above:
            holder = holder[key]
        if kind == "remove" and above:
            del holder[last]
        elif kind == "add" and isinstance(holder[last], dict):
            holder[last][new if isinstance(new, str) else "strange"] = new
        elif kind == "nest":
            holder[last] = [holder[last]] if where % 2 else {"x": holder[last]}
        elif kind == "scale" and type(holder[last]) is int:
            holder[last] *= 1 + where % 5000
        else:
            holder[last] = new
    return box[""]


def edit_bytes(content: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    """Return bytes some of which are flipped, cut, removed, repeated or replaced."""
    for kind, where, size, piece in edits:
        at = where % (len(content) + 1)
        span = 1 + size % 40
        if kind == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ (1 << size % 8)]) + content[at + 1 :]
        elif kind == "insert":
            content = content[:at] + piece + content[at:]
        elif kind == "cut":
            content = content[:at]
        elif kind == "remove":
            content = content[:at] + content[at + span :]
        elif kind == "repeat":
            content = content[:at] + content[at : at + span] * (1 + size % 50) + content[at + span :]
        elif kind == "overwrite":
            content = content[:at] + piece + content[at + len(piece) :]
        else:
            content = content[:at] + bytes(span) + content[at + span :]
    return content


# ---------------------------------------------------------------- data: a corpus of every type and form


def _lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _table(sign: str, *rows: dict[str, Any]) -> bytes:
    lines = [sign.join(rows[0]), *(sign.join(map(str, row.values())) for row in rows)]
    return ("\n".join(lines) + "\n").encode()


def _parquet(*rows: dict[str, Any]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()


_CLASSES = [{"sentence": f"good film {i}", "label": i % 2} for i in range(12)]
_OWN = [{"text": f"the film {i} was good", "label": "abc"[i % 3]} for i in range(12)]
_PAIRS = [{"sentence1": f"good {i}", "sentence2": "bad", "label": i / 3} for i in range(9)]
_WORDS = [{"tokens": ["good", "film"], "ner_tags": [i % 3, 0]} for i in range(9)]
_QUESTIONS = [
    {"id": str(i), "question": "was it?", "context": "a good film", "answers": {"text": ["good"], "answer_start": [2]}}
    for i in range(6)
]
# (task, kind of an own task, name of the file) -> bytes
CORPUS: dict[tuple[str, str | None, str], bytes] = {
    ("sst2", None, "train.jsonl"): _lines(*_CLASSES),
    ("sst2", None, "train.json"): json.dumps(_CLASSES, indent=1).encode(),
    ("sst2", None, "train.csv"): _table(",", *_CLASSES),
    ("sst2", None, "train.tsv"): _table("\t", *_CLASSES),
    ("sst2", None, "train.parquet"): _parquet(*_CLASSES),
    ("custom", "classification", "train.csv"): _table(",", *_OWN),
    ("custom", "classification", "train.jsonl"): _lines(*_OWN),
    ("custom", "regression", "train.tsv"): _table("\t", *({"text": "good", "label": i / 3} for i in range(9))),
    ("custom", "tagging", "train.jsonl"): _lines(*({"tokens": r["tokens"], "tags": ["O", "B-X"]} for r in _WORDS)),
    ("stsb", None, "train.csv"): _table(",", *_PAIRS),
    ("stsb", None, "train.parquet"): _parquet(*_PAIRS),
    ("conll2003", None, "train.jsonl"): _lines(*_WORDS),
    ("conll2003", None, "train.parquet"): _parquet(*_WORDS),
    ("squad", None, "train.jsonl"): _lines(*_QUESTIONS),
    ("squad", None, "train.json"): json.dumps(_QUESTIONS).encode(),
    ("squad", None, "train.parquet"): _parquet(*_QUESTIONS),
}  # fmt: skip

# of a line, what is in a row: values and their types are damaged, not only bytes
row_edits = st.lists(st.tuples(st.integers(0, 10**6), json_edits), min_size=1, max_size=2)
data_cases = st.one_of(
    st.tuples(st.sampled_from(sorted(CORPUS, key=str)), st.just("bytes"), byte_edits),
    st.tuples(st.sampled_from([k for k in CORPUS if k[2] == "train.jsonl"]), st.just("rows"), row_edits),
    st.tuples(st.sampled_from(sorted(CORPUS, key=str)), st.just("name"), st.sampled_from(
        ["train.csv", "train.tsv", "train.jsonl", "train.json", "train.parquet", "train.txt"])),
)  # fmt: skip


def data_file(case: tuple[Any, str, Any]) -> tuple[str, bytes]:
    """Return name and bytes of the damaged file of a case."""
    key, how, edits = case
    name, content = key[2], CORPUS[key]
    if how == "name":
        return edits, content
    if how == "bytes":
        return name, edit_bytes(content, edits)
    lines = content.decode().splitlines()
    for where, inner in edits:
        at = where % len(lines)
        lines[at] = json.dumps(edit_json(json.loads(lines[at]), inner))
    return name, ("\n".join(lines) + "\n").encode()


# ---------------------------------------------------------------- configs

NAMES = st.sampled_from(
    ["model", "data", "trainer", "export", "epochs", "density", "learning_rate", "path", "class_path", "init_args",
     "callbacks", "logger", "plugins", "tasks", "seed_everything", "strategy", "devices", "dense", "rank", "budget",
     "x", "", "model.density", "__class__", "retrain", "batch_size", "custom", "labels"]
)  # fmt: skip
config_cases = st.tuples(
    st.sampled_from(["SVD", "FWSVD", "LPAF", "LoSparse", "CoFi", "SP3", "SecondOrder", "Movement"]),
    json_edits,
    st.dictionaries(NAMES, values, max_size=1),
    st.one_of(st.none(), byte_edits),
)

# ---------------------------------------------------------------- exports and models

EXPORTS = ("lpaf", "cofi", "sp3")
FILES = ("config.json", "structure.json", "model.safetensors", "report.json", "tokenizer.json", "tokenizer_config.json")
_json_file = st.sampled_from([name for name in FILES if name.endswith(".json")])
_damage = st.one_of(
    st.tuples(_json_file, st.just("json"), json_edits),
    st.tuples(st.sampled_from(["config.json", "structure.json"]), st.just("json"), json_edits),
    st.tuples(st.sampled_from(FILES), st.just("bytes"), byte_edits),
    st.tuples(st.just("model.safetensors"), st.just("header"), json_edits),
    st.tuples(st.just("model.safetensors"), st.just("bytes"), byte_edits),
    st.tuples(st.just("model.safetensors"), st.just("tensors"), st.tuples(
        st.sampled_from(["shape", "missing", "more", "type", "nan", "transposed"]), st.integers(0, 10**6))),
    st.tuples(st.sampled_from(["pytorch_model.bin", "model.safetensors"]), st.just("pickle"), st.integers(0, 3)),
)  # fmt: skip
export_cases = st.tuples(st.sampled_from(EXPORTS), st.just("export"), _damage)
model_cases = st.tuples(st.just("lpaf"), st.just("model"), _damage)
