"""Every shipped method through the same checks. A new method joins by its config alone."""

from __future__ import annotations

import copy
import json
import pickle
import random
import signal
from pathlib import Path

import processes
import pytest
import torch
from contract_cases import (
    CASES,
    CLASSES,
    COMPARED,
    GIVEN,
    LEAN,
    METHODS,
    STEPS,
    TEACHES,
    UNIT,
    WHOLE,
    class_of,
    options,
)
from golden import make
from helpers import evaluated, logits
from safetensors.torch import load_file
from tiny import make_net

from benchmarks.device.counting import FILE
from benchmarks.reliability.events import Kill
from lit_compress import methods
from lit_compress.__main__ import main
from lit_compress.export.check import check_export
from lit_compress.export.fuse import fuse
from lit_compress.methods.block_movement import BlockMovementSettings
from lit_compress.models.storage import load_net
from lit_compress.models.surgery import describe
from lit_compress.numerics.masks import keep_count

OF_CLASSES = [case for case in CASES if not case.marks and str(case.id) in CLASSES]
ON_TWO = [name for name in CLASSES if name not in COMPARED]


@pytest.fixture(scope="module")
def teacher(short_run, tmp_path_factory):
    """A net to begin with where the dense stage is not what is looked at."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    main(["fit", *options(TEACHES[0], short_run), *TEACHES[1], "--run_dir", str(folder)])
    return folder / "dense" / "net"


@pytest.fixture(scope="module", params=CASES)
def run(request, short_run, tmp_path_factory):
    """One finished run of a method at density 0.5: its name and its folder. All but one begin with the teacher."""
    method, variant = request.param
    folder, args = tmp_path_factory.mktemp(method) / "run", options(method, short_run, variant)
    if variant or method != WHOLE:
        args += ["--model.teacher", str(request.getfixturevalue("teacher"))]
    with pytest.MonkeyPatch.context() as patch:  # best.ckpt is compared with the export
        patch.setattr("lit_compress.run.folder.Run.remove_checkpoints", lambda run, stage: None)
        main(["fit", *args, *STEPS, "--run_dir", str(folder)])
    return method, folder


@pytest.mark.skipif(GIVEN is not None, reason="one method of another package is given")
def test_every_method_is_found():
    assert set(METHODS) == set(methods.__all__) - {"Method"}


CHECKED: list[tuple[dict[str, object], str, list[str]]] = [({"density": 0.5}, "bert", METHODS)]
if not GIVEN:
    CHECKED += [({"rank": 3}, "bert", ["LPAF", "SVD"]), ({"density": 0.8}, "opt", ["SliceGPT"])]


@pytest.mark.parametrize(
    ("method", "size", "family"), [(name, size, family) for size, family, names in CHECKED for name in names]
)
def test_a_check_changes_nothing(method, size, family):
    """Whatever is found in it, it is said of the settings alone: stages are as they were, also where data decide."""
    settings = {"prune": BlockMovementSettings(block=8)} if method == "BlockMovement" else {}
    module, net = class_of(method)(task="sst2", backbone="unused", **size, **settings), make_net(family).to("meta")
    for stage in module.stages():
        before = pickle.dumps(vars(stage))
        stage.check(net)
        stage.outline(copy.deepcopy(net))
        assert pickle.dumps(vars(stage)) == before


GOLDEN = make.read("contract")


@pytest.mark.skipif(GIVEN is not None, reason="one method of another package is given")
def test_exports_are_as_they_were(run, request):
    """In every bit on the machine of the file, in shapes, structure, sums and norms elsewhere."""
    name, record = " ".join(filter(None, request.node.callspec.params["run"])), make.fingerprint(run[1] / "export")
    assert make.difference(GOLDEN["cases"][name], record, make.is_exact(GOLDEN, name)) is None


def test_stages_are_finished_and_finite(run):
    _, folder = run
    records = json.loads((folder / "stages.json").read_text())
    assert len(records) > 1
    for record in records:
        assert 0.3 <= record["metric"]["val/accuracy"] <= 1
        if record["name"] == "dense" and not (folder / "dense" / "best.ckpt").exists():
            continue  # the teacher's
        checkpoint = torch.load(folder / record["name"] / "best.ckpt", weights_only=True)
        assert all(t.isfinite().all() or (t == -torch.inf).any() for t in checkpoint["state_dict"].values())
        assert checkpoint["lit_compress"]["stage"] == record["name"]


def test_budget_is_reached_in_the_exported_file(run):
    method, folder = run
    report = json.loads((folder / "report.json").read_text())
    card = (folder / "export" / "README.md").read_text()
    found, dense = report["compressed"], report["dense"]
    assert ("stored as zeros" in card) == (found["density"] < found["stored"])
    stores_zeros = class_of(method)(task="sst2", backbone="unused").stores_zeros
    assert not stores_zeros or found["stored"] == 1
    off = max(0.01 * 0.5, UNIT.get(method, 0) / dense["params"]["sites"])
    kept = found["density" if stores_zeros else "stored"]
    assert 0.5 - off <= kept <= 0.5  # what is asked is what is stored
    tensors = load_file(folder / "export" / "model.safetensors")
    sites = [v for k, v in tensors.items() if "encoder.layer" in k and v.ndim == 2]
    if stores_zeros:  # nothing is saved, and the report says so
        kept = sum(int(torch.count_nonzero(v)) for v in sites)
        assert kept == round(found["density"] * dense["params"]["sites"])
        assert keep_count(0.5, dense["params"]["sites"]) == kept
        assert found["params"] == dense["params"] and found["flops"] == dense["flops"]
        assert sum(v.numel() for v in tensors.values()) == found["params"]["total"]
        size = (folder / "export" / "model.safetensors").stat().st_size
        assert found["bytes"] == size == pytest.approx(dense["bytes"], rel=1e-3)
        return
    stored = sum(v.numel() for v in sites)
    assert stored == found["params"]["sites"] == round(found["stored"] * dense["params"]["sites"])
    dead = found["stored"] - found["density"]  # neurons of LPAF whose weights and bias are all 0: they never learn
    assert dead == 0 or (method.startswith("LPAF") and 0 < dead < 0.05)
    assert sum(v.numel() for v in tensors.values() if v.is_floating_point()) == found["params"]["total"]
    assert found["bytes"] == (folder / "export" / "model.safetensors").stat().st_size < dense["bytes"]
    assert found["flops"] < dense["flops"]


def test_report_has_every_field(run):
    method, folder = run
    report = json.loads((folder / "report.json").read_text())
    assert report == json.loads((folder / "export" / "report.json").read_text())
    assert {"task", "method", "metric", "dense", "compressed", "ratios", "config", "versions", "hardware",
            "stages"} <= report.keys()  # fmt: skip
    assert report["method"] == class_of(method).__name__
    assert report["metric"] == {"name": "accuracy", "mode": "max", "rows": 40, "available": 40}
    for entry in report["stages"].values():
        assert entry["interval"][0] < entry["metric"] < entry["interval"][1]
        assert {"metric", "density", "params", "flops", "bytes", "latency_ms"} <= entry.keys()
        assert set(entry["params"]) == {"sites", "non_embedding", "total"}
        assert set(entry["latency_ms"]) == {"median", "p10", "p90", "batch", "length", "threads"}


def test_report_says_how_it_was_calibrated(run):
    """Also after a run in which the stage was continued, since checkpoints have it."""
    _, folder = run
    calibration = json.loads((folder / "report.json").read_text()).get("calibration")
    config = json.loads((folder / "report.json").read_text())["config"]["model"]["init_args"]
    settings = config.get("retrain", {})
    whole = "calibration_examples" in settings and settings["weighting"] in ("kfac", "inputs")
    whole |= config.get("prune", {}).get("choice") == "measured"
    assert bool(calibration) == whole
    if whole:
        assert calibration["examples"] > 0


def test_fuse_equals_training_form(run):
    """The best checkpoint of the last stage, in training form, gives the exported logits."""
    method, folder = run
    last = json.loads((folder / "stages.json").read_text())[-1]["name"]
    checkpoint = torch.load(folder / last / "best.ckpt", weights_only=True)
    module = built(method, folder, last, mark=checkpoint["lit_compress"])
    module.load_state_dict(checkpoint["state_dict"])
    expected = evaluated(module.net)
    module.stage.deploy(module.net)
    assert torch.allclose(logits(fuse(module.net)), expected, atol=1e-6)
    assert torch.allclose(logits(load_net(folder / "export")), expected, atol=1e-6)


def built(method, folder, stage_name, density=0.5, mark=None):
    """Build the net of a stage as its fit does, from the files of a run and the ``mark`` of a checkpoint."""
    module = class_of(method)(task="sst2", backbone="unused", density=density)
    names = [s.name for s in module.stages()]
    at = names.index(stage_name)
    stage, previous = module.stages()[at], folder / names[at - 1] / "net"
    module.prepare(stage, 0, previous, lambda: load_net(folder / "dense" / "net"), mark or {})
    module.configure_model()
    stage.set_total_steps(100)
    return module


def test_identity_at_density_one(run):
    """No stage changes the net before its first step when nothing is to be removed."""
    method, folder = run
    for record in json.loads((folder / "stages.json").read_text())[1:]:
        module = built(method, folder, record["name"], density=1.0)
        assert torch.equal(evaluated(module.net), logits(load_net(module._previous)))


def test_export_loads_without_the_package(run, tmp_path):
    """check_export is what the export itself relies on: it must also notice a wrong folder."""
    _, folder = run
    net = load_net(folder / "export")
    assert check_export(net, folder / "export") <= 1e-5
    names = sorted(p.name for p in (folder / "export").iterdir())
    assert {"config.json", "model.safetensors", "structure.json", "report.json", "README.md",
            "tokenizer.json"} <= set(names)  # fmt: skip
    code, report = folder / "export" / "modeling_compressed.py", json.loads((folder / "report.json").read_text())
    assert code.exists() == bool(describe(net)) == report["refuses"] != report["ordinary"]
    source = code.read_text() if code.exists() else ""
    assert "import lit_compress" not in source and "from lit_compress" not in source


def on_second_device(args: list[str], errors: Path, killed_at: Path | None = None) -> None:
    """Run ``fit`` on the second device, which has no float64; once it is killed when a file is there."""
    device = {"SECOND_DEVICE": processes.second_device_library()}
    args = ["fit", *args, *LEAN, "--device", "second", "--ckpt_path", "last"]
    if killed_at:
        processes.kill_when(processes.fork(args, errors, device), errors, killed_at)
    processes.finish(processes.fork(args, errors, device), errors)


def check_waits(path: Path) -> None:
    """A step that neither ranks nor saves waits for whether gradients are finite, and once per forward for the mask.

    It copies its batch's columns.
    """
    steps = json.loads(path.read_text())
    quarter = [sorted(step[name] for step in steps)[len(steps) // 4] for name in ("waits", "to_host", "to_device")]
    forwards = 1 + any(step["teacher"] for step in steps)
    assert quarter == [1 + forwards, 0, 5], f"{path.parent.name}: {quarter}"


def difference(first: Path, second: Path) -> float:
    """Return the largest difference of two exports' logits; their tensors must have the same names and shapes."""
    nets = [load_net(folder / "export") for folder in (first, second)]
    assert len({str({k: v.shape for k, v in net.state_dict().items()}) for net in nets}) == 1
    one, other = map(logits, nets)
    return float((one - other).abs().max())


