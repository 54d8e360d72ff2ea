"""A second device for tests and benchmarks on a machine that has only a CPU (see second_device.cpp).

Call :func:`start` in a process of its own before its first backward: autograd counts the devices only once.

>>> second_device.start()
>>> net.to("second:0")
>>> second_device.reset()
>>> step(); second_device.counts()["waits"]
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from lit_compress.utils.cache import build_once, cache_folder, short_hash

NAME = "second"
SOURCE = Path(__file__).parent / "second_device.cpp"
CACHE = cache_folder()  # read now: the tests give the programs that they start a cache of their own
_BUILD = """
import sys
from torch.utils import cpp_extension
name, source, folder = sys.argv[1:]
cpp_extension.load(name, [source], extra_cflags=["-O1"], build_directory=folder, is_python_module=False)
"""


def missing() -> str | None:
    """Return what this machine lacks to compile the device; None if it can be had."""
    if _library().is_file():
        return None
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no C++ compiler (c++, or the variable CXX) to compile the second device"
    if shutil.which("ninja", path=_path()) is None:
        return "no ninja to compile the second device"
    return None


def build() -> Path:
    """Compile the device into the cache folder, once for a version of PyTorch; return the library."""
    folder = _library().parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process compiles it: wait
        build_once(folder, _compile)
    return _library()


def start(library: str | Path | None = None) -> None:
    """Make ``torch.device("second")`` this process's accelerator, which ``--device second`` names.

    Args:
        library: of :func:`build` in another process; by default this process calls it.
    """
    if hasattr(torch, NAME):
        return
    library = library or build()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.ops.load_library(library)
    torch.ops.second_device.start()
    torch.utils.generate_methods_for_privateuse1_backend()
    # CUDA's parameters stay the same objects when they move; this lets these do so
    torch.__future__.set_swap_module_params_on_conversion(True)


def counts() -> dict[str, int]:
    """Return what happened since :func:`reset`.

    Returns:
        ``waits``: times the host waited (``item``, boolean indexing, copies to it, ``synchronize``, ...); ``to_host``
        and ``to_device``: copies, ``pageable``: copies to the device that were not pinned and non-blocking;
        ``to_host_bytes``, ``to_device_bytes``; ``calls``: operators that ran on the device, without views.
    """
    return dict(torch.ops.second_device.counts())


def reset(trace: bool = False) -> None:
    """Set all counts to 0; with ``trace`` also count by operator, for :func:`operators` and :func:`wait_reasons`."""
    torch.ops.second_device.reset(trace)


def operators() -> dict[str, int]:
    """Return the calls by operator since ``reset(trace=True)``."""
    return dict(torch.ops.second_device.operators())


def wait_reasons() -> dict[str, int]:
    """Return the waits by reason since ``reset(trace=True)``."""
    return dict(torch.ops.second_device.wait_reasons())


@contextmanager
def without_float64() -> Iterator[None]:
    """Refuse float64 tensors on the device, as MPS does."""
    torch.ops.second_device.refuse_float64(True)
    try:
        yield
    finally:
        torch.ops.second_device.refuse_float64(False)


@contextmanager
def with_capacity(size: int) -> Iterator[None]:
    """Give the device ``size`` bytes of memory in place of 16 GiB."""
    torch.ops.second_device.set_capacity(size)
    try:
        yield
    finally:
        torch.ops.second_device.set_capacity(1 << 34)


def _library() -> Path:
    return CACHE / "second_device" / short_hash(torch.__version__, SOURCE.read_text()) / "second_device.so"


def _path() -> str:
    """Return PATH with this environment's programs, e.g. ninja, also where it is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _compile(folder: Path) -> None:
    """Compile in another process: the library is loaded from where it stays."""
    command = [sys.executable, "-c", _BUILD, "second_device", str(SOURCE), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": _path()})
    if done.returncode:
        raise RuntimeError(f"the second device could not be compiled:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    for path in folder.iterdir():
        if path.suffix != ".so":
            path.unlink()


def _module() -> types.ModuleType:
    """Return ``torch.second``: what PyTorch asks of an accelerator in Python."""
    module = types.ModuleType(f"torch.{NAME}")
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "_is_in_bad_fork": False, "device_count": 1,
        "current_device": 0, "set_device": None, "synchronize": None, "empty_cache": None,
        "manual_seed": None, "manual_seed_all": None,  # its generator is the CPU's
        "get_rng_state": torch.empty(0, dtype=torch.uint8), "set_rng_state": None,
        "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer, **__: answer)
    module.device = nullcontext  # type: ignore[attr-defined]
    return module
