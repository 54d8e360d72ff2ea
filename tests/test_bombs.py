"""Small files that mean gigabytes or hours: each is one line and exit code 2, in seconds and 2 GiB beyond imports."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
from pathlib import Path

import processes
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_compress.__main__ import main

OLD = Path(__file__).with_name("old_runs")
SECONDS = 20  # several times what the slowest takes, for a busy machine


def run_all(commands: dict[str, list[str]], answers: Path, cache: str) -> None:
    """Run commands in turn, each until it ends or is interrupted; write exit code, lines and name of each."""
    os.environ["LIT_COMPRESS_CACHE"] = cache
    taken = int(Path("/proc/self/status").read_text().partition("VmSize:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**31, taken + 2**31))
    for name, given in commands.items():
        said = io.StringIO()
        code: object = 0
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            signal.alarm(SECONDS)  # ends all: nothing below the interpreter could be interrupted
            try:
                main(given)
            except SystemExit as stop:
                code = stop.code
            except BaseException as error:
                code = repr(error)[:200]
            signal.alarm(0)
        lines = [line for line in said.getvalue().splitlines() if not line.startswith(("note: ", "warning: "))]
        with answers.open("a") as file:
            file.write(json.dumps([code, lines, name]) + "\n")


DEEP, BRACKETS = "[" * 100_000 + "]" * 100_000, "[" * 900 + "]" * 900
LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def model(folder: Path) -> Path:
    return Path(shutil.copytree(OLD / "lpaf" / "dense" / "net", folder))


def records(folder: Path) -> dict[str, list[str]]:
    """Write runs and exports with a hostile record, and return the commands that read them."""
    commands = {}
    readers = {
        "report.json": ("validate", "report", "list runs"), "details.json": ("report",), "data.json": ("export",),
        "stages.json": ("report", "list runs"), "config.yaml": ("validate", "export", "fit"),
    }  # fmt: skip
    for file, names in readers.items():
        for kind, content in {"deep": DEEP, "nested": BRACKETS, "aliases": LAUGHS}.items():
            if kind == "aliases" and file != "config.yaml":
                continue
            run = Path(shutil.copytree(OLD / "lpaf", folder / f"{kind}-{file}"))
            given = run / "export" if (file, kind) == ("report.json", "deep") else run
            (given / file).write_text(content)
            for name in names:
                if name == "validate" and file == "report.json" and given == run:
                    continue  # of a run only its export's is read
                more = {"export": [str(folder / "out")], "validate": ["--data.path", str(OLD / "data")]}.get(name, [])
                if name == "fit":
                    name, more = f"fit --config {OLD}/lpaf/config.yaml --run_dir", ["--ckpt_path", "last"]
                commands[f"{name.split()[0]} {kind} {file}"] = [*name.split(), str(given), *more]
    return commands


def models(folder: Path) -> dict[str, list[str]]:
    """Write hostile models, and return the commands that read them."""
    for kind in ("labels", "deep", "nested", "tokenizer", "structure", "tensors", "brackets"):
        model(folder / kind)
    config = json.loads((folder / "labels" / "config.json").read_text())
    many = config | {"id2label": {str(i): "a" for i in range(200_000)}}
    (folder / "labels" / "config.json").write_text(json.dumps(many))
    (folder / "deep" / "config.json").write_text(DEEP)
    (folder / "nested" / "config.json").write_text(json.dumps(config)[:-1] + f', "x": {BRACKETS}}}')
    (folder / "brackets" / "config.json").write_text('{"x": [' + "[]," * 5_000_000 + "[]]}")
    (folder / "tokenizer" / "tokenizer_config.json").write_text(DEEP)
    names = (
        f'"bert.x{i}": {{"kind": "low_rank", "in_features": 4, "out_features": 4, "rank": 1}}' for i in range(300_000)
    )
    (folder / "structure" / "structure.json").write_text("{" + ", ".join(names) + "}")
    head = "{" + ",".join(f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(160_000)) + "}"
    (folder / "tensors" / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head.encode())
    given = sorted(path for path in folder.iterdir() if (path / "config.json").is_file())
    task = ["--data.task", "sst2", "--data.path", str(OLD / "data")]
    return {f"validate {path.name}": ["validate", str(path), *task] for path in given}


def data(folder: Path) -> dict[str, list[str]]:
    """Write hostile data and configs, and return the commands that read them."""
    plan = ["plan", "--model", "SVD", "--model.density", "0.5", f"--model.backbone={OLD / 'backbone'}",
            "--data.task", "sst2"]  # fmt: skip
    commands = {}
    for kind, rows, size in (("repeated", 4096, 2**20), ("long", 1, 2**28 + 1)):  # 4 GiB, 256 MiB
        (folder / kind).mkdir()
        sentences = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["a" * size])
        for split in ("train", "validation"):
            table = pa.table({"sentence": sentences, "label": [0] * rows})
            pq.write_table(table, folder / kind / f"{split}.parquet", compression="zstd", store_schema=False)
        assert (folder / kind / "train.parquet").stat().st_size < 200_000
        commands[f"plan {kind}"] = [*plan, "--data.path", str(folder / kind)]
    for kind, content in {"deep": f"model: {DEEP}", "aliases": LAUGHS, "itself": "model: &a [*a]"}.items():
        (folder / f"{kind}.yaml").write_text(content)
        (folder / f"card-{kind}").mkdir()
        (folder / f"card-{kind}" / "README.md").write_text(f"---\n{content}\n---\n# A card\n")
        commands |= {
            f"{name} {kind}.yaml": [name, "--config", str(folder / f"{kind}.yaml")] for name in ("plan", "compare")
        }
        commands[f"plan card-{kind}"] = [*plan, "--data.path", str(folder / f"card-{kind}")]
    return commands


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the memory of a process")
def test_what_is_larger_than_any_real_file_is_one_line(tmp_path):
    commands = {}
    for make in (models, records, data):
        (folder := tmp_path / make.__name__).mkdir()
        commands |= make(folder)
    process = processes._CONTEXT.Process(target=run_all, args=(commands, tmp_path / "said", str(tmp_path / "cache")))
    process.start()
    process.join()
    ended = {name: (code, lines) for code, lines, name in map(json.loads, (tmp_path / "said").read_text().splitlines())}
    assert set(ended) == set(commands), next(name for name in commands if name not in ended)
    assert not {name: said for name, said in ended.items() if said[0] != 2 or len(said[1]) != 1}
