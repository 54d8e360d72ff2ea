"""Every shipped method has a look of its own, which no picture changes; its variants share the colour."""

from __future__ import annotations

from lit_compress import methods
from lit_compress.analysis.styles import DARK, LIGHT, LOOKS, METHODS, look, numbers_of
from lit_compress.run.pages import TEMPLATE


def test_every_method_has_a_look_of_its_own():
    assert set(METHODS) == {name for name in methods.__all__ if name != "Method"}
    assert len({look(number) for number in range(LOOKS)}) == LOOKS > len(METHODS)
    assert len(set(LIGHT)) == len(set(DARK)) == len(LIGHT) == len(DARK)
    assert "--c0: #" not in TEMPLATE.read_text()  # the page takes them from here


def test_a_method_looks_alike_in_every_picture():
    alone, crowded = (
        numbers_of(["CoFi"]),
        numbers_of(["mine", "CoFi x LoSparse", "CoFi, no training", "CoFi", *METHODS]),
    )
    assert alone["CoFi"] == crowded["CoFi"] == METHODS.index("CoFi")
    assert len(set(crowded.values())) == len(crowded) and list(crowded)[:2] == ["mine", "CoFi x LoSparse"]
    colours = {look(crowded[label])[0] for label in ("CoFi", "CoFi x LoSparse", "CoFi, no training")}
    assert len(colours) == 1
    many = numbers_of(f"own {i}" for i in range(2 * LOOKS))
    assert len(many) == 2 * LOOKS and max(many.values()) < LOOKS
