"""Shared by all tests: one thread, no network, a cache of their own, tiny nets and data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
# sitecustomize.py cuts off the processes that tests start, too
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))

import hub as small_hub
import offline
import pytest
import torch
from quick import quick_runs
from reloads import Reloader
from stage_fixtures import dense, fit  # noqa: F401
from tiny import short_options, write_bert, write_sentences

from lit_compress.utils import devices

torch.set_num_threads(1)
offline.refuse()

SHARED = Path(os.environ.get("LIT_COMPRESS_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the contract test take a method of another package: ``pytest tests/test_contract.py --method mine.Mine``."""
    parser.addoption("--method", help="import path of the method that the contract test takes")


def pytest_configure(config: pytest.Config) -> None:
    """Pass ``--method`` on to the modules of tests and to other processes."""
    if method := config.getoption("--method"):
        os.environ["LIT_COMPRESS_METHOD"] = method


# files whose tests run, write or load whole models, seconds each
OF_RUNS = ("test_commands.py", "test_card.py", "test_own_code.py", "test_splits.py",
           "test_guard.py", "test_finite_steps.py", "test_distilling.py", "test_workers.py")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of whole commands, and those across rooms, as slow."""
    for item in items:
        folder, file = item.path.parent, item.path.name
        if (
            folder.name in ("cli", "api")
            or file in OF_RUNS
            or (folder == Path(__file__).parent and file not in ("test_house.py", "test_project.py"))
        ):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Let no test leave a process group of torch.distributed: every later fit of its process would be a rank of it."""
    try:
        yield
    finally:
        if left := torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if left:
        pytest.fail("the test left a process group of torch.distributed; destroy it in the test", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["LIT_COMPRESS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _quick() -> Iterator[None]:
    """Load exports in forks of one process (reloads.py); draw and time little (quick.py)."""
    reloader = Reloader()
    with pytest.MonkeyPatch.context() as patch, quick_runs():
        patch.setattr("lit_compress.export.check.subprocess", reloader)
        yield
    reloader.close()


@pytest.fixture(autouse=True)
def _own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device that a command of a test names is not the next test's."""
    monkeypatch.setattr(devices, "_asked", devices._asked)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[small_hub.Hub]:
    """An empty hub on this machine, which this process asks, with an empty cache."""
    with small_hub.running(tmp_path / "hub_cache") as made:
        yield made


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real weights and data: the folder LIT_COMPRESS_SHARED, by default `shared` beside the checkout."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"no real data at {SHARED}; set LIT_COMPRESS_SHARED to the folder that has data/ and models/")
    return SHARED


@pytest.fixture(scope="session")
def bert_base():
    """BERT-base without values."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", num_labels=2))


@pytest.fixture(scope="session")
def tiny_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a 2-layer BERT and a WordPiece tokenizer over a few words."""
    return write_bert(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SST-2-shaped files: 100 training and 40 validation sentences, half of them positive."""
    return write_sentences(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def short_run(tiny_backbone: Path, tiny_data: Path) -> list[str]:
    """Options of a whole run in a second or two, to which a test adds method, density and run folder."""
    return short_options(tiny_backbone, tiny_data)
