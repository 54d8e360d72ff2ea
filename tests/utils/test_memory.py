"""Freed tensors go back to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_CODE = """
import sys
import torch
from lit_compress.utils.memory import return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if sys.argv[1] == "back":
    return_freed_memory()
torch.ones(8 * 2**20 - 100)  # 32 MiB: from its end on, glibc takes tensors up to this size from its heap
before = resident()
tensors = [torch.ones(2**20) for _ in range(60)]
kept = tensors[-1]
del tensors
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_tensors_go_back():
    """Of 240 MiB 4 are still there; without the call all of it."""

    def left(how):
        plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        line = [sys.executable, "-c", _CODE, how]
        done = subprocess.run(line, capture_output=True, text=True, check=True, env=plain)
        return int(done.stdout) / 2**20

    assert left("back") < 20
    assert left("stay") > 100  # else there is nothing to be mended
