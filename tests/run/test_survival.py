"""Kills, full disks, torn files and second processes: one line, nothing complete is lost, the run goes on."""

from __future__ import annotations

import os
import signal

import processes
import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file

from benchmarks.reliability.events import Refuse
from lit_compress.__main__ import main
from lit_compress.run.folder import Run, begin_work
from lit_compress.run.runner import _marked
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, write_failure


def args(short_run, folder, *more):
    return ["fit", "--model", "SVD", *short_run, "--run_dir", str(folder), "--trainer.logger", "false", *more]


class Terminate(Callback):
    """End this process as a scheduler does, in the middle of an epoch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4 and trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_terminated_run_writes_where_to_go_on(short_run, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args(short_run, tmp_path / "run", "--trainer.callbacks+=test_survival.Terminate"))
    assert stop.value.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; the same command with --ckpt_path last continues" in capsys.readouterr().err
    checkpoint = torch.load(tmp_path / "run" / "dense" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 13 + 5  # checkpoint_every is 500


class TerminateAtTheEnd(Callback):
    """End this process when a stage has no further step."""

    def on_train_end(self, trainer, pl_module):
        signal.raise_signal(signal.SIGTERM)


def test_a_run_that_is_terminated_at_the_end_of_a_stage_begins_no_other(short_run, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args(short_run, tmp_path / "run", "--trainer.callbacks+=test_survival.TerminateAtTheEnd"))
    assert stop.value.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in capsys.readouterr().err
    assert [*Run(tmp_path / "run").finished()] == ["dense"] and not (tmp_path / "run" / "retrain").exists()


class Interrupt(Callback):
    """Press Ctrl-C at some steps, of whatever stage; each is there once."""

    steps: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step in self.steps:
            self.steps.remove(trainer.global_step)
            signal.raise_signal(signal.SIGINT)  # at once, in no finalizer, where Python would ignore it


@pytest.fixture
def keyboard():
    """Let Ctrl-C reach Python; a shell gives processes in the background a handler that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_ctrl_c_in_every_stage_changes_nothing(short_run, tmp_path, capsys, monkeypatch, keyboard):
    monkeypatch.setattr(Interrupt, "steps", [3, 17])
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
    more = ["--model.density", "0.5", "--ckpt_path", "last", "--checkpoint_every", "1"]
    command = args(short_run, tmp_path / "run", *more, "--trainer.callbacks+=test_survival.Interrupt")
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            main(command)
        assert stop.value.code == 130
        assert "stopped by Ctrl-C; the same command with --ckpt_path last continues" in capsys.readouterr().err
    main(command)
    assert Interrupt.steps == []
    main(args(short_run, tmp_path / "whole", *more))
    found, expected = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("run", "whole"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("end", [0, 100, 3000, None])
def test_a_torn_checkpoint_is_one_line(end, tmp_path):
    """One that ends early; or it has its length, and a block was never written."""
    mark, last = {"method": "SVD", "stage": "dense"}, tmp_path / "last.ckpt"
    torch.save({"global_step": 2, "weights": torch.rand(1000), "lit_compress": mark}, last)
    assert _marked(last, "SVD", "dense")[1] == mark | {"step": 2}
    content = last.read_bytes()
    last.write_bytes(content[:2048] + bytes(512) + content[2560:] if end is None else content[:end])
    with pytest.raises(
        UserError, match=r"last\.ckpt' is not a readable checkpoint .*; remove it to start its stage again$"
    ):
        _marked(last, "SVD", "dense")


def _hold(folder, ready, done):
    with begin_work("--distil", folder, "first"):
        ready.set()
        done.wait(30)


@pytest.mark.slow
def test_two_processes_do_not_work_on_one_run(tmp_path):
    ready, done, folder = processes._CONTEXT.Event(), processes._CONTEXT.Event(), tmp_path / "run"
    (folder / ".settings.json.7.tmp").mkdir(parents=True)  # of a process that was killed when it began
    holder = processes._CONTEXT.Process(target=_hold, args=(folder, ready, done))
    holder.start()
    assert ready.wait(30)
    claims = Run(folder).claim(), begin_work("--distil", folder, "other")
    for option, claim in zip(("run_dir", "--distil"), claims, strict=True):
        with pytest.raises(UserError, match=f"{option}: .* is being worked on by process {holder.pid}"), claim:
            pass
    holder.kill()  # however it ends, the folder is free
    holder.join()
    assert "first" in (folder / "settings.json").read_text()
    with begin_work("--distil", folder, "other"):
        pass


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"name": "dense"}', "\udcff", "[{}]"])
@pytest.mark.parametrize("name", ["stages.json", "data.json", "budget.json"])
def test_a_broken_record_is_one_line(name, content, tmp_path):
    run = Run(tmp_path)
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    read = {"stages.json": run.finished, "data.json": run.facts, "budget.json": lambda: run.density("size=1MB")}[name]
    if name != "stages.json" and content == '{"name": "dense"}':
        read()
        return
    with pytest.raises(UserError, match="is broken") as error:
        read()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "a: 1", "model: {}", "model: {class_path: 7}", "[", "- 1"])
