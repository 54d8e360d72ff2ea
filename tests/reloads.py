"""The other process that loads an export, forked from one that has imported torch and transformers.

``check_export`` starts a process for every export, and most of its seconds go into imports. Here one process per test
session imports what the loader imports, and nothing of this package; every reload is a fork of it. In
tests/export/test_check.py some processes are started anew, as on a user's machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_SERVER = """
import json, os, sys, traceback
import safetensors.torch, torch, transformers
from transformers import dynamic_module_utils, modeling_utils
from transformers.models.auto import modeling_auto
from transformers.models.bert import modeling_bert
print("ready", flush=True)
for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(task["cwd"])
            os.environ.clear()
            os.environ.update(task["env"])
            os.dup2(os.open(task["errors"], os.O_WRONLY | os.O_CREAT), 2)
            os.dup2(2, 1)
            dynamic_module_utils.HF_MODULES_CACHE = task["env"]["HF_MODULES_CACHE"]
            sys.argv = ["-c", *task["argv"]]
            exec(task["code"], {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Reloader:
    """Stands in for :mod:`subprocess` in ``lit_compress.export.check``; the server starts with the first reload."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, command: list[str], cwd: str, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        """Run ``python -I -c CODE ARGUMENTS`` in a fork of the server."""
        assert command[:3] == [sys.executable, "-I", "-c"], command
        if self._server is None:
            self._server = subprocess.Popen(
                [*command[:3], _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=env | {"OMP_NUM_THREADS": "1"}, cwd=tempfile.gettempdir(),
            )  # fmt: skip
            assert self._answer() == "ready"
        assert self._server.stdin is not None
        errors = Path(cwd) / "errors"
        task = {"code": command[3], "argv": command[4:], "cwd": str(cwd), "env": dict(env), "errors": str(errors)}
        self._server.stdin.write(json.dumps(task) + "\n")
        self._server.stdin.flush()
        return subprocess.CompletedProcess(command, int(self._answer()), "", errors.read_text())

    def _answer(self) -> str:
        assert self._server is not None and self._server.stdout is not None
        return self._server.stdout.readline().strip()

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
