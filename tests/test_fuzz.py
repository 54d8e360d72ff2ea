"""Damaged configs, data files, exports and models: one line or the right result, in bounded time and memory.

Few cases of each kind, always the same; thousands in benchmarks/reliability/fuzz.py.
"""

from __future__ import annotations

import json
import random
import shutil
import time

import pytest
from hypothesis import HealthCheck, given, settings
from mistakes import fails

from benchmarks.reliability import cases, checks
from lit_compress.cli.targets import find_target, load_checked, open_target
from lit_compress.cli.words import Line
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.models.storage import load_net
from lit_compress.run.folder import Run
from lit_compress.run.results import read_report, read_results
from lit_compress.utils.errors import UserError
from lit_compress.utils.manifest import write_manifest, write_record

few = settings(
    derandomize=True, database=None, deadline=None, max_examples=10, suppress_health_check=list(HealthCheck)
)  # fmt: skip


CHECKS = {
    "data files": (cases.data_cases, checks.check_data), "configs": (cases.config_cases, checks.check_config),
    "exports": (cases.export_cases, checks.check_folder), "models": (cases.model_cases, checks.check_folder),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHECKS)
def test_damaged(kind):
    """In a process of its own, as a finding may be a hang or gigabytes."""
    strategy, check = CHECKS[kind]

    @few
    @given(strategy)
    def tried(case):
        answer = checks.in_child(check, case)
        assert "found" not in answer, answer["found"]

    tried()


