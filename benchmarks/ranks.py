"""A command on several processes of this machine, forks of one that has imported the package and run nothing."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL


def ranks(words: list[str], number: int, prepare: Callable[[], None], said: Path) -> None:
    """Run a command on processes that know of each other as torchrun's do.

    Args:
        words: of the command.
        number: of processes; one is told nothing.
        prepare: is called in every process before the command.
        said: file for what they print.

    Raises:
        RuntimeError: one of them failed; says how they ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    living, codes = {}, {}
    for rank in range(number):
        told = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
        if child := os.fork():
            living[child] = rank
        else:
            _be(words, rank, {name: str(value) for name, value in told.items()} if number > 1 else {}, prepare, said)
    while living:
        child, status = os.waitpid(-1, 0)
        if child in living:
            codes[living.pop(child)] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):  # the others would wait for it
            time.sleep(1)
            for child in living:
                os.kill(child, SIGKILL)
    if any(codes.values()):
        raise RuntimeError(f"{' '.join(words)}: {codes}: {said.read_text()[-2000:]}")


def _be(words: list[str], rank: int, told: dict[str, str], prepare: Callable[[], None], said: Path) -> None:
    """Be ``python -m lit_compress WORDS`` on one rank, and end; nothing is exported or reported."""
    code = 1
    try:
        os.environ.update(told)
        from lightning.pytorch.utilities.rank_zero import rank_zero_only

        from lit_compress.__main__ import main
        from lit_compress.cli import fitting

        vars(rank_zero_only)["rank"] = rank
        assert callable(fitting._report)
        fitting._report = lambda *_: None
        prepare()
        with said.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        main(words)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
