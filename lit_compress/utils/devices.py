"""The device of this process: the one that the user named, else PyTorch's accelerator, else the CPU."""

from __future__ import annotations

from math import inf
from typing import Any, TypeVar

import torch
from torch import nn

from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note

Net = TypeVar("Net", bound=nn.Module)
_ENOUGH = 0.8  # share of the free memory that one user of it may take
_asked = "auto"  # its name


def use_device(name: str) -> None:
    """Make the device of ``name``, which trainer.accelerator was given, the one of this process, without a check."""
    global _asked
    _asked = name


def current_device() -> torch.device:
    """Return the device of models and batches: as :func:`use_device` was told; raises as :func:`find_device`."""
    return find_device(_asked)


def find_device(name: str, option: str = "trainer.accelerator") -> torch.device:
    """Return the device of a name: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, ``xpu``, ...

    ``gpu`` is the accelerator, ``auto`` the accelerator or, without one, the CPU.

    Raises:
        UserError: this machine, or this build of PyTorch, has no such device; begins with ``option``.
    """
    accelerator, here = torch.accelerator.current_accelerator(check_available=True), "cpu"
    if name in ("cpu", "cpu:0") or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    if accelerator is not None:
        kind, _, number = name.partition(":")
        if name in ("auto", "gpu", accelerator.type):
            return accelerator
        count = torch.accelerator.device_count()
        if kind in ("gpu", accelerator.type) and number in map(str, range(count)):
            return torch.device(accelerator.type, int(number))
        here += f", {accelerator.type}" + (f", {accelerator.type}:0 to :{count - 1}" if count > 1 else "")
    raise UserError(f"{option}: '{name}' is not on this machine, or PyTorch was built without it; valid: auto, {here}")


def place_of_sums(device: torch.device | str) -> torch.device:
    """Return the place of float64 sums of ``device``'s results: there, or the CPU as Apple's have no float64."""
    try:
        return torch.empty(0, dtype=torch.float64, device=device).device
    except (TypeError, RuntimeError):
        return torch.device("cpu")


def double(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float64, on its device, or on the CPU if that has no float64."""
    return x.to(place_of_sums(x.device)).double()


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done its work; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def move(net: Net, place: torch.device | torch.dtype | str) -> Net:
    """Move a model to a device, or give it a dtype, and return it: transformers hides the type of its own ``to``."""
    return net.to(place)


def to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a batch on ``device``; pinned tensors are copied while the host continues."""
    return {name: column.to(device, non_blocking=True) for name, column in batch.items()}


def pins_memory() -> bool:
    """Return whether batches are to be pinned: on a device to which a copy from pinned memory needs no wait."""
    return current_device().type not in ("cpu", "mps")  # MPS has the host's memory


def accelerator_name() -> str | None:
    """Return the name of this machine's accelerator; None without one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named()) if named else device.type


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory of ``device`` that PyTorch has had; None for the CPU, or where PyTorch cannot say."""
    return _ask("max_memory_allocated", device)


def free_bytes(device: torch.device) -> float:
    """Return how much memory of ``device`` is free; inf for the CPU, MPS, and before PyTorch 2.10."""
    free = _ask("get_memory_info", device)
    if free is None:
        return inf
    kept = (_ask("memory_reserved", device) or 0) - (_ask("memory_allocated", device) or 0)  # by PyTorch, for reuse
    return float(free[0] + max(0, kept))


def place_within(device: torch.device, size: int, what: str) -> torch.device:
    """Return where ``size`` bytes are kept: on ``device`` while they fit, else on the CPU, which a note says."""
    if device.type == "cpu" or size <= _ENOUGH * (free := free_bytes(device)):
        return device
    note(f"{what}: {size / 1e9:.3g} GB do not fit on '{device.type}' ({free / 1e9:.3g} GB free), the CPU has them")
    return torch.device("cpu")


def _ask(question: str, device: torch.device) -> Any:
    """Return the answer of ``torch.accelerator`` about ``device``; None for the CPU or if it has no answer."""
    ask = getattr(torch.accelerator, question, None)  # the youngest came with PyTorch 2.10
    if ask is None or device.type == "cpu":
        return None
    try:
        return ask(device)
    except (RuntimeError, NotImplementedError):  # MPS
        return None
