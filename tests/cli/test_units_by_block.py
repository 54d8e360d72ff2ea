"""``factorize --by_block`` without heads, neurons or dimensions: the same as those of the net in memory."""

from __future__ import annotations

import json

import pytest
import torch
from mistakes import fails
from tiny import write_model, write_texts

from lit_compress.__main__ import main
from lit_compress.calibration.by_block import Sweeps
from lit_compress.calibration.sliced_by_block import BlockAxes
from lit_compress.export.check import check_export
from lit_compress.models.shards import load_tensors, write_shard
from lit_compress.models.storage import load_net
from lit_compress.utils.files import atomic_file, atomic_folder

GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
UNITS = ["--removes", "structures"]
PRUNED = ["--method", "LLMPruner"]
SLICED = ["--method", "SliceGPT", "--model.prune.examples", "20"]
# name -> family, task, settings of the net, options
CASES = {
    "bert": ("bert", "sst2", {}, [*UNITS, "--density", "0.1"]),
    "opt": ("opt", "plain_text", {}, [*UNITS, "--density", "0.15", "--weighting", "inputs"]),
    "modernbert": ("modernbert", "sst2", {}, [*UNITS, "--density", "0.4", "--labels", "exact", "--round_to", "8"]),
    "llama": (
        "llama",
        "plain_text",
        {**GROUPED, "attention_bias": True},
        [*UNITS, "--density", "0.5", "--shape", "uniform"],
    ),
    "gpt2": ("gpt2", "plain_text", {}, [*UNITS, "--budget", "flops=0.8", "--shape", "uniform"]),
    "pruned bert": (
        "bert",
        "sst2",
        {},
        [*PRUNED, "--density", "0.5", "--model.prune.keep_first", "1", "--model.prune.importance", "vector"],
    ),
    "pruned llama": (
        "llama",
        "plain_text",
        GROUPED,
        [*PRUNED, "--budget", "params=20K", "--shape", "uniform", "--model.prune.importance", "element2"],
    ),
    "sliced llama": ("llama", "plain_text", {**GROUPED, "tie_word_embeddings": True}, [*SLICED, "--density", "0.6"]),
    "sliced opt": ("opt", "plain_text", {}, [*SLICED, "--density", "0.7"]),
    "sliced phi3": ("phi3", "plain_text", {}, [*SLICED, "--density", "0.6"]),
    "sliced qwen3": ("qwen3", "sst2", {}, [*SLICED, "--budget", "params=30K"]),
}
EQUAL = ("params", "flops", "kept", "stored", "density", "metric")


@pytest.fixture(scope="module")
def data(tmp_path_factory, tiny_data):
    """Task -> what names its data."""
    folder = write_texts(tmp_path_factory.mktemp("texts"))
    folders, more = {"plain_text": folder, "sst2": tiny_data}, ["--data.max_length", "16", "--data.batch_size", "4"]
    return {task: ["--data.task", task, "--data.path", str(path), *more] for task, path in folders.items()}


def factorize(model, out, *options):
    main(["factorize", str(model), str(out), *map(str, options)])
    return json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    """Function of the name of a case that returns its folder: the model, and exports made in memory and by blocks."""
    found = {}

    def make(name):
        if name not in found:
            family, task, settings, options = CASES[name]
            folder = found[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
            (folder / "model").mkdir()
            line = [*data[task], *options]
            write_model(folder / "model", family, task, **settings)
            factorize(folder / "model", folder / "whole", *line)
            factorize(folder / "model", folder / "blocks", *line, "--by_block", "float32")
        return found[name]

    return make


def difference(one, other):
    found, expected = load_tensors(one), load_tensors(other)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].shape == expected[name].shape, name
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp_min(1)) for n in expected)


@pytest.mark.parametrize("name", CASES)
def test_heads_and_neurons_by_blocks_are_those_of_the_net_in_memory(name, made):
    """The units, what stays of the matrices, biases, the estimate and the measurements."""
    folder = made(name)
    whole, blocks = (json.loads((folder / out / "report.json").read_text()) for out in ("whole", "blocks"))
    one, other = (json.loads((folder / out / "structure.json").read_text()) for out in ("whole", "blocks"))
    assert one == other and whole["compressed"]["density"] < 0.75
    assert difference(folder / "blocks", folder / "whole") < 1e-5
    assert (blocks["calibration"] or {}) == {
        key: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
        for key, value in (whole["calibration"] or {}).items()
    }
    for stage in ("dense", "compressed"):
        for key in EQUAL:
            assert blocks[stage][key] == pytest.approx(whole[stage][key], rel=1e-5), (stage, key)
    assert blocks["ordinary"] == whole["ordinary"] == (name in ("llama", "gpt2", "pruned llama"))
    assert blocks["refuses"] == whole["refuses"] and blocks["budget"] == whole["budget"]
    if name.startswith("sliced"):  # the residual path has matrices now
        assert len(blocks["widths"]) == 6 and 1 < min(blocks["widths"]) < 32 and "units" not in blocks
        assert any(site.endswith("middle") for site in one) and not any(site.endswith("2.end") for site in one)
    else:
        assert sum(blocks["units"].values()) > 0 and "ranks" not in blocks
    assert name != "bert" or any(spec["kind"] == "nothing" for spec in one.values())
    assert name != "opt" or any(spec["kind"] == "attributes" for spec in one.values())
    net = load_net(folder / "blocks")
    assert name not in ("bert", "llama", "sliced opt") or check_export(net, folder / "blocks") <= 1e-5


