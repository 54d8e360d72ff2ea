"""Choices before a run starts: the tokens that its export keeps, and the density that meets its budget.

Milliseconds differ between processes, and a branch on the hub may move between their requests. So the first process of
a run finds the density that meets a speed-up, and the commits of names, and the others read them from the run folder.
There is no process group yet to wait in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lit_compress.export.folder import read_task
from lit_compress.export.report import reading_length
from lit_compress.export.speed_asked import Place, bytes_of_shapes, find_place, programs
from lit_compress.export.vocabulary import tokens_kept
from lit_compress.methods.base import Method
from lit_compress.run.folder import Run, is_first_process
from lit_compress.run.runner import Components, shapes_of
from lit_compress.run.solve import Storage, check_choices, solve, solve_speed
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
MOST = 1800.0  # seconds that a process waits for the first one
STALE = 30.0  # seconds after which a failure is that of this start: at a new start the first process removes the file


def settle_storage(parts: Components) -> Storage:
    """Return the form of the export with the number of tokens that ``vocabulary data`` leaves.

    It is counted only where budgets or scope ``all`` need it.

    Raises:
        UserError: the vocabulary cannot be cut.
    """
    rule = parts.method.rule
    counted = parts.method.budget is not None or (rule is not None and rule.scope == "all")
    if parts.storage.choices.vocabulary != "data" or not counted:
        return parts.storage
    return replace(parts.storage, tokens=tokens_kept(shapes_of(parts.method), parts.data))


def solve_budget(parts: Components, build: Callable[[float], Method]) -> float:
    """Return the density that meets the budget of a method; ``build`` makes the method with another density.

    Raises:
        UserError: the budget cannot be met, or does not go with the price of a density.
    """
    method = parts.method
    assert method.budget is not None
    if method.budget.kind == "density" and method.rule and method.rule.price != "parameters":
        raise UserError(
            f"model.budget: '{method.budget.asked}' counts parameters, model.price is '{method.rule.price}'; nearest: "
            "model.density, or model.price parameters"
        )
    net = shapes_of(method)
    check_choices(parts.storage.choices, method, net)
    if method.budget.kind == "speedup":
        with programs(net, parts.data.tokenizer, speed_place(parts, net)) as timed:
            return solve_speed(method.budget, build, net, timed, parts.storage)
    written = partial(bytes_of_shapes, tokenizer=parts.data.tokenizer, choices=parts.storage.choices)
    return solve(method.budget, build, net, reading_length(net, read_task(parts.data)), parts.storage, written)


def speed_place(parts: Components, net: PreTrainedModel) -> Place:
    """Return where the speed-up of a budget is measured, as :func:`find_place`; only shapes of ``net`` are read."""
    assert parts.method.budget is not None
    try:
        texts = parts.data.train_size() > 0
    except UserError:
        texts = False
    length = reading_length(net, read_task(parts.data))
    return find_place(parts.method.budget, parts.storage.choices, net, length, texts)


def density_of_first(run: Run, asked: str) -> float:
    """Return the density that the first process finds for a budget; wait for it.

    Raises:
        UserError: the first process has failed, or takes longer than :data:`MOST`.
    """
    return _from_first(run, lambda: run.density(asked), f"model.budget: '{asked}' has no density")


def removal_of_first(run: Run, asked: list[str]) -> dict[str, Any]:
    """Return the first process's choice for what is ``asked``, as :meth:`Run.removal`; wait for it.

    Raises:
        UserError: as :func:`density_of_first`.
    """
    return _from_first(run, lambda: run.removal(asked), "model.retrain.removes: nothing was chosen")


def config_of_first(run: Run) -> dict[str, Any]:
    """Return the config of a run, with the commits of its names, that the first process writes; wait for it.

    Raises:
        UserError: as :func:`density_of_first`.
    """
    there = run.folder / "config.yaml"
    return _from_first(run, lambda: run.config() if there.is_file() else None, "run_dir: there is no config")


def change_of_first(run: Run, config: dict[str, Any]) -> None:
    """Wait until the first process has given a run this config, and dropped the checkpoints of another model.

    Raises:
        UserError: as :func:`density_of_first`; or the run cannot have it.
    """

    def there() -> bool | None:
        return ((run.folder / "config.yaml").is_file() and not run.check_same(config, allowed=True)) or None

    _from_first(run, there, "allow_changed: the run has another config")


def _from_first(run: Run, read: Callable[[], T | None], lack: str) -> T:
    """Return the result of ``read`` once it is not None; ``lack`` is the start of an error."""
    start, failed = time.monotonic(), 0.0
    while (value := read()) is None:
        time.sleep(0.2)
        file, now = _failure(run), time.monotonic()
        failed = (failed or now) if file.is_file() else 0.0
        if failed and now - failed > STALE:
            raise UserError(f"the first process has failed: {file.read_text().strip()}")
        if now - start > MOST:
            raise UserError(f"{lack} from the first process after {MOST / 60:.0f} minutes; see its messages")
    return value


@contextmanager
def failure_told(run: Run) -> Iterator[None]:
    """Leave a file next to the run folder if the first of several processes fails, so that no other waits for it.

    The others must not read the density of an earlier start, which was killed before the run began.
    """
    several = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1) > 1
    if not is_first_process() or not several:
        yield
        return
    file = _failure(run)
    file.unlink(missing_ok=True)
    if not run.started:
        (run.folder / "budget.json").unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, f"{error or type(error).__name__}\n")
        raise


def _failure(run: Run) -> Path:
    return run.folder.with_name(f"{run.folder.name}.failed")
