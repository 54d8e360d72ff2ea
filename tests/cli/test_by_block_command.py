"""``factorize --by_block``: the same export as with the net in memory, also after a kill; one-line refusals."""

from __future__ import annotations

import json
import random
import shutil

import processes
import pytest
import torch
from mistakes import fails
from tiny import WORDS, make_net, write_backbone, write_texts
from transformers import AutoModelForCausalLM

from benchmarks.reliability.events import Fill
from lit_compress.__main__ import main
from lit_compress.calibration.by_block import Sweeps
from lit_compress.cli.by_block import TRAINED
from lit_compress.export.check import check_export
from lit_compress.models.shards import INDEX, load_tensors, net_bytes, stored_dtype
from lit_compress.models.storage import load_net
from lit_compress.stages.refinement import Refinement


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of three blocks in bfloat16, in several files."""
    folder = write_backbone(tmp_path_factory.mktemp("llama"), "llama", "plain_text")
    net = make_net("llama", "plain_text", num_hidden_layers=3, initializer_range=0.2, attention_bias=True)
    with torch.no_grad():
        for name, value in net.named_parameters():
            if name.endswith("bias"):
                value.normal_()
    (folder / "model.safetensors").unlink()
    net.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    assert (folder / INDEX).is_file()
    return folder


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = write_texts(tmp_path_factory.mktemp("texts"), shortest=0)
    return [
        "--dtype",
        "float32",
        "--data.task",
        "plain_text",
        "--data.path",
        str(folder),
        "--data.max_length",
        "16",
        "--data.batch_size",
        "4",
    ]


def factorize(model, out, *options):
    main(["factorize", str(model), str(out), *map(str, options)])
    return json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def both(llama, options, tmp_path_factory):
    """Folders of an export by K-FAC, made in memory and by blocks."""
    folder = tmp_path_factory.mktemp("both")
    factorize(llama, folder / "whole", *options, "--density", "0.5")
    factorize(llama, folder / "blocks", *options, "--density", "0.5", "--by_block", "float32")
    return folder


def same(one, other):
    found, expected = load_tensors(one), load_tensors(other)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].shape == expected[name].shape, name
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp_min(1)) for n in expected)


def test_kfac_by_blocks_is_that_of_the_net_in_memory(both):
    """Ranks, factors, biases, estimate and measurements."""
    whole, blocks = (json.loads((both / name / "report.json").read_text()) for name in ("whole", "blocks"))
    one, other = (json.loads((both / name / "structure.json").read_text()) for name in ("whole", "blocks"))
    assert one == other and len({spec["rank"] for spec in one.values()}) > 2
    assert same(both / "blocks", both / "whole") < 1e-5
    assert blocks["calibration"] == {
        key: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
        for key, value in whole["calibration"].items()
    }
    for stage in ("dense", "compressed"):
        for key in ("params", "flops", "kept", "stored", "density", "metric"):
            assert blocks[stage][key] == pytest.approx(whole[stage][key], rel=1e-5), (stage, key)
    assert blocks["metric"] == whole["metric"] and blocks["export_difference"] is None
    assert not (both / "blocks.by_block").exists()
    memory = blocks["by_block"]["memory"]
    assert memory["bound"] == memory["outside"] + 2 * memory["block"] + memory["statistics"]


def test_shards_load_in_another_process(both):
    """As any export: alone, in float32, with this package and without."""
    net = load_net(both / "blocks")
    assert check_export(net, both / "blocks") <= 1e-5
    with pytest.raises(KeyError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(both / "blocks")


def test_a_killed_run_goes_on(both, llama, options, tmp_path, monkeypatch):
    """It dies at the second block of the backward sweep; the same command ends with the same tensors."""
    line, calls, whole = [*options, "--density", "0.5", "--by_block", "float32"], [], Sweeps.drop

    def dying(self, what, number):
        whole(self, what, number)
        calls.append((what, number))
        if calls[-1] == ("gradients", 2):
            raise KeyboardInterrupt

    monkeypatch.setattr(Sweeps, "drop", dying)
    with pytest.raises(BaseException):  # noqa: B017
        factorize(llama, tmp_path / "out", *line)
    work = tmp_path / "out.by_block"
    assert sorted(path.name for path in work.glob("factors-*")) == [f"factors-0000{i}" for i in (1, 2)]
    monkeypatch.setattr(Sweeps, "drop", whole)
    (work / "calibration" / "gradients-00001").unlink()  # is made anew from what there is
    shutil.rmtree(work / "factors-00001")
    before = (work / "factors-00002").stat().st_mtime_ns
    monkeypatch.setattr(
        "lit_compress.cli.by_block.remove",
        lambda folder: calls.append((work / "factors-00002").stat().st_mtime_ns),
    )
    factorize(llama, tmp_path / "out", *line)
    assert calls[-1] == before and same(tmp_path / "out", both / "blocks") == 0
    monkeypatch.undo()


@pytest.mark.parametrize(
    "weighting",
    [
        ["--weighting", "inputs", "--allocation", "global"],
        ["--weighting", "none", "--rank", "5"],
        ["--weighting", "fisher", "--axis", "both", "--fisher_examples", "20"],
    ],
)
def test_other_weightings_and_half_precision(llama, options, tmp_path, weighting):
    """One sweep forward, none, or two; 16 bits in the files, states of 16 bits on disk."""
    line = [*options, *weighting, *([] if "--rank" in weighting else ["--density", "0.5"])]
    whole = factorize(llama, tmp_path / "whole", *line)
    blocks = factorize(llama, tmp_path / "blocks", *line, "--by_block", "float32")
    assert same(tmp_path / "blocks", tmp_path / "whole") < 1e-5
    assert blocks["compressed"]["metric"] == pytest.approx(whole["compressed"]["metric"], rel=1e-5)
    half = factorize(llama, tmp_path / "half", *line, "--by_block", "bfloat16", "--dtype", "bfloat16")
    assert half["compressed"]["bytes"] < 0.6 * blocks["compressed"]["bytes"] and half["dtype"] == "bfloat16"
    assert half["compressed"]["metric"] == pytest.approx(blocks["compressed"]["metric"], rel=0.1)


@pytest.mark.parametrize("budget", ["params=25K", "size=120kB", "flops=0.6"])
def test_a_budget_is_searched_on_shapes(llama, options, tmp_path, budget, monkeypatch):
    """The density of the net in memory, and no net with values for it."""
    line = [*options, "--budget", budget, "--weighting", "inputs", "--allocation", "global"]
    whole = factorize(llama, tmp_path / "whole", *line)
    monkeypatch.setattr("lit_compress.models.accounting.with_zeros", lambda net: pytest.fail("values"))
    blocks = factorize(llama, tmp_path / "blocks", *line, "--by_block", "float32")
    assert blocks["budget"] == whole["budget"] | {key: blocks["budget"][key] for key in ("reached", "off")}
    assert blocks["budget"]["met"] and same(tmp_path / "blocks", tmp_path / "whole") < 1e-5
    assert blocks["budget"]["reached"] == pytest.approx(whole["budget"]["reached"], rel=0.01)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--weighting", "fisher", "--estimator", "batch"], "--by_block: estimator 'batch' needs whole batches"),
        (["--scope", "all"], "nearest: blocks"),
        (["--refine", "0"], "--refine: 0 is below 1, the smallest valid value"),
        (["--refine", "5", "--method", "SliceGPT"], "--refine: SliceGPT leaves no dense hidden states"),
        (["--merge", "never"], "--by_block: --merge never needs the whole model"),
        (
            ["--budget", "speedup=2x"],
            "--by_block: budget 'speedup=2x' is measured on the whole model; nearest: flops=0.5",
        ),
    ],
)
def test_what_cannot_go_by_blocks_is_one_line(llama, options, tmp_path, capsys, more, message):
    density = [] if "--budget" in more else ["--density", "0.5"]
    line = fails(capsys, "factorize", llama, tmp_path / "out", *options, *density, "--by_block", "float32", *more)
    assert message in line and not (tmp_path / "out.by_block").exists()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A Llama that gives vectors, and texts for it, in rows of one and of two."""
    folder, rng = tmp_path_factory.mktemp("embedder"), random.Random(0)
    write_backbone(folder / "model", "llama", "stsb_embedding", initializer_range=0.3)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(40)]
    for split, some in (("train", texts[:28]), ("validation", texts[28:])):
        rows = {
            "single": [{"text": text} for text in some],
            "pairs": [{"query": a, "document": b} for a, b in zip(some[::2], some[1::2], strict=True)],
        }
        for name, lines in rows.items():
            (folder / name).mkdir(exist_ok=True)
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("rows", ["single", "pairs"])
@pytest.mark.parametrize("weighting", [[], ["--weighting", "fisher", "--axis", "both"]])
def test_vectors_by_blocks_are_those_of_the_net_in_memory(embedder, rows, weighting, tmp_path, monkeypatch):
    """Of single texts the dense net's own vectors, which no whole net gives, are what the export is measured by."""
    line = ["--data.task", "custom", "--data.custom.kind", "embedding", "--data.path", embedder / rows,
            "--density", "0.6", "--data.batch_size", "5", *weighting]  # fmt: skip
    line += ["--data.custom.text", "[query,document]"] if rows == "pairs" else []
    for module in ("evaluation.divergence", "cli.by_block"):
        monkeypatch.setattr(f"lit_compress.{module}.ROWS", 5)
    with monkeypatch.context() as patch:
        patch.setattr("lit_compress.export.folder.check_export", lambda net, path: 0.0)
        whole = factorize(embedder / "model", tmp_path / "whole", *line)
    monkeypatch.setattr("lit_compress.data.targets.load_finetuned", lambda *args: pytest.fail("a whole net"))
    monkeypatch.setattr("lit_compress.models.backbones.load_net", lambda *args: pytest.fail("a whole net"))
    blocks = factorize(embedder / "model", tmp_path / "blocks", *line, "--by_block", "float32")
    assert same(tmp_path / "blocks", tmp_path / "whole") < 1e-5
    for stage in ("dense", "compressed"):
        assert blocks[stage]["metric"] == pytest.approx(whole[stage]["metric"], abs=1e-5), stage
    assert blocks["metric"] == whole["metric"]
    if not weighting:  # of 5 drawn rows
        for key in ("estimated_loss", "measured_loss"):
            assert blocks["calibration"][key] == pytest.approx(whole["calibration"][key], rel=1e-4, abs=1e-6)
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert (tmp_path / "blocks" / name).read_text() == (tmp_path / "whole" / name).read_text()