@pytest.mark.parametrize("run", OF_CLASSES, indirect=True)
def test_second_device_equals_the_cpu(run, short_run, tmp_path):
    """All stages, the export and the report, on a device that refuses CPU tensors and float64; SP3 after a kill, too.

    A teacher takes the place of the dense stage except in one method.
    """
    method, straight = run
    args = options(method, short_run)
    if method != WHOLE:
        args += ["--model.teacher", str(straight / "dense" / "net")]
    else:  # one batch of twice the size draws other dropout than two forwards
        args += ["--model.retrain.consistency", "0"]
        straight = tmp_path / "straight"
        main(["fit", *args, *STEPS, *LEAN, "--run_dir", str(straight)])
    folder, killed = tmp_path / "run", tmp_path / "killed"
    counted = "--trainer.callbacks+=benchmarks.device.counting.Counts"
    on_second_device([*args, *STEPS, counted, "--run_dir", str(folder)], tmp_path / "errors")
    assert difference(straight, folder) <= 1e-5
    if method != WHOLE:  # test_steps_on_a_device.py looks at its steps
        for path in folder.glob(f"*/{FILE}"):
            check_waits(path)
    records = [json.loads((f / "stages.json").read_text()) for f in (straight, folder)]
    assert [r["metric"] for r in records[0]] == [r["metric"] for r in records[1]]
    assert records[1][-1]["gpu_peak_mib"] > 0  # it was there
    if method == "SP3":
        on_second_device([*args, *STEPS, "--run_dir", str(killed)], tmp_path / "errors", killed / "prune" / "last.ckpt")
        assert difference(folder, killed) == 0


