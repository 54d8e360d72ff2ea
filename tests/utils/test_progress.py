"""Long phases say in a file how much is left, and when they end."""

from __future__ import annotations

import sys
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


def test_a_long_phase_says_what_is_left_and_when_it_ends(clock, capsys):
    consume(clock, 100)
    assert capsys.readouterr().err.splitlines() == [
        "decompose: 25% done, about 5 min left", "decompose: 50% done, about 3 min left",
        "decompose: 75% done, about 2 min left", "decompose: ended after 7 min",
    ]  # fmt: skip


def test_a_phase_of_hours_has_about_ten_lines(clock, capsys):
    with Lines("distil", 1000) as lines:
        for _ in range(1000):
            clock.now += 7.2
            lines.advance(1)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "distil: 0% done, about 2 h 0 min left" and said[-1] == "distil: ended after 2 h 0 min"
    assert len(said) == 11


def test_a_short_phase_says_nothing(clock, capsys):
    consume(clock, 1)
    assert not capsys.readouterr().err


def test_a_phase_of_unknown_size_has_no_time(clock, capsys):
    consume(clock, 3, total=None)
    assert capsys.readouterr().err.splitlines() == ["decompose: 2 done", "decompose: ended after 12 s"]


def test_an_error_is_no_end(clock, capsys):
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


@pytest.mark.parametrize("silent", ["a terminal, which has a bar", "another rank"])
def test_no_lines(silent, clock, capsys, monkeypatch):
    if silent == "another rank":
        monkeypatch.setenv("LOCAL_RANK", "1")
    else:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    consume(clock, 90)
    err = capsys.readouterr().err
    assert ("decompose:" in err) == (silent != "another rank") and "left" not in err and "ended" not in err


def test_items_are_those_given():
    assert list(track(iter("abc"), "x")) == list("abc")
    assert list(islice(track(range(9), "x", 9), 2)) == [0, 1]