@pytest.mark.parametrize("how", [[], ["--by_block", "float32"]])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_export_has_the_dtype_of_the_model_that_was_given(how, dtype, llama, options, tmp_path):
    """And the dense model in the report the bytes of its file."""
    assert options[:2] == ["--dtype", "float32"]
    asked = options if dtype else options[2:]
    report = factorize(llama, tmp_path / "out", *asked, "--density", "0.5", *how)
    assert report["dtype"] == stored_dtype(tmp_path / "out") == (dtype or "bfloat16")
    assert report["dense"]["bytes"] == net_bytes(llama)
    assert (report["ratios"]["bytes"] < 1) == (dtype is None)


@pytest.mark.parametrize(
    "how", [[], ["--removes", "structures", "--shape", "uniform"], ["--weighting", "none", "--rank", "5"]]
)
def test_blocks_are_refined_as_in_memory_also_after_a_kill(llama, options, tmp_path, how, monkeypatch):
    """Each step of both ways reads the same states; a process that dies at the second block goes on with it."""
    line = [*options, *([] if "--rank" in how else ["--density", "0.6"]), *how, "--refine", "20"]
    whole = factorize(llama, tmp_path / "whole", *line)
    blocks = factorize(llama, tmp_path / "blocks", *line, "--by_block", "float32")
    assert same(tmp_path / "blocks", tmp_path / "whole") < 1e-5
    told, other = blocks["refined"], whole["refined"]
    assert told | {"seconds": 0} == {
        name: pytest.approx(value, rel=1e-3) for name, value in (other | {"seconds": 0}).items()
    }
    assert len(told["after"]) == 3 and all(b < a for a, b in zip(told["before"], told["after"], strict=True))
    if how:
        return
    once = Refinement._write

    def dying(self, number, block):
        if number == 1:
            raise KeyboardInterrupt
        return once(self, number, block)

    monkeypatch.setattr(Refinement, "_write", dying)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        factorize(llama, tmp_path / "killed", *line, "--by_block", "float32")
    monkeypatch.setattr(Refinement, "_write", once)
    report = factorize(llama, tmp_path / "killed", *line, "--by_block", "float32")
    assert same(tmp_path / "killed", tmp_path / "blocks") == 0 and report["refined"]["after"] == told["after"]