@pytest.mark.parametrize("name", ["bert", "pruned bert"])
def test_a_killed_run_goes_on(name, made, data, tmp_path, monkeypatch):
    """It dies in the backward sweep, and again after the first file of the export; the tensors are the same."""
    folder = made(name)
    line = [*data["sst2"], *CASES[name][3], "--by_block", "float32"]
    drop, work = Sweeps.drop, tmp_path / "out.by_block"

    def dying(self, what, number):
        drop(self, what, number)
        if (what, number) == ("gradients", 2):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(BaseException):  # noqa: B017
        patch.setattr(Sweeps, "drop", dying)
        factorize(folder / "model", tmp_path / "out", *line)
    assert sorted(path.name for path in work.glob("units-*")) == [f"units-0000{i}" for i in (1, 2)]

    def killed(tensors, path):
        if path.name == "block-00001.partial":
            raise KeyboardInterrupt
        write_shard(tensors, path)

    with monkeypatch.context() as patch, pytest.raises(BaseException):  # noqa: B017
        patch.setattr("lit_compress.export.by_block.write_shard", killed)
        factorize(folder / "model", tmp_path / "out", *line)
    assert [path.name for path in work.glob("block-*.safetensors")] == ["block-00000.safetensors"]
    factorize(folder / "model", tmp_path / "out", *line)
    assert difference(tmp_path / "out", folder / "blocks") == 0


@pytest.mark.parametrize("killed_at", ["axes-00001", "calibration/states-00002", "block-00001"])
def test_a_killed_slicing_goes_on(killed_at, made, data, tmp_path, monkeypatch):
    """It dies before a file of axes, states or the export; the tensors are the same, and no axes are made twice."""
    folder = made("sliced llama")
    line = [*data["plain_text"], *CASES["sliced llama"][3], "--by_block", "float32"]
    work, collected = tmp_path / "out.by_block", []

    def dying(path, *args, **kwargs):
        if killed_at in str(path):
            raise KeyboardInterrupt
        return atomic_file(path, *args, **kwargs)

    def dying_folder(path):
        if killed_at in str(path):
            raise KeyboardInterrupt
        return atomic_folder(path)

    def killed(tensors, path):
        dying(path)
        write_shard(tensors, path)

    with monkeypatch.context() as patch, pytest.raises(BaseException):  # noqa: B017
        patch.setattr("lit_compress.calibration.block_states.atomic_file", dying)
        patch.setattr("lit_compress.stages.by_block.atomic_folder", dying_folder)
        patch.setattr("lit_compress.export.by_block.write_shard", killed)
        factorize(folder / "model", tmp_path / "out", *line)
    before = {path.name for path in work.glob("axes-*")}
    assert len(before) == {"axes-00001": 1, "calibration/states-00002": 2, "block-00001": 3}[killed_at]
    whole = BlockAxes._axes
    monkeypatch.setattr(BlockAxes, "_axes", lambda self, i, block: collected.append(i) or whole(self, i, block))
    factorize(folder / "model", tmp_path / "out", *line)
    assert collected == list(range(len(before), 3)) and difference(tmp_path / "out", folder / "blocks") == 0


def test_slices_by_blocks_in_half_precision(made, data, tmp_path):
    """The same slices in bfloat16 files, and of states that are rounded on disk."""
    model, line = made("sliced opt") / "model", [*data["plain_text"], *CASES["sliced opt"][3]]
    half = factorize(model, tmp_path / "half", *line, "--dtype", "bfloat16", "--by_block", "float32")
    tensors, exact = load_tensors(tmp_path / "half"), load_tensors(made("sliced opt") / "blocks")
    assert all(torch.equal(value, exact[name].bfloat16()) for name, value in tensors.items())
    rounded = factorize(model, tmp_path / "rounded", *line, "--by_block", "bfloat16")
    assert rounded["widths"] == half["widths"]
    assert rounded["compressed"]["metric"] == pytest.approx(half["compressed"]["metric"], rel=0.05)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--removes", "structures", "--density", "0.001"], "0.001 cannot be reached with retrain.removes structures"),
        ([*PRUNED, "--density", "1"], "--by_block: at density 1 nothing is compressed; nearest: 0.9"),
        ([*PRUNED, "--density", "0.001"], "model.density: 0.001 cannot be reached by LLMPruner"),
        (
            SLICED,
            "--by_block: norms of 'bert' are after the sub-layers, and slices then need the whole model; near",
        ),
        ([*SLICED, "--density", "1"], "--by_block: at density 1 nothing is compressed; nearest: 0.9"),
        ([*PRUNED, *UNITS], "model.retrain: LLMPruner has no stage retrain"),
        (["--shape", "uniform"], "retrain.removes 'components' makes factors; nearest: structures"),
    ],
)
def test_mistakes_are_one_line(made, data, tmp_path, capsys, more, message):
    density = [] if "--density" in more else ["--density", "0.5"]
    line = fails(capsys, "factorize", made("bert") / "model", tmp_path / "out", *data["sst2"], *density, *more,
                 "--by_block", "float32")  # fmt: skip
    assert message in line and not (tmp_path / "out.by_block").exists()
