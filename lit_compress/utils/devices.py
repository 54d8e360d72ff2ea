"""The device of this process: the one that the user named, else PyTorch's accelerator, else the CPU."""

from __future__ import annotations

from typing import Any

import torch

from lit_compress.utils.errors import UserError

_ENOUGH = 0.8  # share of the free memory that one user of it may take
_chosen: torch.device | None = None


def device() -> torch.device:
    """Return the device that nets and batches of this process belong on."""
    return _chosen or find_device("auto")


def find_device(name: str, option: str = "trainer.accelerator") -> torch.device:
    """Return the device of a name: ``auto`` (the accelerator if there is one), ``cpu``, ``gpu``, ``cuda``, ``mps``, ...

    Args:
        name: as a user types it; ``gpu`` is the accelerator, of whatever maker.
        option: that the user gave it to.

    Raises:
        UserError: this machine, or this build of PyTorch, has no such device.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return found or torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    if found is not None and name in ("gpu", found.type):
        return found
    here = "cpu" if found is None else f"cpu, {found.type}"
    raise UserError(f"{option}: '{name}' is not on this machine, or this PyTorch was built without it; valid: {here}")


def use_device(name: str, option: str = "trainer.accelerator") -> torch.device:
    """Make the device of ``name`` the one that :func:`device` returns from now on.

    Raises:
        UserError: as :func:`find_device`.
    """
    global _chosen
    found = find_device(name, option)
    _chosen = None if name == "auto" else found
    return found


def has_float64(device: torch.device) -> bool:
    """Say whether ``device`` has float64; Apple's and some of Intel's have not."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def place_of_sums(device: torch.device | str) -> torch.device:
    """Return where float64 sums of what ``device`` computes are kept: there, or on the CPU if it has no float64."""
    device = torch.device(device)
    return device if has_float64(device) else torch.device("cpu")


def double(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float64, on its device, or on the CPU if that has no float64."""
    return x.to(place_of_sums(x.device)).double()


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done its work; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a batch on ``device``; pinned tensors are copied while the host goes on."""
    return {name: column.to(device, non_blocking=True) for name, column in batch.items()}


def pins_memory() -> bool:
    """Say whether batches are to be pinned: on a device to which a copy from pinned memory needs no wait."""
    return device().type not in ("cpu", "mps")  # MPS has the host's memory


def accelerator_name() -> str | None:
    """Return the name of this machine's accelerator; None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    named = getattr(torch.get_device_module(found), "get_device_name", None)
    return str(named()) if named else found.type


def peak_bytes() -> int | None:
    """Return the most memory of the accelerator that PyTorch has had; None without one, or where PyTorch cannot say."""
    return _ask("max_memory_allocated")


def fits(size: int) -> bool:
    """Say whether ``size`` bytes may be taken on the device of this process; True on the CPU.

    Where PyTorch cannot tell how much is free (MPS, and every device before PyTorch 2.10), everything fits.
    """
    if device().type == "cpu":
        return True
    found = _ask("get_memory_info")
    return found is None or size <= _ENOUGH * found[0]


def _ask(question: str) -> Any:
    """Return what ``torch.accelerator`` answers; None without an accelerator or where it has no answer."""
    ask = getattr(torch.accelerator, question, None)  # the youngest came with PyTorch 2.10
    if ask is None or torch.accelerator.current_accelerator(check_available=True) is None:
        return None
    try:
        return ask()
    except (RuntimeError, NotImplementedError):  # MPS
        return None
