"""Budgets as people say them: what is read, what is refused, what a report says of them."""

import pytest

from lit_compress.models.budget import budget_line, parse_budget
from lit_compress.utils.errors import UserError


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("density=0.25", "density", 0.25),
        ("params=5M", "params", 5e6),
        ("params=1.1B", "params", 1.1e9),
        ("params=66000000", "params", 66e6),
        ("flops=.3", "flops", 0.3),
        ("size = 20 mb", "size", 20e6),
        ("size=8MiB", "size", 8 * 2**20),
        ("size=1000000", "size", 1e6),
        ("speedup=3", "speedup", 3),
    ],
)
def test_what_is_read(text, kind, value):
    found = parse_budget(text)
    assert (found.kind, found.value, found.asked) == (kind, value, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("20MB", "does not say of what; e.g. density=0.25"),
        ("", "does not say of what"),
        ("sise=20MB", "did you mean 'size'?"),
        ("size=20M", "has the unit 'M'; valid: kB"),
        ("params=5MB", "has the unit 'MB'; valid: k, M, B"),
        ("flops=30%", "has the unit '%'"),
        ("density=1.5", "not a share in (0, 1]"),
        ("density=x", "is no number; e.g. density=0.25"),
        ("size=0MB", "is below 1"),
        ("size=12", "has no unit and would be bytes; nearest: size=12MB"),
        ("speedup=5x@", "has '' behind @"),
        ("speedup=5x@32x0", "has '32x0' behind @, neither a runtime nor texts x tokens; e.g. 3x@openvino-int8,32x128"),
        ("speedup=5x@onnx,eager", "has 'eager' behind @"),
        ("size=5MB@onnx", "names where it is measured, which only a speed-up has; leave @ out"),
        ("speedup=0.5x", "slower than the dense model"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(UserError, match=r"^model\.budget: ") as stop:
        parse_budget(text)
    assert words in str(stop.value)


def test_a_speed_up_of_a_runtime_and_batches():
    for text, value, runtime, shapes in (
        ("speedup=5x@openvino-int8,32x128", 5, "openvino-int8", ((32, 128),)),
        ("speedup=2.5@1x32,32x32", 2.5, None, ((1, 32), (32, 32))),
        ("speedup = 3x @ onnx", 3, "onnx", ()),
        ("speedup=3x@8x8, eager, 8x8", 3, "eager", ((8, 8),)),
    ):
        found = parse_budget(text)
        assert (found.value, found.runtime, found.shapes, found.asked) == (value, runtime, shapes, text)


def test_zeros_have_a_density_and_nothing_else():
    assert parse_budget("density=0.2", "Magnitude").value == 0.2 and parse_budget(None) is None
    with pytest.raises(UserError, match="Magnitude, which stores the removed weights as zeros"):
        parse_budget("size=5MB", "Magnitude")


def gain(median, low=None, high=None):
    return {"median": median, "low": low or median, "high": high or median}


def report(total=100, size=400, flops=0.5, speedup=2.0, density=0.25):
    return {
        "speed": {"runtime": "onnx", "shapes": [gain(speedup)]},
        "compressed": {"params": {"total": total}, "bytes": size, "density": density},
        "ratios": {"params": {"total": 0.7}, "flops": flops, "speedup": 1.0},
    }


@pytest.mark.parametrize(
    ("text", "found", "met", "off"),
    [
        ("params=100", {"total": 100}, True, 0),
        ("params=1000", {"total": 1001}, False, 0.001),
        ("flops=0.5", {"flops": 0.504}, False, 0.008),
        ("flops=0.3", {"flops": 0.1 + 0.2}, True, 0),
        ("speedup=3x", {"speedup": 2.7}, False, -0.1),
        ("speedup=2x", {"speedup": 3.0}, True, 0.5),
        ("density=0.25", {"density": 0.246}, True, -0.016),
    ],
)
def test_a_limit_has_no_tolerance(text, found, met, off):
    said = parse_budget(text).check(report(**found), 0.3)
    assert said["met"] is met and said["off"] == pytest.approx(off) and said["density"] == 0.3
    assert ("met" if met else "missed") in budget_line(said)


@pytest.mark.parametrize(
    ("median", "low", "high", "met", "words"),
    [
        (3.2, 3.05, 3.4, True, "budget speedup=3x: met, the export has 3.2x, 6.7% above it"),
        (2.7, 2.6, 2.9, False, "budget speedup=3x: missed, the export has 2.7x, 10.0% below it"),
        (3.2, 2.9, 3.4, None, "budget speedup=3x: too noisy to say, the export has 3.2x, 6.7% above it"),
        (2.9, 2.8, 3.1, None, "too noisy to say"),
        (5.0, 3.2, 8.0, None, "too noisy to say"),  # every round is faster, but not by the same
        (1.2, 0.6, 2.8, False, "missed"),  # noisy, but no round in ten comes near
    ],
)
def test_a_noisy_timing_meets_nothing(median, low, high, met, words):
    timing = {"speed": {"shapes": [gain(median, low, high)]}}
    found = parse_budget("speedup=3x").check(report() | timing, 0.3)
    assert found["met"] is met and words in budget_line(found)


def test_a_speed_up_is_reached_at_every_shape():
    fast, slow, noisy = gain(5.0), gain(2.0), gain(4.0, 2.9, 4.2)
    for gains, met, reached in (([fast, slow], False, 2), ([fast, noisy], None, 4), ([noisy, slow], False, 2),
                                ([fast, gain(3.5)], True, 3.5)):  # fmt: skip
        found = parse_budget("speedup=3x@onnx,1x8,2x8").check(report() | {"speed": {"shapes": gains}}, 0.3)
        assert (found["met"], found["reached"]) == (met, reached)


def test_a_size_is_that_of_the_program():
    made, budget = report(size=20e6), parse_budget("size=6MB")
    assert budget.reached(made | {"program": {"bytes": 5.9e6, "dtype": "int8"}}) == 5.9e6
    assert (
        budget.reached(made | {"program": {"bytes": 20.6e6}}) == 20.6e6
    )  # in float it is larger than the folder's file
    assert budget.reached(made | {"program": None}) == 20e6
