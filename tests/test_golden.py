"""Tiny fits and factorizations give the tensors that the golden files name; see golden/make.py.

The contract test compares its own runs.
"""

import copy
import json

import pytest
import torch
from golden import make
from golden.cases import BOTH_WAYS, groups

GOLDEN = {group: make.read(group) for group in groups()}


@pytest.fixture(scope="module")
def exports():
    with make.making() as made:
        yield made


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in groups().items() for name in names if group != "contract"]
)
def test_exports_are_as_they_were(group, name, exports):
    """In every bit on the machine of the file, in shapes, structure, sums and norms elsewhere."""
    record = make.fingerprint(exports.make(group, name))
    assert make.difference(GOLDEN[group]["cases"][name], record, make.is_exact(GOLDEN[group], name)) is None


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_by_block_is_as_in_memory(name, exports):
    whole, blocks = (exports.make(group, name) for group in ("factorize", "by_block"))
    tolerance = 1e-5 if "bfloat16" not in BOTH_WAYS[name] else 1e-2
    assert make.distance(blocks, whole) <= tolerance
    one, other = (json.loads((folder / "report.json").read_text()) for folder in (blocks, whole))
    for stage in ("dense", "compressed"):
        for key in ("params", "flops", "stored", "density", "metric", "bytes"):
            assert one[stage][key] == pytest.approx(other[stage][key], rel=1e-2 if key == "bytes" else 1e-5), key
    for key in ("metric", "ordinary", "refuses"):
        assert one[key] == other[key], key
    for key in ("calibration", "refined"):
        close = {
            k: pytest.approx(v, rel=1e-3) if isinstance(v, float | list) else v
            for k, v in (other[key] or {}).items()
            if k not in ("kept", "metric", "measured_loss")  # of a whole model
        }
        assert (one[key] or {}) | {"seconds": 0} == close | {"seconds": 0}, key


def test_every_case_has_its_record():
    assert {group: sorted(golden["cases"]) for group, golden in GOLDEN.items()} == {
        group: sorted(cases) for group, cases in groups().items()
    }


def test_a_difference_is_seen():
    """A bit on the same machine; on another one, what rounding cannot explain."""
    name, (_, shape, total, norm) = "one.weight", ["aa", [2, 3], 0.5, 4.0]
    record = {
        "structure": "s", "widths": {"hidden_size": 4},
        "tensors": {name: ["aa", shape, total, norm]},
    }  # fmt: skip
    assert make.difference(record, copy.deepcopy(record), exact=True) is None
    bit = record | {"tensors": {name: ["ab", shape, -total, norm + 1e-3]}}
    assert make.difference(record, bit, exact=False) is None
    assert "1 of 1 tensors" in make.difference(record, bit, exact=True)
    for exact in (True, False):
        assert "1 of 1" in make.difference(record, record | {"tensors": {name: ["ab", shape, total, 4.4]}}, exact)
        assert "shapes" in make.difference(record, record | {"tensors": {name: ["aa", [3, 2], total, norm]}}, exact)
        assert "shapes" in make.difference(record, record | {"tensors": {}}, exact)
        assert "structure" in make.difference(record, record | {"structure": "t"}, exact)
        assert "widths" in make.difference(record, record | {"widths": {"hidden_size": 5}}, exact)


def test_a_fingerprint_has_every_bit(tmp_path):
    from safetensors.torch import save_file

    for file in ("config.json", "report.json"):
        (tmp_path / file).write_text('{"hidden_size": 4}')
    tensor = torch.arange(6.0).reshape(2, 3).bfloat16()
    save_file({"t": tensor, "scalar": torch.tensor(2)}, tmp_path / "model.safetensors")
    first = make.fingerprint(tmp_path)
    assert first["widths"] == {"hidden_size": 4} and first["tensors"]["t"][1:] == [[2, 3], 15.0, round(55**0.5, 6)]
    tensor.view(torch.int16)[1, 2] += 1
    save_file({"t": tensor, "scalar": torch.tensor(2)}, tmp_path / "model.safetensors")
    second = make.fingerprint(tmp_path)["tensors"]
    assert second["t"][0] != first["tensors"]["t"][0] and second["scalar"] == first["tensors"]["scalar"]
