"""Commands and functions on the second device: they use it, and say what they say on the CPU."""

from __future__ import annotations

import contextlib
import io
import json
import pkgutil
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from mistakes import fails, rewrite
from tiny import make_batch, write_model, write_texts

from lit_compress.__main__ import main
from lit_compress.models.storage import load_net
from lit_compress.run.trainer import _on_accelerator, make_trainer
from lit_compress.utils.devices import current_device, find_device, place_within, to_device, use_device
from lit_compress.utils.errors import UserError

KFAC = ["--calibration_examples", "30", "--density", "0.5"]
# a line of every sum that is made on the device, in memory and by block
LINES = {
    "exact": [*KFAC, "--labels", "exact"],
    "fisher": ["--weighting", "fisher", "--axis", "both", "--fisher_examples", "20"],
    "SliceGPT": ["--method", "SliceGPT", "--density", "0.7", "--model.prune.examples", "30"],
    "Layers": ["--method", "Layers", "--density", "0.5", "--model.prune.choice", "measured",
               "--model.prune.examples", "30"],
    "trained": [*KFAC, "--removes", "structures", "--refine", "5", "--distil", "3", "--data.batch_size", "32"],
    "block-refined": [*KFAC, "--refine", "5", "--by_block", "float32"],
    "block-LLMPruner": ["--method", "LLMPruner", "--density", "0.5", "--by_block", "float32"],
}  # fmt: skip
DECODER_LINES = {"block-uniform": ["--calibration_examples", "20", "--density", "0.5", "--removes", "structures",
                                   "--shape", "uniform", "--by_block", "float32"]}  # fmt: skip


def said(*args: object) -> str:
    """Return what a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([str(arg) for arg in args])
    return out.getvalue()


def inputs() -> dict[str, torch.Tensor]:
    return {k: v % 20 if k == "input_ids" else v for k, v in make_batch().items() if k.startswith(("input", "att"))}


def factorize_on_both(lines: dict[str, list[str]], model: str, data: list[str], out: Path) -> dict[str, Any]:
    """Factorize on each device; return by line the logits of the exports, and the work that the second device did."""
    import second_device

    found: dict[str, Any] = {}
    for name, line in lines.items():
        for device in ("cpu", "second"):
            second_device.reset()
            folder = out / name / device
            with second_device.without_float64():
                said("factorize", model, folder, *data, *line, "--device", device)
            report = json.loads((folder / "report.json").read_text())
            found.setdefault(name, {})[device] = {
                "logits": load_net(folder)(**inputs()).logits.detach(),
                "loss": (report["calibration"] or {"measured_loss": 0})["measured_loss"],
                "metric": report["compressed"]["metric"],
                "calls": second_device.counts()["calls"],
            }
    return found


@pytest.fixture(scope="module")
def model(tiny_backbone, tiny_data, tmp_path_factory):
    """A fine-tuned model and what names its data."""
    folder = tmp_path_factory.mktemp("model") / "run"
    data = ["--data.task", "sst2", "--data.path", str(tiny_data), "--data.batch_size", "8"]
    main(["fit", "--model", "SVD", "--model.backbone", str(tiny_backbone), *data, "--model.dense.epochs", "2",
          "--model.dense.learning_rate", "3e-3", "--model.retrain.epochs", "0", "--run_dir", str(folder),
          "--device", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"])  # fmt: skip
    return folder, data


@pytest.fixture(scope="module")
def both(model, decoder, tmp_path_factory):
    """What each line makes on both devices: one process makes them all."""
    found = {}
    for (folder, data), lines in ((model, LINES), (decoder, DECODER_LINES)):
        dense = folder / "dense" / "net" if lines is LINES else folder
        out = tmp_path_factory.mktemp("both")
        found |= processes.on_second_device(factorize_on_both, lines, str(dense), data, out)
    return found


@pytest.mark.parametrize("name", [*LINES, *DECODER_LINES])
def test_factorize(name, both):
    cpu, second = both[name].values()
    assert torch.allclose(cpu["logits"], second["logits"], atol=1e-5)
    assert second["metric"] == pytest.approx(cpu["metric"], rel=1e-5)
    assert second["loss"] == pytest.approx(cpu["loss"], abs=1e-6)
    assert second["calls"] > 100 > cpu["calls"] == 0


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A language model of pre-norm blocks, and what names its texts."""
    folder = write_model(tmp_path_factory.mktemp("decoder") / "model", "llama", "plain_text", num_attention_heads=8,
                         num_key_value_heads=4, head_dim=4)  # fmt: skip
    texts = write_texts(tmp_path_factory.mktemp("texts"))
    more = ["--data.max_length", "16", "--data.batch_size", "4"]
    return folder, ["--data.task", "plain_text", "--data.path", str(texts), *more]


