"""The options of a recovery: what cannot work is one line."""

from __future__ import annotations

import math

import pytest

from lit_compress.stages.distil import Recovery
from lit_compress.utils.errors import UserError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"refine": 0}, "--refine: 0 is below 1, the smallest valid value; usual: 100"),
        ({"distil": -3}, "--distil: -3 is below 1"),
        ({"texts": "a.txt"}, "--distil_texts: 'a.txt' is read by --distil only; add --distil 100"),
        ({"rate": 1e-4}, "--distil_rate: '0.0001' is read by --distil only; add --distil 100"),
        ({"distil": 5, "rate": 0.0}, "--distil_rate: 0 is not between 0 and 1; usual: 0.0003"),
        ({"distil": 5, "rate": math.nan}, "--distil_rate: nan is not between 0 and 1"),
        ({"distil": 5, "texts": "nowhere.txt"}, "--distil_texts: 'nowhere.txt' is no file"),
    ],
)
def test_what_cannot_work_is_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        Recovery(**settings)