# of what was found: file, place, value, words of the line
SIZES = {
    "layers": ("config.json", ("num_hidden_layers",), 10**9, "num_hidden_layers in its config.json is 1000000000"),
    "labels": ("config.json", ("num_labels",), 10**9, "num_labels in its config.json is 1000000000"),
    "width": ("config.json", ("hidden_size",), 10**5, "allocate"),
    "vocabulary": ("config.json", ("vocab_size",), 10**7, "word_embeddings.weight: copying a param with shape"),
    "rank": ("structure.json", ("*", "rank"), 10**5, "is 100000, beyond the tensors of the file"),
    "sizes of a layer": ("structure.json", ("*", "out_features"), 60_000, "copying a param with shape"),
    "no number": ("structure.json", ("*", "rank"), "x", "cannot load a model"),
    "no object": ("structure.json", (), 3, "structure.json holds no JSON object"),
    "no configuration": ("config.json", (), 0, "its config.json is no JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_sizes_are_compared_before_memory_is_taken(case, tmp_path):
    file, place, value, words = SIZES[case]
    folder = shutil.copytree(checks.OLD / "lpaf" / "export", tmp_path / "export")
    content = json.loads((folder / file).read_text())
    if "*" in place:
        next(spec for spec in content.values() if "rank" in spec)[place[1]] = value
    elif place:
        content[place[0]] = value
    else:
        content = value
    (folder / file).write_text(json.dumps(content))

    def check(case, work):
        start = time.process_time()
        with pytest.raises(UserError, match=r"cannot load a model from") as error:
            load_net(folder)
        assert time.process_time() - start < 5
        return str(error.value)

    answer = checks.in_child(check, None)
    assert words in answer["line"], answer
    assert answer["mib"] < 200


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": {"class_path": 7}}, "model"),
        ({"model": {"class_path": "SVD", "init_args": 3}}, "config: model.init_args is 3"),
        ({"model": "SVD", "trainer": 2}, "config: trainer is 2; give its options as a mapping"),
        ({"model": "SVD", "data": [1]}, "config: data is [1]"),
    ],
)
def test_a_group_of_options_is_a_mapping(values, words, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(json.dumps(values))
    assert words in fails(capsys, "fit", "--config", tmp_path / "mine.yaml")


def test_a_broken_configuration_of_a_model_or_a_report(tmp_path, capsys):
    model = shutil.copytree(checks.OLD / "lpaf" / "dense" / "net", tmp_path / "model")
    (model / "config.json").write_text("0")
    assert "no JSON object" in fails(
        capsys, "validate", model, "--data.task", "sst2", "--data.path", checks.OLD / "data"
    )
    out = shutil.copytree(checks.OLD / "cofi" / "export", tmp_path / "export")
    report = json.loads((out / "report.json").read_text())
    report["config"]["model"]["init_args"]["prune"] = 5
    (out / "report.json").write_text(json.dumps(report))
    assert "has no options in model.prune; it is broken" in fails(capsys, "validate", out)


RECORDS = {"data.json": {"splits": [{"rows": 140}]}, "budget.json": {"asked": "params=5M", "density": 0.25}}


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """A finished run with everything that a run writes, but for events; its config names files relative to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_COMPRESS_CACHE", str(tmp_path / "cache"))
    for name in ("backbone", "data", "lpaf"):
        shutil.copytree(checks.OLD / name, tmp_path / name, ignore=shutil.ignore_patterns("tensorboard"))
    run = tmp_path / "lpaf"
    for folder in (*run.glob("*/net"), run / "export"):
        write_manifest(folder)
    for name, value in RECORDS.items():
        (run / name).write_text(json.dumps(value, indent=2))
    for path in [path for path in run.iterdir() if path.is_file()]:
        write_record(path, path.read_text())
    return run


def answers(run) -> dict[str, object]:
    """Return all that the commands read of a run and its export, in the order of their work."""
    record = Run(run)
    read: dict[str, object] = {"records": [record.config(), record.finished(), record.facts()]}
    read["density"] = record.density("params=5M")
    read["results"] = [[one.report, one.steps, one.seconds, one.budget] for one in read_results(run)[0]]
    read["export"] = read_report(run / "export")
    for name in record.finished():
        net = load_net(record.net(name))
        read[name] = [float(value.double().norm()) for value in net.state_dict().values()]
    target = find_target(str(run), "validate")
    parts = open_target(target, Line("evaluate", options=[("data.path", "data")]))
    read["validate"] = evaluate(load_checked(target, parts, "validation"), parts.data)
    return read


def damaged(good: bytes, kind: str, rng: random.Random) -> bytes:
    """Return bytes with one damage; signs and exponents are in the last bytes of numbers."""
    bad, at = bytearray(good), rng.randrange(len(good))
    if kind == "cut":
        return good[:at]
    if kind == "zero":
        size = rng.choice([1, 4, 512, 4096])
        bad[at : at + size] = bytes(len(bad[at : at + size]))
    elif kind == "byte":
        bad[at] = rng.randrange(256)
    else:
        at = at if kind == "bit" else min(at | 3, len(bad) - 1)
        bad[at] ^= 1 << (7 if kind == "sign" else rng.randrange(6, 8) if kind == "exponent" else rng.randrange(8))
    return bytes(bad)


def test_no_damage_changes_an_answer(whole):
    """120 cuts, flipped bits, signs and exponents, other bytes and zeros, in all files: one line, or no change."""
    expected, seen, findings = answers(whole), {"line": 0, "same": 0}, []
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    weights = [path for path in files if path.suffix == ".safetensors"]
    for seed in range(120):
        rng = random.Random(seed)
        path = files[seed] if seed < len(files) else rng.choice(weights if seed % 2 else files)
        kind = ("cut", "bit", "sign", "exponent", "byte", "zero")[seed % 6]
        good = path.read_bytes()
        path.write_bytes(damaged(good, kind, rng))
        place = f"seed {seed}: {kind} of {path.relative_to(whole)}"
        try:
            read = answers(whole)
            seen["same"] += 1
            if read != expected:
                findings.append(f"{place} is silent")
        except UserError as error:
            seen["line"] += 1
            if len(str(error).splitlines()) != 1:
                findings.append(f"{place}: {error}")
        except Exception as error:
            findings.append(f"{place}: {type(error).__name__}: {error}")
        path.write_bytes(good)
    assert not findings, "\n".join(findings)
    assert seen["line"] > 90, seen
