"""Locks: one process has it, a dead one has not, one of another machine is believed."""

from __future__ import annotations

import os
import signal

from lit_compress.utils.locks import host, owner_of, try_lock


def in_fork(work):
    """Run ``work`` in another process and return its exit code."""
    if not (pid := os.fork()):
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def taken(file):
    with try_lock(file) as lock:
        return int(lock.taken)


def test_only_one_process_has_it_until_it_frees_it(tmp_path):
    file = tmp_path / "locks" / "a"
    with try_lock(file) as lock:
        assert lock.taken and owner_of(file) == f"{host()} {os.getpid()}"
        assert in_fork(lambda: taken(file)) == 0
        with try_lock(file) as second:
            assert not second.taken and second.owner.endswith(str(os.getpid()))
    assert owner_of(file) is None and in_fork(lambda: taken(file)) == 1


def test_a_killed_process_frees_it_when_the_process_it_started_is_dead_too(tmp_path):
    file, (read, write) = tmp_path / "a", os.pipe()
    if not (parent := os.fork()):
        with try_lock(file):
            if not os.fork():  # the one that does the work; a fork has the parent's descriptors
                os.write(write, str(os.getpid()).encode())
                signal.pause()
            signal.pause()
    child = int(os.read(read, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert owner_of(file) == f"{host()} {parent}"
    os.kill(child, signal.SIGKILL)
    while owner_of(file):
        pass
    assert taken(file)


def test_the_lock_of_another_machine_is_not_stolen(tmp_path):
    (tmp_path / "a").write_text("elsewhere 12")
    assert not taken(tmp_path / "a") and owner_of(tmp_path / "a") == "elsewhere 12"
    assert (tmp_path / "a").read_text() == "elsewhere 12"
