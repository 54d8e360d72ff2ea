"""Figures inside a page: valid alone, of equal text from equal numbers, no text of theirs is markup."""

from __future__ import annotations

from xml.etree import ElementTree

from lit_compress.analysis.inline import curves_figure, inline_svg


def test_a_figure_is_text_of_the_page():
    made = [inline_svg(curves_figure({"loss": [(0, 1.0), (5, 0.5)]}), "one", "a <b>") for _ in range(2)]
    assert made[0] == made[1] and made[0].startswith('<svg class="chart" viewBox="')
    assert "http" not in made[0] and "<style" not in made[0] and "<!--" not in made[0]
    assert 'aria-label="a &lt;b&gt;"' in made[0]
    names = [part.get("id") for part in ElementTree.fromstring(made[0].replace("xlink:", "")).iter() if part.get("id")]
    assert len(names) == len(set(names)) and all(name.startswith("one-") for name in names)


def test_a_hostile_name_stays_text():
    hostile = '"><script>alert(1)</script>--><img src=x>$'
    text = inline_svg(curves_figure({hostile: [(0, 1.0), (5, 0.5)]}, [(hostile, 2.0)]), "x", hostile)
    assert "<script" not in text and "<img" not in text and "&lt;script&gt;" in text


def test_curves_have_a_panel_each_and_the_stages():
    figure = curves_figure({"loss": [(5, 0.5), (0, 1.0)], "accuracy": [(0, 0.5)]}, [("prune", 3.0), ("later", 99.0)])
    loss, accuracy = figure.axes
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss", "accuracy")
    assert loss.lines[0].get_xydata().tolist() == [[0, 1.0], [5, 0.5]]
    assert [text.get_text() for text in loss.texts] == ["prune"] and not accuracy.texts