# over 10 s: a process for every kill and its continuation
@pytest.mark.parametrize("run", OF_CLASSES, indirect=True)
def test_killed_and_continued_equals_uninterrupted(run, short_run, tmp_path):
    """kill -9 in mid-epoch, between stages, and at an event drawn by the method's name: a file, a step, a
    batch of training, of calibration, of evaluation. Through the command line; the exports are bit for bit the same.

    A teacher takes the place of the dense stage, with the same export; one method goes through that stage, too.
    """
    method, straight = run
    killed, errors = tmp_path / "killed", tmp_path / "errors"
    args = ["fit", *options(method, short_run), *STEPS, "--run_dir", str(killed), "--ckpt_path", "last"]
    args += [] if method == WHOLE else [*LEAN, "--model.teacher", str(straight / "dense" / "net")]
    names = [s["name"] for s in json.loads((straight / "stages.json").read_text())]
    if method == WHOLE:
        processes.kill_when(processes.fork(args, errors), errors, killed / "dense" / "last.ckpt")
        assert not (killed / "stages.json").exists()
        processes.kill_when(processes.fork(args, errors), errors, killed / "stages.json")  # between stages
    for number, name in enumerate(names[1:], start=1):
        processes.kill_when(processes.fork(args, errors), errors, killed / name / "last.ckpt")  # in mid-epoch
        assert len(json.loads((killed / "stages.json").read_text())) == number
    rng = random.Random(method)
    act = Kill(rng.randrange(80), torn=rng.random() < 0.5)
    process = processes.fork(args, errors, met=(killed, act))
    process.join()
    assert process.exitcode == -signal.SIGKILL, (act.at, errors.read_text()[-3000:])
    # once in a new process: it has another hash seed than the forks
    processes.finish((processes.start if method == WHOLE else processes.fork)(args, errors), errors)
    assert (straight / "dense" / "best.ckpt").exists() == (method == WHOLE)
    assert not list(tmp_path.rglob("*.tmp"))
    first, second = (load_file(f / "export" / "model.safetensors") for f in (straight, killed))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)
    records = [json.loads((f / "stages.json").read_text()) for f in (straight, killed)]
    assert [r["metric"] for r in records[0]] == [r["metric"] for r in records[1]]


