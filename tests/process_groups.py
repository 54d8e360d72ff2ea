"""No test leaves a process group of torch.distributed: every later fit of its process would be a rank of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Fail the test that leaves one, and destroy it; a test that fails anyway keeps its own error."""
    try:
        yield
    finally:
        if left := distributed.is_initialized():
            distributed.destroy_process_group()
    if left:
        pytest.fail("the test left a process group of torch.distributed; destroy it in the test", pytrace=False)