def commands_on_both(run: str, data: list[str], out: Path) -> dict[str, dict[str, Any]]:
    """Return what commands and functions say on each device, and whether the device worked."""
    import second_device
    from transformers import AutoTokenizer

    import lit_compress as lc

    found: dict[str, dict[str, Any]] = {}
    for device in ("cpu", "second"):
        answers = found[device] = {}

        def ask(name: str, answer: Any) -> None:
            worked = second_device.counts()["calls"] > 0
            answers[name] = answer if worked == (device == "second") else f"{device} did not work alone"  # noqa: B023
            second_device.reset()

        second_device.reset()
        with second_device.without_float64():
            ask("validate", said("validate", run, "--device", device))
            said("predict", run, "--output", out / f"{device}.jsonl", "--device", device)
            lines = [json.loads(line) for line in (out / f"{device}.jsonl").read_text().splitlines()]
            ask("predict", [(line["label"], round(line["probability"], 4)) for line in lines])
            said("bench", run, "--batch", "1", "--length", "8", "--runtimes", "eager", "--seconds", "0.1",
                 "--output", out / f"bench-{device}", "--device", device)  # fmt: skip
            bench = json.loads((out / f"bench-{device}" / "bench.json").read_text())
            ask("bench", (bench["device"] == device, len(bench["shapes"]), bench["left_out"]))
            net, tokenizer = lc.load(run), AutoTokenizer.from_pretrained(f"{run}/export")
            ask("lc.evaluate", {k: round(v, 5) for k, v in lc.evaluate(net, device=device).items()})
            moved = lc.load(run, device=torch.device(device, 0))
            assert (net.device.type, moved.device.type, moved.folder) == ("cpu", device, net.folder)
            logits = moved(**{name: column.to(device) for name, column in inputs().items()}).logits
            ask("lc.load", [round(x, 4) for x in logits.flatten().tolist()])
            small = lc.factorize(
                f"{run}/dense/net", data=data[3], task="sst2", density=0.5, device=device, calibration_examples=30
            )
            texts = tokenizer(["a warm film", "dull"], padding=True, return_tensors="pt")
            ask("lc.factorize", [round(x, 4) for x in small(**texts).logits.flatten().tolist()])
    options: dict[str, Any] = {"model.density": 0.5}
    with pytest.raises(UserError, match="'cuda' is not on this machine"):
        lc.compress(f"{run}/dense/net", data=data[3], task="sst2", device="cuda", **options)
    return found


def test_commands_and_functions(model, tmp_path):
    folder, data = model
    cpu, second = processes.on_second_device(commands_on_both, str(folder), data, tmp_path).values()
    assert cpu == second


def test_a_run_of_another_machine_is_read_on_this_one(model, tmp_path):
    """The accelerator in a run's config is no order: it is used if it is here."""
    import shutil

    run = tmp_path / "run"
    shutil.copytree(model[0], run)
    config = (run / "config.yaml").read_text()
    rewrite(run / "config.yaml", config.replace("accelerator: cpu", "accelerator: cuda"))
    assert (run / "config.yaml").read_text() != config
    assert said("validate", run) == said("validate", model[0])


