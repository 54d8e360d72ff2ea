"""``python -m lit_compress`` in processes of its own: started anew, or forked from one that has imported everything.

Starting one takes seconds of imports, a fork milliseconds. What only a new process can show (other hash seeds,
Lightning's own launcher) is tested with :func:`start`, what is the same in both with :func:`fork`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import second_device  # now: a session of tests has a cache of its own, in which it would be compiled each time
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from quick import quick_runs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reliability.events import Act, Watch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "datasets",
        "lit_compress.cli.commands",
        "lit_compress.methods",
        "processes",
        "torch.distributed.fsdp",
        "torch.utils.flop_counter",
        "torch.utils.tensorboard",
        "transformers.models.auto.modeling_auto",
        "transformers.models.bert.modeling_bert",
        "warm",
    ]
)


def start(args: list[str], errors: Path) -> subprocess.Popen:
    """Start ``python -m lit_compress ARGS``; what it writes to stderr goes to the file ``errors``."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # callbacks of this file
    with errors.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "lit_compress", *args], stdout=subprocess.DEVNULL, stderr=stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip


def fork(
    args: list[str], errors: Path, environment: dict[str, str] | None = None, met: tuple[Path, Act] | None = None
) -> BaseProcess:
    """Run the command in a forked process, but for the reload of its export in yet another one.

    ``met`` is what happens to it at an event, and the folder whose files count (benchmarks/reliability/events.py).
    ``SECOND_DEVICE`` in ``environment``, the library of second_device/, gives it that device, without float64.
    """
    process = _CONTEXT.Process(target=_run, args=(args, errors, dict(os.environ) | (environment or {}), met))
    process.start()
    return process


def _run(args: list[str], errors: Path, environment: dict[str, str], met: tuple[Path, Act] | None = None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull, "w") as out, errors.open("w") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    import torch

    # by which Lightning starts the other processes of a run
    sys.modules["__main__"].__spec__ = find_spec("lit_compress.__main__")
    sys.argv = ["-m", *args]
    if "SECOND_DEVICE" in environment:
        second_device.start(environment["SECOND_DEVICE"])
        torch.ops.second_device.refuse_float64(True)
    from lit_compress.__main__ import main
    from lit_compress.export import folder

    for name in ("RANK", "SLURM_PROCID"):
        if name in environment:
            vars(rank_zero_only)["rank"] = int(environment[name])
    torch.set_num_threads(1)
    folder.check_export = lambda *_: 0.0
    if met is not None:
        Watch(*met)
    with quick_runs():
        main(args)


def second_device_library() -> str:
    """Return the library of the second device, compiled at its first use; skip where that cannot be."""
    if reason := second_device.missing():
        pytest.skip(reason)
    return str(second_device.build())


def on_second_device(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)`` of a forked process that has the second device; skip where it cannot be compiled.

    Autograd counts the devices at a process's first backward, so the test's own process cannot have it. ``function``
    is one of a module of tests; its answer is pickled, so that tensors in it lie on the CPU.
    """
    library = second_device_library()
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_call, args=(theirs, function, args, dict(os.environ), library))
    process.start()
    theirs.close()
    try:
        answer, error = pickle.loads(ours.recv_bytes())  # tensors as bytes: the process that made them is gone
    except EOFError:
        process.join()
        raise AssertionError(f"the process with the second device ended with {process.exitcode}") from None
    process.join()
    if error:
        pytest.fail(error, pytrace=False)
    return answer


def with_second_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a forked process that has the second device."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        if hasattr(torch, second_device.NAME):
            test(**fixtures)
        else:
            on_second_device(functools.partial(run, **fixtures))

    return run


def _call(
    pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], library: str
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    from lit_compress.export import folder

    folder.check_export = lambda *_: 0.0
    try:
        second_device.start(library)
        with quick_runs():
            pipe.send_bytes(pickle.dumps((function(*args), None)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))


def _code(process: subprocess.Popen | BaseProcess) -> int | None:
    """Wait for a process and return its exit code."""
    if isinstance(process, subprocess.Popen):
        return process.wait()
    process.join()
    return process.exitcode


def finish(process: subprocess.Popen | BaseProcess, errors: Path) -> None:
    """Wait for a process; it must end well."""
    assert _code(process) == 0, errors.read_text()[-3000:]


def torchrun(rank: int, ranks: int, port: int) -> dict[str, object]:
    """Return what torchrun tells a process of one machine."""
    return {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip


def slurm(rank: int, ranks: int, port: int) -> dict[str, object]:
    """Return what srun tells a process of one machine."""
    return {
        "SLURM_JOB_ID": 1, "SLURM_JOB_NAME": "test", "SLURM_NTASKS": ranks, "SLURM_NTASKS_PER_NODE": ranks,
        "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_NNODES": 1,
        "SLURM_NODELIST": "localhost", "MASTER_PORT": port,
    }  # fmt: skip


def fork_ranks(
    args: list[str], errors: Path, ranks: int = 2, told: Callable[[int, int, int], dict[str, object]] = torchrun
) -> None:
    """Run the command on several processes, told of each other as torchrun does, or as ``told`` says.

    Lightning reads a process's rank when it is imported. A forked one has imported it before it has a rank, so it is
    set here, as in a process that was started.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [errors.with_suffix(f".{rank}") for rank in range(ranks)]
    processes = []
    for rank, file in enumerate(files):
        environment = {name: str(value) for name, value in told(rank, ranks, port).items()}
        processes.append(fork(args, file, environment))
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):  # the others would wait for it
            time.sleep(1)
            for process in processes:
                process.kill()
        time.sleep(0.05)
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    assert not any(codes), "\n".join(f"rank {i}, {codes[i]}: {f.read_text()[-2000:]}" for i, f in enumerate(files))


def on_ranks(function: Callable[[int, str], None], folder: Path, ranks: int = 2) -> None:
    """Call ``function(rank, folder)`` in forked processes of one default group; every one must end well."""
    children = [_CONTEXT.Process(target=_of_group, args=(function, rank, ranks, str(folder))) for rank in range(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0


def _of_group(function: Callable[[int, str], None], rank: int, ranks: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    function(rank, folder)


def kill_when(process: subprocess.Popen | BaseProcess, errors: Path, there: Path) -> None:
    """Kill the process hard once the file is there."""
    deadline = time.time() + 120
    while not there.exists():
        code = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
        assert code is None, errors.read_text()[-3000:]
        assert time.time() < deadline
        time.sleep(0.005)
    process.kill()
    assert _code(process) == -signal.SIGKILL


class KeepBest(Callback):
    """Leave a copy of the best checkpoint of every stage, ``kept.ckpt``, in its folder."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            shutil.copy(folder / "best.ckpt", folder / "kept.ckpt")


class KeepSteps(Callback):
    """Note every step's loss as it is logged, and the gates after it, ``steps<n>.pt`` in the stage's folder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.seen: list[tuple[float, dict[str, torch.Tensor]]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, *_) -> None:
        loss, gates = float(trainer.callback_metrics["train/loss"]), getattr(pl_module.stage, "log_alphas", {})
        self.seen.append((loss, {name: value.detach().clone() for name, value in gates.items()}))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(self.seen, Path(trainer.default_root_dir) / f"steps{trainer.global_rank}.pt")
