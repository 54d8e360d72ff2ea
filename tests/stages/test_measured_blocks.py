"""What was measured of blocks is read from files, each of which is looked through once."""

from __future__ import annotations

import safetensors
import torch
from test_compression import Broken
from tiny import make_net

from lit_compress.models.shapes import without_values
from lit_compress.models.sites import blocks, find_sites
from lit_compress.stages.by_block import MeasuredBlocks


class Norms(Broken):
    """Keeps one number of every matrix with an even number."""

    name = "norms"

    def measure(self, net, names, found):
        for i, name in enumerate(names):
            if i % 2 == 0:
                yield (name,), {f"{name}.norm": net.get_parameter(f"{name}.weight").norm()[None]}


def test_a_name_that_is_not_there_reads_no_file(tmp_path, monkeypatch):
    """Else every matrix without a bias would look through the files of all blocks."""
    net, names = make_net("bert"), [name for *_, name, _ in blocks(make_net("bert"))]
    sites = [site.name for site in find_sites(net)]
    measured = MeasuredBlocks(tmp_path, Norms(), without_values(lambda: make_net("bert")), names, sites)
    expected = {}
    for i, name in enumerate(names):
        assert not measured.done(i)
        own = measured.sites[i]
        expected |= {f"{site}.norm": net.get_parameter(f"{site}.weight").norm()[None] for site in own[::2]}
        measured.write(i, net.get_submodule(name), {})
        assert measured.done(i) and f"{own[0]}.norm" in measured  # also of a block that came later
    assert dict(measured) == expected and len(measured) == len(expected) > len(names)
    opened, whole = [], safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *args, **kwargs: opened.append(args) or whole(*args, **kwargs))
    for site in sites:
        assert measured.get(f"{site}.mean") is None and f"{site}.mean" not in measured
    assert not opened
    assert torch.equal(measured[f"{sites[0]}.norm"], expected[f"{sites[0]}.norm"]) and len(opened) == 1
