"""Decisions of the first process of a run, made before there is a process group; the others take them.

Milliseconds differ between processes, and a branch on the hub may move between two requests. Lightning starts the other
processes at the first stage: they inherit the decisions so far. torchrun and Slurm start all at once: the others
wait at the store of torch.distributed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar

from lightning.fabric.plugins.environments import ClusterEnvironment
from torch import distributed

from lit_compress.run.trainer import bare_trainer
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import from_first, is_first, several

T = TypeVar("T")
DECIDED = "LIT_COMPRESS_DECIDED"  # variable of the environment in which Lightning's processes inherit
MOST = timedelta(minutes=30)  # that a process waits for the first one
_asked = count()


def of_first(name: str, make: Callable[[], T], arguments: Mapping[str, Any]) -> T:
    """Return on every process the plain values that ``make`` returns, which the first one alone calls.

    Args:
        name: of the decision; all processes ask in the same order.
        make: decides.
        arguments: of the Trainer, which say how many processes there are.

    Raises:
        UserError: the first process has failed, or takes longer than :data:`MOST`.
    """
    if several():
        return from_first(make)
    trainer = bare_trainer(arguments)
    if (ranks := trainer.num_devices * trainer.num_nodes) == 1:
        return make()
    environment: ClusterEnvironment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    inherited = json.loads(os.environ.get(DECIDED, "{}"))
    if not environment.creates_processes_externally:
        value = make()
        os.environ[DECIDED] = json.dumps(inherited | {name: value})
        return value
    if name in inherited and not is_first():
        value = inherited.pop(name)
        os.environ[DECIDED] = json.dumps(inherited)
        return value
    store = _store(environment.main_address, environment.main_port, environment.global_rank(), ranks)
    return _at_store(store, f"lit_compress/{next(_asked)}/{name}", make)


@cache
def _store(address: str, port: int, rank: int, ranks: int) -> distributed.Store:
    """Return the store of this process, which is kept: the first process serves it."""
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return next(iter(distributed.rendezvous("env://", rank=rank, world_size=ranks, timeout=MOST)))[0]


def _at_store(store: distributed.Store, key: str, make: Callable[[], T]) -> T:
    if is_first():
        try:
            value = make()
        except BaseException as error:
            store.set(key, json.dumps({"error": str(error) or type(error).__name__}))
            raise
        store.set(key, json.dumps({"value": value}))
        return value
    try:
        told: dict[str, Any] = json.loads(store.get(key))
    except (RuntimeError, distributed.DistError) as error:
        raise UserError(f"no decision from the first process ({error}); see its messages") from error
    if "error" in told:
        raise UserError(f"the first process has failed: {told['error']}")
    return told["value"]
