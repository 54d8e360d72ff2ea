"""Freed tensors go back to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from lit_compress.utils.memory import free_memory

_CODE = """
import sys
from contextlib import nullcontext
from lit_compress.utils.memory import freed_memory_returned, return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if sys.argv[1] == "back":
    return_freed_memory()
b"x" * 2**24  # 16 MiB: from its end on, glibc takes tensors up to this size from its heap
if sys.argv[1] == "after":
    with freed_memory_returned():
        pass
with freed_memory_returned() if sys.argv[1] == "inside" else nullcontext():
    before = resident()
    tensors = [b"x" * (2**22 + i) for i in range(60)]  # as a tensor, without the seconds that PyTorch takes to import
    kept = tensors[-1]
    del tensors
    print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_tensors_go_back():
    """Of 240 MiB 4 are still there; without the call all of it."""

    def left(how, **given):
        plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | given
        line = [sys.executable, "-c", _CODE, how]
        done = subprocess.run(line, capture_output=True, text=True, check=True, env=plain)
        return int(done.stdout) / 2**20

    assert left("back") < 20 and left("inside") < 20
    assert left("stay") > 100  # else there is nothing to be mended
    assert left("after") > 100  # a training that makes the same tensors in every step has them at once
    own = {f"MALLOC_{name}_THRESHOLD_": str(2**25) for name in ("MMAP", "TRIM")}
    assert left("back", **own) > 100  # what the user has set stays


def made(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\nSwapFree: 500 kB\nHugePages_Free: 0\n"}


def test_free_memory_is_what_the_machine_has_available(tmp_path):
    assert free_memory(made(tmp_path, MACHINE)) == 8500 * 1024


def test_a_system_that_does_not_say(tmp_path):
    assert free_memory(tmp_path) is None


@pytest.mark.parametrize("path", ["/", "/a/b", "/of/the/host"])
def test_limits_of_containers_count(tmp_path, path):
    """Of version 2, whose group may be named from outside, and of every group above."""
    mounted = "" if path == "/of/the/host" else path.strip("/").split("/")[0] + "/"
    files = {
        "proc/self/cgroup": f"0::{path}\n",
        f"sys/fs/cgroup/{mounted}memory.max": "4000000\n",
        f"sys/fs/cgroup/{mounted}memory.current": "3000000\n",
        f"sys/fs/cgroup/{mounted}memory.stat": "anon 5\ninactive_file 700000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    assert free_memory(made(tmp_path, MACHINE | files)) == 1_700_000