@pytest.mark.parametrize("command", ["fit", "factorize", "validate", "bench"])
def test_a_device_that_is_not_here(command, model, tiny_backbone, tmp_path, capsys):
    run, data = model
    words = {
        "fit": ["--model", "SVD", "--model.backbone", tiny_backbone, *data, "--run_dir", tmp_path / "out"],
        "factorize": [run / "dense" / "net", tmp_path / "out", *data],
        "validate": [run],
        "bench": [run],
    }
    option = "--device" if command == "bench" else "trainer.accelerator"
    line = f"{option}: 'cuda' is not on this machine, or PyTorch was built without it; valid: auto, cpu"
    assert line in fails(capsys, command, *words[command], "--device", "cuda")
    assert not (tmp_path / "out").exists()


def choices() -> None:
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


def test_choices():
    processes.on_second_device(choices)


def trainers() -> None:
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


def test_trainers():
    processes.on_second_device(trainers)


def test_one_of_several_devices(monkeypatch):
    """Lightning takes type and number apart."""
    monkeypatch.setattr("lit_compress.run.trainer.find_device", torch.device)
    assert _on_accelerator({"accelerator": "cuda"}) == {}
    assert _on_accelerator({"accelerator": "cuda:1"}) == {"accelerator": "cuda", "devices": [1]}
    assert _on_accelerator({"accelerator": "mps:0", "devices": 1}) == {"accelerator": "mps", "devices": 1}
    with pytest.raises(UserError, match=r"trainer\.devices: 2 of 'cuda:1' cannot be used; valid: 1"):
        _on_accelerator({"accelerator": "cuda:1", "devices": 2})


def batches(backbone: str, path: str) -> None:
    """Batches for a device are pinned, and copied without a wait; those for the CPU are not."""
    import second_device

    from lit_compress.data.datamodule import DataModule

    batch = next(iter(DataModule("sst2", backbone, path, batch_size=8).train_dataloader()))
    assert all(column.is_pinned() for column in batch.values())
    second_device.reset()
    moved = to_device(batch, current_device())
    counts = second_device.counts()
    assert (counts["to_device"], counts["pageable"], counts["waits"]) == (len(batch), 0, 0)
    assert all(torch.equal(moved[name].cpu(), column) for name, column in batch.items())
    use_device("cpu")
    batch = next(iter(DataModule("sst2", backbone, path, batch_size=8).train_dataloader()))
    assert not any(column.is_pinned() for column in batch.values())


def test_batches_are_pinned(tiny_backbone, tiny_data):
    processes.on_second_device(batches, str(tiny_backbone), str(tiny_data))


SUMS = {
    # options, the function that sums, and how many times more bytes come to the host without room (states always do)
    "kfac": (KFAC, "lit_compress.stages.calibration.whole", 10),
    "block-LLMPruner": (LINES["block-LLMPruner"], "lit_compress.calibration.walk.BlockStatistics.collect", 3),
}


def sums(model: str, data: list[str], out: Path, line: list[str], where: str) -> dict[str, Any]:
    """Return what a calibration copies to the host, and its notes: with room for its sums, and without."""
    import second_device

    from lit_compress.export import folder
    from lit_compress.utils import devices

    folder.check_export = lambda *_: 0.0
    place, _, name = where.rpartition(".")
    owner = pkgutil.resolve_name(place)
    collect = getattr(owner, name)
    found: dict[str, Any] = {}

    def watched(*args: Any, **kwargs: Any) -> Any:
        second_device.reset()
        factors = collect(*args, **kwargs)
        found[case] = second_device.counts()
        return factors

    setattr(owner, name, watched)
    for case, share in (("there", 0.8), ("not", 1e-9)):
        devices._ENOUGH = share
        with contextlib.redirect_stderr(io.StringIO()) as err:
            said("factorize", model, out / case, *data, *line, "--device", "second")
        found[f"{case} said"] = [line for line in err.getvalue().splitlines() if "do not fit" in line]
    return found


@pytest.mark.parametrize("case", SUMS)
def test_sums_are_on_the_device_while_they_fit(case, model, tmp_path):
    line, where, times = SUMS[case]
    found = processes.on_second_device(sums, str(model[0] / "dense" / "net"), model[1], tmp_path, line, where)
    assert found["there said"] == [] and len(found["not said"]) == 1
    assert found["not"]["to_host_bytes"] > times * found["there"]["to_host_bytes"]
