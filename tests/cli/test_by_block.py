"""``factorize --by_block`` after kills, its report, its refusals. Equality with a model in memory: test_golden.py."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import contextmanager

import pytest
import torch
from mistakes import fails
from tiny import WORDS, make_net, write_backbone, write_texts
from transformers import AutoModelForCausalLM

from lit_compress.__main__ import main
from lit_compress.cli.by_block import _Work
from lit_compress.export.check import check_export
from lit_compress.models.files import INDEX, load_tensors, net_bytes, stored_dtype, write_shard
from lit_compress.models.storage import load_net
from lit_compress.utils import files

KFAC = ["--density", "0.5", "--dtype", "float32"]


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
def data(tmp_path_factory):
    folder = write_texts(tmp_path_factory.mktemp("texts"), shortest=0)
    words = f"--data.task plain_text --data.path {folder} --data.max_length 16 --data.batch_size 4"
    return words.split()


def factorize(model, out, *options):
    main(["factorize", str(model), str(out), *map(str, options), "--by_block"])
    return json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def kfac(llama, data, tmp_path_factory):
    """An export by K-FAC."""
    out = tmp_path_factory.mktemp("kfac") / "out"
    factorize(llama, out, *data, *KFAC)
    return out


def dies_at(patch, place):
    """Let a process die just before a file or folder of that name is there."""

    def dying(make):
        @contextmanager
        def context(path):
            with make(path) as temporary:
                yield temporary
                if place in str(path):
                    raise KeyboardInterrupt

        return context

    def write(tensors, path):
        if place in str(path):
            raise KeyboardInterrupt
        write_shard(tensors, path)

    for module in ("calibration.walk", "cli.by_block"):
        patch.setattr(f"lit_compress.{module}.atomic_folder", dying(files.atomic_folder))
    patch.setattr("lit_compress.cli.by_block.write_shard", write)


KILLS = {
    # options, where it dies one time after the other, and the blocks that are measured, over all times
    "kfac": ([], ["dense/states-00002", "ranks-00001", "gradients-00001", "model-00003"], [2, 1, 1, 0]),
    "inputs": (["--weighting", "inputs"], ["calibration/states-00002", "compressed/states-00001"], [0, 1, 2]),
    "refined": (["--weighting", "none", "--refine", "5"], ["refined/states-00002", "model-00003"], [0, 1, 2]),
}


@pytest.mark.parametrize("case", KILLS)
def test_a_killed_run_goes_on(case, llama, data, kfac, tmp_path, monkeypatch):
    """With the block that it was at, to the same tensors."""
    more, places, expected = KILLS[case]
    line, measured, whole = [*data, *KFAC, *more], [], _Work._measure
    straight = kfac if case == "kfac" else tmp_path / "straight"
    if case != "kfac":
        factorize(llama, straight, *line)
    monkeypatch.setattr(_Work, "_measure", lambda self, i, *args: measured.append(i) or whole(self, i, *args))
    for place in places:
        with monkeypatch.context() as patch, pytest.raises(BaseException):  # noqa: B017
            dies_at(patch, place)
            factorize(llama, tmp_path / "out", *line)
        assert not (tmp_path / "out").exists()
    reports = [factorize(llama, tmp_path / "out", *line), json.loads((straight / "report.json").read_text())]
    assert measured == expected and not (tmp_path / "out.by_block").exists()
    one, other = load_tensors(tmp_path / "out"), load_tensors(straight)
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
    for report in reports:
        refined = report["refined"] or {"before": [], "after": []}
        assert all(after < before for before, after in zip(refined["before"], refined["after"], strict=True))
    for key in ("dense", "compressed", "calibration"):
        assert reports[0][key] == reports[1][key]


def test_other_dev_rows_are_refused_although_no_training_row_is_read(llama, data, tmp_path, monkeypatch, capsys):
    texts = shutil.copytree(data[3], tmp_path / "texts")
    line = [*data[:3], texts, *data[4:], *KFAC, "--weighting", "none"]
    with monkeypatch.context() as patch, pytest.raises(BaseException):  # noqa: B017
        dies_at(patch, "model-00002")
        factorize(llama, tmp_path / "out", *line)
    (dev := next(texts.glob("validation*"))).write_text(f"{dev.read_text()} more\n")
    said = fails(capsys, "factorize", llama, tmp_path / "out", *line, "--by_block")
    assert "holds unfinished work of other settings or data; give the same, or remove it" in said


def test_the_export_loads_in_another_process(kfac):
    """As any export: alone, in float32, with this package and without; ``factorize`` has not checked it."""
    report = json.loads((kfac / "report.json").read_text())
    memory = report["by_block"]["memory"]
    assert memory["bound"] == memory["outside"] + 2 * memory["block"] + memory["statistics"]
    assert report["export_difference"] is None and len(set(report["ranks"].values())) > 2
    assert check_export(load_net(kfac), kfac) <= 1e-5
    with pytest.raises(KeyError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(kfac)


def test_a_budget_is_searched_on_shapes_and_the_dtype_is_the_given_one(llama, data, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_compress.models.accounting.with_random_values", lambda net: pytest.fail("values"))
    report = factorize(llama, tmp_path / "out", *data, "--weighting", "none", "--budget", "params=25K")
    assert report["budget"]["met"] and report["budget"]["reached"] > 24_000
    assert report["dtype"] == stored_dtype(tmp_path / "out") == "bfloat16"
    assert report["dense"]["bytes"] == net_bytes(llama) and report["ratios"]["bytes"] < 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--refine", "0"], "--refine: 0 is below 1, the smallest valid value"),
        (
            ["--refine", "5", "--method", "SliceGPT"],
            "--by_block: SliceGPT needs the whole model in memory; leave the o",
        ),
        (["--vocabulary", "data"], "--by_block: --vocabulary data needs the whole model"),
        (["--budget", "speedup=2x"], "budget 'speedup=2x' is measured on the whole model; nearest: flops=0.5"),
        (["--method", "LLMPruner", "--density", "1"], "at density 1 nothing is compressed; nearest: 0.9"),
        (["--method", "LLMPruner", "--density", "0.001"], "model.density: 0.001 cannot be reached by LLMPruner"),
        (["--by_block", "bfloat16"], "by_block: 'bfloat16' is not valid"),
    ],
)
def test_what_cannot_go_by_blocks_is_one_line(llama, data, tmp_path, capsys, more, message):
    density = [] if {"--budget", "--density"} & {*more} else ["--density", "0.5"]
    line = fails(capsys, "factorize", llama, tmp_path / "out", *data, *density, "--by_block", *more)
    assert message in line and not (tmp_path / "out.by_block").exists()


@pytest.mark.parametrize(("rows", "weighting"), [("single", "kfac"), ("pairs", "fisher")])
def test_vectors_are_measured_as_in_memory(rows, weighting, tmp_path, monkeypatch):
    """Of single texts the dense net's own vectors, which no whole net gives, are what the export is measured by."""
    rng = random.Random(0)
    write_backbone(tmp_path / "model", "llama", "stsb_embedding", initializer_range=0.3)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(40)]
    for split, some in (("train", texts[:28]), ("validation", texts[28:])):
        lines = [{"text": text} for text in some] if rows == "single" else [
            {"query": a, "document": b} for a, b in zip(some[::2], some[1::2], strict=True)]  # fmt: skip
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = ["--data.task", "custom", "--data.custom.kind", "embedding", "--data.path", tmp_path,
            "--density", "0.6", "--data.batch_size", "5", "--weighting", weighting]  # fmt: skip
    line += ["--data.custom.text", "[query,document]"] if rows == "pairs" else []
    with monkeypatch.context() as patch:
        patch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
        main(["factorize", str(tmp_path / "model"), str(tmp_path / "whole"), *map(str, line)])
    monkeypatch.setattr("lit_compress.data.encode.load_finetuned", lambda *args: pytest.fail("a whole net"))
    monkeypatch.setattr("lit_compress.models.backbones.load_net", lambda *args: pytest.fail("a whole net"))
    blocks = factorize(tmp_path / "model", tmp_path / "blocks", *line)
    whole = json.loads((tmp_path / "whole" / "report.json").read_text())
    for stage in ("dense", "compressed"):
        assert blocks[stage]["metric"] == pytest.approx(whole[stage]["metric"], abs=1e-5), stage
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert (tmp_path / "blocks" / name).read_text() == (tmp_path / "whole" / name).read_text()
