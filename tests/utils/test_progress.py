"""Long phases say in a file when they begin, how long they will take, and when they end."""

from __future__ import annotations

import sys
import time
from itertools import islice

import pytest

from lit_compress.utils import progress
from lit_compress.utils.progress import Lines, track


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def consume(clock, seconds, name="decompose", total=4):
    for _ in track(range(4), name, total):
        clock.now += seconds


def test_a_long_phase_says_when_it_begins_and_ends(clock, capsys):
    consume(clock, 90)
    assert capsys.readouterr().err.splitlines() == [
        "decompose: begins, about 6 min",
        "decompose: 50% done, about 3 min left",
        "decompose: 75% done, about 2 min left",
        "decompose: ended after 6 min",
    ]


def test_a_phase_that_began_without_a_time_gets_one(clock, capsys):
    """Its first part took long; and a phase of hours has about ten lines."""
    with Lines("distil", 1000) as lines:
        lines._begin()
        for _ in range(1000):
            clock.now += 7.2
            lines.advance(1)
    found = capsys.readouterr().err.splitlines()
    assert found[:2] == ["distil: begins", "distil: 0% done, about 2 h 0 min left"]
    assert found[-2:] == ["distil: 91% done, about 11 min left", "distil: ended after 2 h 0 min"]
    assert len(found) == 12


def test_the_first_line_comes_after_the_first_part(clock, capsys):
    for i, _ in enumerate(track(range(4), "decompose", 4)):
        clock.now += 90
        assert ("begins" in capsys.readouterr().err) == (i == 1)


def test_a_short_phase_says_nothing(clock, capsys):
    consume(clock, 1)
    assert not capsys.readouterr().err


def test_parts_that_become_longer_are_noticed(clock, capsys):
    for i, _ in enumerate(track(range(4), "decompose", 4)):
        clock.now += 10.0**i / 100
    assert capsys.readouterr().err.splitlines() == ["decompose: begins, about 11 s", "decompose: ended after 11 s"]


def test_a_short_first_part_is_no_measure_of_the_rest(clock, capsys):
    """The first step on a GPU took 0.7 s, the others 0.08 s: "about 12 min" of training ended after 82 s."""
    for i, _ in enumerate(track(range(1000), "training", 1000)):
        clock.now += 0.08 if i else 0.72
    assert capsys.readouterr().err.splitlines() == [
        "training: begins, about 81 s", "training: 76% done, about 20 s left", "training: ended after 81 s"
    ]  # fmt: skip


def test_a_phase_of_unknown_size_has_no_time(clock, capsys):
    consume(clock, 3, total=None)
    assert capsys.readouterr().err.splitlines() == ["decompose: begins", "decompose: ended after 12 s"]


def test_a_first_part_that_takes_long_is_said_before_it_is_done(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LONG", 0.02)
    for _ in track([0], "check the export", 1):
        time.sleep(0.3)
        assert capsys.readouterr().err == "check the export: begins\n"
    assert capsys.readouterr().err == "check the export: ended after 1 s\n"


def test_an_error_or_an_early_end_is_no_end(clock, capsys):
    with pytest.raises(ValueError), Lines("evaluate", 4) as lines:
        clock.now += 9
        lines.advance(1)
        raise ValueError
    assert capsys.readouterr().err.splitlines()[-1] == "evaluate: stopped after 9 s"


def test_a_caller_that_takes_the_last_part_only_need_not_ask_for_more(clock, capsys):
    for number, _ in enumerate(track(iter(range(9)), "compare", 4), 1):
        clock.now += 9
        if number == 4:
            break
    assert capsys.readouterr().err.splitlines()[-1] == "compare: ended after 36 s"


def test_a_terminal_has_a_bar_and_no_lines(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    consume(clock, 90)
    err = capsys.readouterr().err
    assert "decompose:" in err and "begins" not in err and "ended" not in err


def test_other_ranks_say_nothing(clock, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    consume(clock, 90)
    assert not capsys.readouterr().err


def test_items_are_those_given():
    assert list(track(iter("abc"), "x")) == list("abc")
    assert list(islice(track(range(9), "x", 9), 2)) == [0, 1]