def test_an_encoder_is_refined_by_blocks_as_in_memory(tmp_path):
    """Its last block's outputs go to the head, and its texts have padding."""
    model = write_backbone(tmp_path / "bert", "bert", "stsb", num_hidden_layers=3, initializer_range=0.2)
    rows = [
        {"first": " ".join(random.Random(i).choices(WORDS, k=3 + i % 9)), "second": WORDS[i % 7], "score": i % 5}
        for i in range(40)
    ]
    for split, some in (("train", rows[:28]), ("validation", rows[28:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    line = ["--data.path", tmp_path, "--data.custom.text", "[first,second]", "--data.custom.label", "score",
            "--data.task", "custom", "--data.custom.kind", "regression", "--data.batch_size", "5",
            "--density", "0.5", "--refine", "20"]  # fmt: skip
    whole = factorize(model, tmp_path / "whole", *line)
    blocks = factorize(model, tmp_path / "blocks", *line, "--by_block", "float32")
    assert same(tmp_path / "blocks", tmp_path / "whole") < 1e-5
    for told in (whole["refined"], blocks["refined"]):
        assert len(told["after"]) == 3 and all(b < a for a, b in zip(told["before"], told["after"], strict=True))


@pytest.mark.parametrize("folder", TRAINED)
def test_a_disk_that_fills_while_a_block_is_refined_is_one_line(llama, options, tmp_path, folder):
    """The files before it are kept, and the same command goes on with them to the same tensors."""
    line = [*options, "--density", "0.6", "--refine", "5", "--by_block", "float32"]
    out, errors = tmp_path / "out", tmp_path / "errors"
    words = [str(word) for word in ("factorize", llama, out, *line)]
    full = processes.fork(words, errors, met=(tmp_path, Fill(("open", f"out.by_block/{folder}/states-00002"), 1000)))
    full.join()
    said = errors.read_text()
    assert full.exitcode == 2 and "Traceback" not in said, said[-3000:]
    assert said.splitlines()[-1].startswith("error: ") and not out.exists()
    assert (tmp_path / "out.by_block" / folder / "states-00001").is_file()
    processes.finish(processes.fork(words, errors), errors)
    factorize(llama, tmp_path / "straight", *line)
    assert same(out, tmp_path / "straight") == 0
