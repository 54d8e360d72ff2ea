"""The page in a headless Chromium: nothing on its console, nothing wider than the window, light, dark and on paper.

Skipped where there is no Chromium; CI has one.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from test_pages import comparison

from lit_compress.run import pages

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (apt-get install chromium)"),
]
WIDTHS = """<script>
  const root = document.documentElement;
  root.dataset.widths = [root.scrollWidth, innerWidth].join(" ");
</script>"""


def browse(page: Path, *options: str) -> tuple[str, list[str]]:
    """Open a page; return what is printed, and what the page or the browser wrote on its console."""
    line = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    home = page.parent / "browser"
    made = subprocess.run(
        [*map(str, line), f"--user-data-dir={home}", *options, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return made.stdout, [line for line in made.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of eight runs."""
    return pages.write(comparison(tmp_path_factory.mktemp("runs"), labels=2, seeds=1))


def shot(page: Path, dark: bool) -> np.ndarray:
    """Return the picture [height, width, 3] of a page, 0 to 1."""
    file = page.with_name(f"{dark}.png")
    _, console = browse(
        page,
        "--window-size=1000,1400",
        f"--screenshot={file}",
        f"--blink-settings=preferredColorScheme={int(not dark)}",
    )
    assert not console
    return imread(file)[..., :3]


def test_light_and_dark(page):
    light, dark = shot(page, False), shot(page, True)
    assert light.shape == dark.shape == (1400, 1000, 3)
    assert np.median(light) > 0.9 and np.median(dark) < 0.2
    for picture in (light, dark):  # words, and the colours of at least two methods
        assert picture.std() > 0.03
        assert len(np.unique((picture.max(-1) - picture.min(-1)).round(1))) > 4


@pytest.mark.parametrize("width", [500, 1280])
def test_nothing_is_wider_than_the_window(page, width):
    probe = page.with_name(f"probe-{width}.html")
    probe.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{WIDTHS}</body>"), encoding="utf-8")
    html, console = browse(probe, f"--window-size={width},900", "--dump-dom")
    inside, window = map(int, html.partition('data-widths="')[2].partition('"')[0].split())
    assert inside <= window == width
    assert not console


def test_on_paper(page):
    file = page.with_suffix(".pdf")
    _, console = browse(page, f"--print-to-pdf={file}")
    assert file.read_bytes()[:5] == b"%PDF-" and file.stat().st_size > 20_000
    assert not console


def test_an_error_of_a_page_would_be_seen(page):
    broken = page.with_name("broken.html")
    broken.write_text("<script>missing()</script>")
    _, console = browse(broken, "--dump-dom")
    assert any("missing is not defined" in line for line in console)