def check_budget(method: str, folder: Path) -> None:
    """A run of several processes keeps what one keeps."""
    report = json.loads((folder / "report.json").read_text())
    assert 0.44 < report["compressed"]["density"] <= 0.5
    if "prune" in report["stages"]:
        assert report["stages"]["prune"]["density"] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(("method", "strategy"), [(name, ("ddp", "fsdp2")[i % 2]) for i, name in enumerate(ON_TWO)])
def test_two_processes(method, strategy, teacher, short_run, tmp_path):
    """DDP and FSDP2 on two processes, as torchrun starts them, or Slurm: the whole job, budget met exactly."""
    args = [*options(method, [*short_run, "--model.retrain.epochs", "1"]), "--run_dir", str(tmp_path / "run"),
            "--trainer.strategy", strategy, "--trainer.devices", "2"]  # fmt: skip
    told = {"told": processes.slurm} if method == ON_TWO[0] else {}
    processes.fork_ranks(["fit", *args, *LEAN, "--model.teacher", str(teacher)], tmp_path / "errors", **told)
    check_budget(method, tmp_path / "run")


@pytest.mark.skipif(GIVEN is not None, reason="one method of another package is given")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_listen_to_the_layers(strategy, teacher, short_run, tmp_path):
    """Hidden states of two forwards and of a teacher that is neither wrapped nor sharded nor saved."""
    short = ["--model.teacher", str(teacher), "--model.prune.epochs", "1", "--model.retrain.epochs", "1", *LEAN]
    args = [*options("LPAF", short_run), *short, "--model.distillation.alpha_layers", "5",
            "--run_dir", str(tmp_path / "run"), "--trainer.strategy", strategy, "--trainer.devices", "2",
            "--trainer.callbacks+=processes.KeepBest"]  # fmt: skip
    if strategy == "ddp":  # by Lightning's launcher, whose other process imports everything: over 10 s
        processes.finish(processes.fork(["fit", *args], tmp_path / "errors"), tmp_path / "errors")
    else:
        processes.fork_ranks(["fit", *args], tmp_path / "errors")
    checkpoint = torch.load(tmp_path / "run" / "retrain" / "kept.ckpt", weights_only=True)
    saved = {name for name in checkpoint["state_dict"] if not name.startswith("val_metrics.")}
    assert saved == {f"net.{name}" for name in load_file(tmp_path / "run" / "export" / "model.safetensors")}
    check_budget("LPAF", tmp_path / "run")
