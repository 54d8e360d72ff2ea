"""The second device of the tests: it computes what the CPU computes, refuses what CUDA refuses, counts right."""

from __future__ import annotations

import processes
import pytest
import second_device
import torch


@processes.with_second_device
def test_refuses_mixed_devices() -> None:
    """Mix devices in the ways that CUDA refuses, then in those that it takes."""
    there, here = torch.rand(4, 3, device="second"), torch.rand(4, 3)
    mask = here > 0.5
    for mixed in (
        lambda: there + here, lambda: there @ here.T, lambda: torch.where(mask, there, there), lambda: there * mask,
        lambda: there.masked_fill(mask, 0), lambda: torch.cat([there, here]), lambda: here[there > 0.5],
        lambda: torch.nn.functional.embedding(torch.tensor([0]), there), lambda: there.add_(here),
        lambda: torch.nn.functional.layer_norm(there, (3,), here[0]), lambda: there.gather(0, mask.long()),
        lambda: torch.stack([there, here]),
        lambda: torch.nn.functional.cross_entropy(there, torch.tensor([0, 1, 2, 0])),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert torch.equal((there * torch.tensor(2.0)).cpu(), there.cpu() * 2)
    assert torch.equal(there[mask].cpu(), there.cpu()[mask]) and there[torch.tensor([1, 0])].shape == (2, 3)
    there[mask] = 0
    assert torch.equal(there.copy_(here).cpu(), here)
    with pytest.raises(TypeError, match="convert"):
        there.numpy()


@processes.with_second_device
def test_counts_waits_copies_and_calls() -> None:
    """Do one thing after the other, and compare the counts."""
    x = torch.rand(4, 3).to("second")
    pinned = torch.rand(4, 3).pin_memory()
    bool_mask = x > 0.5
    for act, expected in (
        (lambda: x * 2 + 1, {"calls": 2}), (lambda: x.view(12)[3:].T, {}),
        (lambda: x.sum().item(), {"calls": 2, "waits": 1}),
        (lambda: x.cpu(), {"to_host": 1, "to_host_bytes": 48, "waits": 1}),
        (lambda: x.to("cpu", non_blocking=True), {"to_host": 1, "to_host_bytes": 48}),
        (lambda: torch.rand(4, 3).to("second"), {"to_device": 1, "to_device_bytes": 48, "pageable": 1}),
        (lambda: pinned.to("second", non_blocking=True), {"to_device": 1, "to_device_bytes": 48}),
        (lambda: x[bool_mask], {"calls": 2, "waits": 1}), (lambda: x.masked_fill_(bool_mask, 0), {"calls": 1}),
        (lambda: x.clone()[bool_mask].fill_(1), {"calls": 4, "waits": 1}),
        (lambda: x.index_put_((bool_mask,), torch.tensor(0.0)), {"calls": 1}),
        (lambda: torch.equal(x, x + 1), {"calls": 2, "waits": 1}),
        (lambda: torch.accelerator.synchronize(), {"waits": 1}),
    ):  # fmt: skip
        second_device.reset()
        act()
        assert {name: n for name, n in second_device.counts().items() if n} == expected, act
    second_device.reset(trace=True)
    x.sum().item()
    assert second_device.operators() == {"aten::sum": 1, "aten::_local_scalar_dense": 1}
    assert second_device.wait_reasons() == {"aten::_local_scalar_dense": 1}


@processes.with_second_device
def test_float64_memory_and_autocast() -> None:
    """float64 and memory can be made scarce; both come back."""
    x = torch.rand(4, 3, device="second")
    with second_device.without_float64():
        for wide in (x.double, lambda: x.sum(dtype=torch.float64), lambda: torch.rand(2).double().to("second")):
            with pytest.raises(TypeError, match="float64"):
                wide()
        assert x.cpu().double().dtype == torch.float64
    assert x.double().dtype == torch.float64
    before = torch.accelerator.memory_allocated()
    with second_device.with_capacity(before + 1000):
        assert torch.accelerator.get_memory_info() == (1000, before + 1000)
        kept = torch.empty(200, device="second")
        with pytest.raises(torch.OutOfMemoryError):
            kept + 1
    del kept
    assert torch.accelerator.memory_allocated() == before
    with torch.autocast("second", torch.bfloat16):
        assert (x @ x.T).dtype == torch.bfloat16 and x.softmax(-1).dtype == torch.float32
