"""The export refuses what does not load by itself or answers otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import TINY, make_net

from lit_compress.decompose import decompose
from lit_compress.errors import UserError
from lit_compress.export.check import check_export
from lit_compress.export.fuse import fuse
from lit_compress.export.modelling import write_model
from lit_compress.layers import MixedRankLinear
from lit_compress.ranks import RankRule
from lit_compress.surgery import factorize


def exported(family, folder):
    net = make_net(family).eval()
    factorize(net, RankRule(0.5).allocate(net), lambda _, w, r: decompose(w, r), MixedRankLinear)
    fused = fuse(net)
    write_model(fused, folder)
    return fused


@pytest.mark.parametrize("family", TINY)
def test_every_family_loads_alone_with_the_same_logits(family, tmp_path):
    assert check_export(exported(family, tmp_path), tmp_path) <= 1e-6


def test_a_folder_may_be_given_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("out")
    folder.mkdir()
    assert check_export(exported("bert", folder), folder) <= 1e-6


def test_other_weights_are_refused(tmp_path):
    net = exported("bert", tmp_path)
    with torch.no_grad():
        net.classifier.bias.add_(0.01)
    with pytest.raises(UserError, match=r"logits differ by 1\.00e-02"):
        check_export(net, tmp_path)


def test_a_file_that_needs_the_package_is_refused(tmp_path):
    net = exported("bert", tmp_path)
    source = tmp_path / "modeling_compressed.py"
    source.write_text(source.read_text().replace("import torch\n", "import torch\nimport lit_compress\n", 1))
    with pytest.raises(UserError, match="does not load by itself"):
        check_export(net, tmp_path)
