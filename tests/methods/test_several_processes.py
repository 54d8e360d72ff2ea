"""Several processes make the steps that one process makes with all of their examples: the same losses and gates."""

from __future__ import annotations

import json
import random
from pathlib import Path

import processes
import pytest
import torch
from contract_cases import COMPARED
from test_contract import check_budget
from tiny import WORDS, make_net, write_backbone, write_rows

from lit_compress.__main__ import main
from lit_compress.methods.base import send_from_first
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import from_first

# method -> its options beside the teacher; what differs between ranks without dropout are examples only
PRUNE = ["--model.prune.epochs", "2", "--model.prune.learning_rate", "1e-4"]
FINETUNED = [*PRUNE, "--model.prune.init", "finetuned"]
SP3 = [*PRUNE, "--model.prune.start", "0.2", "--model.prune.target_warmup", "0.3",
       "--model.prune.structure_start", "0.5", "--model.prune.tokens", "200"]  # fmt: skip
CASES = {
    "SP3": SP3,
    "SP3-opt": SP3,  # the stream turns: its bases are in the loss, too
    "CoFi": [*FINETUNED, "--model.retrain.epochs", "1"],
    # the first rows go by the first gradients: without labels these are rounding noise, as the net equals its teacher
    "CoFiLoSparse": [*FINETUNED, "--model.prune.interval", "2", "--model.distillation.alpha_labels", "0.5",
                     "--model.retrain.epochs", "1"],
    "LPAF": [*PRUNE, "--model.retrain.epochs", "1"],
    "LoSparse": [*FINETUNED, "--model.prune.interval", "2"],
    # moments of all ranks' examples
    "SecondOrder": ["--model.retrain.epochs", "1", "--model.recompute", "true"],
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A method, its options, and a dense net without dropout."""
    method, _, family = request.param.partition("-")
    folder = write_backbone(tmp_path_factory.mktemp("teacher"), family or "bert", "sst2")
    make_net(family or "bert", dropout=0.0, initializer_range=0.2).save_pretrained(folder)
    return method, [*CASES[request.param], "--model.backbone", str(folder), "--model.teacher", str(folder)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of one length: a mean over tokens is then the mean of the ranks' means."""
    rng = random.Random(0)
    rows = [{"sentence": " ".join(rng.choices(WORDS, k=7)), "label": i % 2} for i in range(140)]
    return write_rows(tmp_path_factory.mktemp("texts"), train=rows[:100], validation=rows[100:])


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
