"""Commands and functions on the second device: they use it, and say what they say on the CPU."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from helpers import logits
from in_memory import collect_kronecker, estimate_fisher, mean_gradients
from mistakes import fails, predicted, rewrite
from tiny import make_batch, make_inputs, make_net

from lit_compress.__main__ import main
from lit_compress.methods.slicegpt import Axes
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.shorten import stack_lengths
from lit_compress.models.storage import load_net
from lit_compress.run.trainer import _on_accelerator, make_trainer
from lit_compress.stages.blocks import divergences
from lit_compress.tasks import KINDS
from lit_compress.utils.devices import current_device, find_device, place_within, to_device, use_device
from lit_compress.utils.errors import UserError

KFAC = ["--calibration_examples", "30", "--density", "0.5"]
KIND = KINDS["classification"]
# in memory and by block; every statistic is in test_statistics
LINES = {
    "trained": [*KFAC, "--removes", "structures", "--refine", "5", "--distil", "3", "--data.batch_size", "32"],
    "block-refined": [*KFAC, "--refine", "5", "--by_block", "float32"],
}  # fmt: skip


def said(*args: object) -> str:
    """Return what a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([str(arg) for arg in args])
    return out.getvalue()


@pytest.fixture(scope="module")
def model(tiny_backbone, tiny_data, tmp_path_factory):
    """A fine-tuned model and what names its data."""
    folder = tmp_path_factory.mktemp("model") / "run"
    data = ["--data.task", "sst2", "--data.path", str(tiny_data), "--data.batch_size", "8"]
    main(["fit", "--model", "SVD", "--model.backbone", str(tiny_backbone), *data, "--model.dense.epochs", "2",
          "--model.dense.learning_rate", "3e-3", "--model.retrain.epochs", "0", "--run_dir", str(folder),
          "--device", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"])  # fmt: skip
    return folder, data


@pytest.mark.parametrize("name", LINES)
@processes.with_second_device
def test_factorize(name: str, model: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Once more without room for the sums there, which are then on the host."""
    import second_device

    from lit_compress.utils import devices

    answers, work, (run, data) = [], [], model
    for device, share in (("cpu", 0.8), ("second", 0.8), ("second", 1e-9)):
        devices._ENOUGH = share
        second_device.reset()
        out = tmp_path / f"{device}-{share}"
        with second_device.without_float64(), contextlib.redirect_stderr(io.StringIO()) as err:
            said("factorize", run / "dense" / "net", out, *data, *LINES[name], "--device", device)
        report = json.loads((out / "report.json").read_text())
        losses = report["calibration"].get("measured_loss", 0.0), report["compressed"]["metric"]
        answers.append([*losses, *logits(load_net(out)).flatten().tolist()])
        work.append((second_device.counts()["calls"], "do not fit" in err.getvalue()))
    (cpu, _), (there, told), (elsewhere, told_again) = work
    assert cpu == 0 and min(there, elsewhere) > 100 and (told, told_again) == (False, True)
    for second in answers[1:]:
        assert second[:2] == pytest.approx(answers[0][:2], rel=1e-5, abs=1e-6)
        assert second == pytest.approx(answers[0], abs=1e-5)


@processes.with_second_device
def test_statistics() -> None:
    import second_device

    found: list[dict[str, list[torch.Tensor]]] = []
    for device in ("cpu", "second"):
        nets = {family: make_net(family, initializer_range=0.2).eval().to(device) for family in ("bert", "llama")}
        net, batches = nets["bert"], [make_batch(40, 9)]
        with second_device.without_float64():
            kronecker = collect_kronecker(net, batches, KIND.name, labels="exact", device=device)
            fisher = estimate_fisher(net, batches, KIND.name, None)
            first = {path: [0] for path in stack_lengths(net)}
            answers = {
                "inputs": [one.inputs() for one in kronecker.values()],
                "gradients": [one.gradients() for one in kronecker.values()],
                "fisher": list(fisher.values()),
                "mean": list(mean_gradients(net, batches, KIND.name, None).values()),
                "blocks": [torch.tensor(divergences(net, [first], batches, KIND))],
            }
            for family, each in nets.items():  # projectors, as axes have signs
                sites = len(residual_stream(each).sites)
                axes = Axes([24] * sites).answer(each, batches, KIND, None).values()
                answers[f"axes of {family}"] = [(u[:, :24] @ u[:, :24].mT).float() for u in axes]
        found.append(answers)
    for name, tensors in found[0].items():
        for one, other in zip(tensors, found[1][name], strict=True):
            one, other = one.cpu(), other.cpu().to(one.dtype)
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max())), name


@processes.with_second_device
def test_commands_and_functions(model: tuple[Path, list[str]], tmp_path: Path) -> None:
    import second_device
    from transformers import AutoTokenizer

    import lit_compress as lc

    run, data = str(model[0]), model[1]
    found: dict[str, dict[str, Any]] = {}
    for device in ("cpu", "second"):
        answers = found[device] = {}

        def ask(name: str, answer: Any) -> None:
            worked = second_device.counts()["calls"] > 0
            answers[name] = answer if worked == (device == "second") else f"{device} did not work alone"  # noqa: B023
            second_device.reset()

        second_device.reset()
        with second_device.without_float64():
            lines = predicted(run, tmp_path / f"{device}.jsonl", "--device", device)
            ask("predict", [(line["label"], round(line["probability"], 4)) for line in lines])
            said("bench", run, "--batch", "1", "--length", "8", "--runtimes", "eager", "--seconds", "0.1",
                 "--output", tmp_path / f"bench-{device}", "--device", device)  # fmt: skip
            bench = json.loads((tmp_path / f"bench-{device}" / "bench.json").read_text())
            ask("bench", (bench["device"] == device, bench["left_out"]))
            net, tokenizer = lc.load(run), AutoTokenizer.from_pretrained(f"{run}/export")
            ask("lc.evaluate", {k: round(v, 5) for k, v in lc.evaluate(net, device=device).items()})
            moved: Any = lc.load(run)
            moved.to(torch.device(device, 0))
            assert (net.device.type, moved.device.type, moved.folder) == ("cpu", device, net.folder)
            inputs = {name: (column % 20).to(device) for name, column in make_inputs().items()}
            ask("lc.load", [round(x, 4) for x in moved(**inputs).logits.flatten().tolist()])
            small = lc.factorize(
                f"{run}/dense/net", data=data[3], task="sst2", density=0.5, device=device, calibration_examples=30
            )
            texts = tokenizer(["a warm film", "dull"], padding=True, return_tensors="pt")
            ask("lc.factorize", [round(x, 4) for x in small(**texts).logits.flatten().tolist()])
    assert found["cpu"] == found["second"]
    options: dict[str, Any] = {"model.density": 0.5}
    with pytest.raises(UserError, match="'cuda' is not on this machine"):
        lc.compress(f"{run}/dense/net", data=data[3], task="sst2", device="cuda", **options)


def test_a_run_of_another_machine_is_read_on_this_one(model, tmp_path):
    """The accelerator in a run's config is no order: it is used if it is here."""
    run = shutil.copytree(model[0], tmp_path / "run")
    config = (run / "config.yaml").read_text()
    rewrite(run / "config.yaml", config.replace("accelerator: cpu", "accelerator: cuda"))
    assert (run / "config.yaml").read_text() != config
    assert said("validate", run) == said("validate", model[0])


@pytest.mark.parametrize("command", ["fit", "bench"])
def test_a_device_that_is_not_here(command, model, tiny_backbone, tmp_path, capsys):
    run, data = model
    words = {
        "fit": ["--model", "SVD", "--model.backbone", tiny_backbone, *data, "--run_dir", tmp_path / "out"],
        "bench": [run],
    }
    option = "--device" if command == "bench" else "trainer.accelerator"
    line = f"{option}: 'cuda' is not on this machine, or PyTorch was built without it; valid: auto, cpu"
    assert line in fails(capsys, command, *words[command], "--device", "cuda")
    assert not (tmp_path / "out").exists()


@processes.with_second_device
def test_choices() -> None:
    """Names, and where sums go."""
    import second_device

    second = torch.device("second")
    assert [find_device(name) for name in ("auto", "gpu", "second")] == [second] * 3
    assert [find_device(name) for name in ("gpu:0", "second:0")] == [torch.device("second", 0)] * 2
    assert [find_device(name) for name in ("cpu", "cpu:0")] == [torch.device("cpu")] * 2
    for name in ("second:1", "second:x", "second:", "auto:0", "cuda:0"):
        with pytest.raises(UserError, match=rf"device: '{name}' is not on this machine, .*; valid: auto, cpu, second$"):
            find_device(name, "device")
    use_device("cpu")
    assert current_device() == torch.device("cpu")
    use_device("auto")
    assert current_device() == second
    with second_device.with_capacity(torch.accelerator.memory_allocated() + 1000):
        assert place_within(second, 800, "sums") == second
        assert place_within(second, 801, "sums") == torch.device("cpu")


@processes.with_second_device
def test_trainers() -> None:
    """Lightning knows neither the device nor its autocast; other numbers and strategies are refused."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for name in ("auto", "gpu", "second", "second:0"):
        trainer = make_trainer(**quiet, accelerator=name, precision="bf16-mixed")
        assert trainer.strategy.root_device == torch.device("second", 0) and trainer.precision == "bf16-mixed"
        x = torch.rand(2, 2, device="second")
        with trainer.precision_plugin.forward_context():
            assert (x @ x).dtype == torch.bfloat16
        assert make_trainer(**quiet, accelerator=name, precision="32-true").precision == "32-true"
    for option, value in (("devices", 2), ("strategy", "ddp")):
        with pytest.raises(UserError, match=rf"trainer\.{option}: .*{value}.*; valid: (1|auto)"):
            make_trainer(**quiet, accelerator="second", **{option: value})


def test_one_of_several_devices(monkeypatch):
    """Lightning takes type and number apart."""
    monkeypatch.setattr("lit_compress.run.trainer.find_device", torch.device)
    assert _on_accelerator({"accelerator": "cuda"}) == {}
    assert _on_accelerator({"accelerator": "cuda:1"}) == {"accelerator": "cuda", "devices": [1]}
    assert _on_accelerator({"accelerator": "mps:0", "devices": 1}) == {"accelerator": "mps", "devices": 1}
    with pytest.raises(UserError, match=r"trainer\.devices: 2 of 'cuda:1' cannot be used; valid: 1"):
        _on_accelerator({"accelerator": "cuda:1", "devices": 2})


@processes.with_second_device
def test_batches_are_pinned(tiny_backbone: Path, tiny_data: Path) -> None:
    """Batches for a device are pinned, and copied without a wait; those for the CPU are not."""
    import second_device

    from lit_compress.data.datamodule import DataModule

    data = DataModule("sst2", str(tiny_backbone), str(tiny_data), batch_size=8)
    batch = next(iter(data.train_dataloader()))
    assert all(column.is_pinned() for column in batch.values())
    second_device.reset()
    moved = to_device(batch, current_device())
    counts = second_device.counts()
    assert (counts["to_device"], counts["pageable"], counts["waits"]) == (len(batch), 0, 0)
    assert all(torch.equal(moved[name].cpu(), column) for name, column in batch.items())
    use_device("cpu")
    batch = next(iter(data.train_dataloader()))
    assert not any(column.is_pinned() for column in batch.values())
