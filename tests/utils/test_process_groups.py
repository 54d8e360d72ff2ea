"""The guard of process_groups.py, in a session of pytest with three tests."""

import pytest

pytest_plugins = "pytester"

_TESTS = """
from torch import distributed

def begin():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

def test_leaves_one():
    begin()

def test_fails_itself():
    begin()
    assert False, "its own error"

def test_finds_none():
    assert not distributed.is_initialized()
"""


def test_a_test_that_leaves_a_process_group_fails(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from process_groups import pytest_runtest_call")
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(
        ["the test left a process group of torch.distributed; *", "*AssertionError: its own error"]
    )