def test_a_broken_config_is_one_line(content, tmp_path):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml"):
        Run(tmp_path).config()


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_never_without_its_name(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr("lit_compress.utils.files._exchange", lambda one, other: False)
    folder, seen = tmp_path / "net", []
    for text in ("first", "second"):
        with atomic_folder(folder) as temporary:
            (temporary / "file").write_text(text)
            seen.append(folder.exists())
    assert seen == [False, True] and (folder / "file").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["net"]


# in the order of a run: each process gets as far as the next of them; benchmarks/reliability/faults.py has all
WRITES = [
    ("open", ".lock"), ("rename", "config.yaml"), ("write", "dense/net/model.safetensors"), ("rename", "stages.json"),
    ("rename", "retrain/last.ckpt"), ("remove", "retrain/best.ckpt"), ("write", "export/model.safetensors"),
    ("rename", "report.json"),
]  # fmt: skip


@pytest.mark.slow
def test_a_fault_at_any_write_is_one_line_and_the_run_goes_on(short_run, tmp_path):
    straight, met, errors = tmp_path / "straight", tmp_path / "met", tmp_path / "errors"
    main(args(short_run, straight, "--model.retrain.epochs", "0"))
    more = ["--checkpoint_every", "3", "--ckpt_path", "last", "--model.teacher", str(straight / "dense" / "net"),
            "--data.train_examples", "60", "--model.retrain.epochs", "1"]  # fmt: skip
    met.mkdir()
    (met / ".config.yaml.7.tmp").write_text("model:")  # of a process that was killed at the beginning
    for number, at in enumerate(WRITES):
        act = Refuse(at, ("ENOSPC", "EROFS", "EIO")[number % 3])
        process = processes.fork(args(short_run, met, *more), errors, met=(met, act))
        process.join()
        said = errors.read_text()
        assert process.exitcode == 2 and "Traceback" not in said, (at, said[-3000:])
        line = said.splitlines()[-1]
        assert line.startswith("error: ") and "finished work is kept" in line, (at, line)
        run = Run(met)
        assert not run.started or (run.config() and run.facts())
        assert len(run.finished()) == sum((met / name / "net").exists() for name in ("dense", "retrain")) or at[1] in (
            "dense/net", "stages.json")  # fmt: skip
        assert at[1] == ".lock" or not [path for path in met.rglob(".*") if path.name != ".lock"], at
    processes.finish(processes.fork(args(short_run, met, *more), errors), errors)
    whole = tmp_path / "whole"
    processes.finish(processes.fork(args(short_run, whole, *more), errors), errors)
    assert (whole / "export" / "model.safetensors").read_bytes() == (met / "export" / "model.safetensors").read_bytes()


def test_other_errors_are_no_full_disk():
    assert write_failure(RuntimeError("shapes differ")) is None
    assert write_failure(FileNotFoundError(2, "No such file or directory", "x")) is None
    assert write_failure(ValueError("No space left on device (os error 28)")) == "No space left on device"
    assert write_failure(RuntimeError("basic_ios::clear: iostream error")) == "a program could not be written whole"
    copied = OSError(28, "No space left on device", "from", None, "to")
    assert write_failure(copied) == "No space left on device: to"
