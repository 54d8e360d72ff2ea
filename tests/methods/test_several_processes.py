"""Several processes make the steps that one process makes with all of their examples: the same losses and gates."""

from __future__ import annotations

import json
import random
from pathlib import Path

import processes
import pytest
import torch
from contract_cases import COMPARED
from safetensors.torch import load_file
from test_contract import check_budget
from tiny import WORDS, make_net, write_backbone

from lit_compress.__main__ import main
from lit_compress.methods.base import send_from_first
from lit_compress.numerics import chunked_logits
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import from_first

# method -> its options beside the teacher; what differs between ranks without dropout are examples only
PRUNE = ["--model.prune.epochs", "2", "--model.prune.learning_rate", "1e-4"]
FINETUNED = [*PRUNE, "--model.prune.init", "finetuned"]
SP3 = [*PRUNE, "--model.prune.start", "0.2", "--model.prune.target_warmup", "0.3",
       "--model.prune.structure_start", "0.5", "--model.prune.tokens", "200"]  # fmt: skip
CASES = {
    "SP3": SP3,
    "SP3-opt": [*SP3, "--model.prune.train_originals", "true"],  # the stream turns: its bases are in the loss, too
    "CoFi": [*FINETUNED, "--model.retrain.epochs", "1"],
    # the first rows go by the first gradients: without labels these are rounding noise, as the net equals its teacher
    "CoFiLoSparse": [*FINETUNED, "--model.prune.interval", "2", "--model.distillation.alpha_labels", "0.5",
                     "--model.retrain.epochs", "1"],
    "LPAF": [*PRUNE, "--model.retrain.epochs", "1"],
    "LoSparse": [*FINETUNED, "--model.prune.interval", "2"],
    # Moments of all ranks' examples; updates of factors. With exact labels rounding decides on
    # the signs of some components, which the random half of an update does not follow.
    "SecondOrder": [
        "--model.retrain.labels", "drawn", "--model.retrain.epochs", "1",
        "--model.retrain.parameters", "lora", "--model.retrain.lora.rank", "2", "--model.retrain.learning_rate", "1e-2",
    ],
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A method, its options, and a dense net without dropout."""
    method, _, family = request.param.partition("-")
    folder = tmp_path_factory.mktemp("teacher")
    write_backbone(folder, family or "bert", "sst2")
    make_net(family or "bert", dropout=0.0, initializer_range=0.2).save_pretrained(folder)
    return method, [*CASES[request.param], "--model.backbone", str(folder), "--model.teacher", str(folder)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of one length: a mean over tokens is then the mean of the ranks' means."""
    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    for split, rows in (("train", 100), ("validation", 40)):
        lines = [{"sentence": " ".join(rng.choices(WORDS, k=7)), "label": i % 2} for i in range(rows)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def options(case: tuple[str, list[str]], texts: Path, batch_size: int) -> list[str]:
    method, own = case
    return [
        "fit", "--model", method, "--model.density", "0.5", "--model.distillation.alpha_layers", "1",
        *own, "--data.task", "sst2",
        "--data.path", str(texts), "--data.batch_size", str(batch_size), "--trainer.accelerator", "cpu",
        "--trainer.enable_progress_bar", "false", "--trainer.callbacks+=processes.KeepSteps",
    ]  # fmt: skip


# over 10 s: a fit by one process, and one by two for each strategy
@pytest.mark.slow
def test_two_processes_make_the_steps_of_one(case, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
    main([*options(case, texts, 20), "--run_dir", str(tmp_path / "one")])
    stages = sorted(path.parent.name for path in (tmp_path / "one").glob("*/steps0.pt"))
    assert stages
    for strategy in ("ddp", "fsdp2"):
        more = ["--trainer.strategy", strategy, "--trainer.devices", "2", "--run_dir", str(tmp_path / strategy)]
        processes.fork_ranks([*options(case, texts, 10), *more], tmp_path / "errors")
        for stage in stages:
            one, *ranks = (
                torch.load(tmp_path / run / stage / f"steps{rank}.pt", weights_only=True)
                for run, rank in (("one", 0), (strategy, 0), (strategy, 1))
            )
            for rank in ranks:
                assert [loss for loss, _ in rank] == pytest.approx([loss for loss, _ in one], rel=1e-3, abs=1e-3)
                assert rank[0][0] == pytest.approx(one[0][0], rel=1e-4, abs=1e-6)
                for (_, gates), (_, expected) in zip(rank, one, strict=True):
                    assert gates.keys() == expected.keys()
                    assert all(torch.allclose(gates[n], expected[n], atol=2e-3) for n in gates)
        check_budget(case[0], tmp_path / strategy)


# over 10 s: two fits by two processes, and one by one
@pytest.mark.slow
def test_a_net_that_writes_on_two_processes(tmp_path, monkeypatch):
    """Its output layer runs chunk by chunk outside the wrapped forward, and again in the backward."""
    monkeypatch.setattr("lit_compress.cli.fitting._report", lambda *_: None)
    monkeypatch.setattr(chunked_logits, "POSITIONS", 25)
    rng, tied = random.Random(0), {"dropout": 0.0, "tie_word_embeddings": True}
    folder = write_backbone(tmp_path / "teacher", "t5", "xsum")
    make_net("t5", "xsum", **tied, vocab_size=4 + len(WORDS)).save_pretrained(folder)
    texts = tmp_path / "texts"
    texts.mkdir()
    for split, rows in (("train", 64), ("validation", 12)):
        words = [" ".join(rng.choices(WORDS, k=15)) for _ in range(rows)]
        lines = [{"document": text, "summary": text} for text in words]
        (texts / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = [
        "fit", "--model", "LPAF", "--model.density", "0.5", "--model.distillation.alpha_layers", "1", *CASES["LPAF"],
        "--model.backbone", str(folder), "--model.teacher", str(folder), "--model.prune.learning_rate", "1e-2",
        "--data.task", "xsum", "--data.path", str(texts), "--data.max_length", "15", "--trainer.accelerator", "cpu",
        "--trainer.enable_progress_bar", "false", "--trainer.callbacks+=processes.KeepSteps",
        "--trainer.callbacks+=processes.SmallChunks",
        "--data.target_length", "16", "--data.num_beams", "1",
    ]  # fmt: skip
    main([*own, "--data.batch_size", "16", "--run_dir", str(tmp_path / "one")])
    for strategy in ("ddp", "fsdp2"):
        more = ["--trainer.strategy", strategy, "--trainer.devices", "2", "--run_dir", str(tmp_path / strategy)]
        processes.fork_ranks([*own, "--data.batch_size", "8", *more], tmp_path / "errors")
        for stage in ("prune", "retrain"):
            one, other = (
                torch.load(tmp_path / run / stage / "steps0.pt", weights_only=True) for run in ("one", strategy)
            )
            losses = [loss for loss, _ in one]
            assert len(losses) > 3 and losses[-1] != pytest.approx(losses[0], rel=1e-3)
            assert [loss for loss, _ in other] == pytest.approx(losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "strategy"), [("LPAF", "fsdp2"), ("CoFi", "ddp")])
def test_four_processes_make_the_steps_of_one(method, strategy, tmp_path, monkeypatch):
    """Of 44 training and 23 dev examples, which 4 processes cannot share evenly in every batch, or at all."""
    monkeypatch.setattr("lit_compress.cli.fitting._report", lambda *_: None)
    folder, rng = tmp_path / "texts", random.Random(0)
    write_backbone(tmp_path / "teacher", "bert", "sst2")
    make_net("bert", dropout=0.0, initializer_range=0.2).save_pretrained(tmp_path / "teacher")
    folder.mkdir()
    for split, rows in (("train", 44), ("validation", 23)):
        lines = [{"sentence": " ".join(rng.choices(WORDS, k=7)), "label": i % 2} for i in range(rows)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    teacher = str(tmp_path / "teacher")
    own = (method, [*CASES[method], "--model.backbone", teacher, "--model.teacher", teacher])
    main([*options(own, folder, 16), "--run_dir", str(tmp_path / "one")])
    more = ["--trainer.strategy", strategy, "--trainer.devices", "4", "--run_dir", str(tmp_path / "four")]
    processes.fork_ranks([*options(own, folder, 4), *more], tmp_path / "errors", 4)
    one, four = (json.loads((tmp_path / run / "stages.json").read_text()) for run in ("one", "four"))
    for expected, record in zip(one, four, strict=True):
        assert record["steps"] == expected["steps"]
        assert record["metric"] == pytest.approx(expected["metric"], abs=1e-6), record["name"]
        net, other = (
            load_file(tmp_path / run / record["name"] / "net" / "model.safetensors") for run in ("one", "four")
        )
        assert net.keys() == other.keys()
        assert all(torch.allclose(net[name], other[name], atol=5e-4) for name in net), record["name"]


def test_the_contract_leaves_out_those_that_are_compared_here():
    assert {name.partition("-")[0] for name in CASES} == set(COMPARED)


def _send(rank: int, folder: str) -> None:
    net = make_net("bert", seed=rank)
    net.register_buffer("mark", torch.full((2,), float(rank)))
    send_from_first(net, torch.device("cpu"))
    torch.save(net.state_dict(), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_every_rank_gets_the_net_of_the_first(tmp_path):
    """Factors may differ between machines; shards of two factorizations would be of neither."""
    processes.on_ranks(_send, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first) and not first["mark"].any()
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(first[name], make_net("bert").state_dict()[name])


def _ask(rank: int, folder: str) -> None:
    def fail() -> None:
        raise UserError(f"said by {rank}")

    found: list[dict[str, int] | str] = [from_first(lambda: {"rank": rank})]
    try:
        from_first(fail)
    except UserError as error:
        found.append(str(error))
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_the_first_rank_decides_for_all(tmp_path):
    """Ranks of matrices, and errors: no rank waits for one that has stopped."""
    processes.on_ranks(_ask, tmp_path)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [{"rank": 0}, "said by 0"]
