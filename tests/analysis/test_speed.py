"""The tables and the figure of ``bench``, from results that are written down here."""

from __future__ import annotations

import io

from rich.console import Console

from lit_compress.analysis.speed import is_busy, programs_table, rows, speed_figure, times_table

NAMED = {"median": 2.11, "low": 1.94, "high": 2.3, "verdict": "faster"}
NOISE = {"median": 1.1, "low": 0.9, "high": 1.2, "verdict": "noise"}
FRESH = {"import_seconds": 1.2, "load_seconds": 0.4, "first_seconds": 0.021, "libraries_mib": 200.0,
         "peak_mib": 1234.5, "gpu_peak_mib": None}  # fmt: skip


def times(net, runtime, median, steady=True, **gains):
    return {"net": net, "runtime": runtime, "median": median, "p10": 0.9 * median, "p90": 1.2 * median,
            "steady": steady, **gains}  # fmt: skip


def result(dense=True, steady=True):
    shapes = []
    for batch, length in ((1, 23), (1, 128), (32, 23), (32, 128)):
        size = batch * length / 100
        entries = [times("dense", "eager", 100 * size), times("dense", "onnx", 80 * size)] if dense else []
        gain = {"over_dense": NAMED if length == 128 else NOISE} if dense else {}
        entries += [times("compressed", "eager", 50 * size, steady, **gain),
                    times("compressed", "onnx", 40 * size, **gain, over_eager=NAMED)]  # fmt: skip
        shapes.append({"batch": batch, "length": length, "rounds": 30, "times": entries})
    program = {
        "runtime": "eager",
        "net": "compressed",
        "bytes": 4_400_000,
        "difference": 0.4,
        "far": True,
        "fresh": FRESH,
    }
    return {
        "nets": {"dense": "a", "compressed": "b"} if dense else {"compressed": "b"}, "own_lengths": {"median": 23},
        "shapes": shapes, "programs": [program, {**program, "fresh": None, "bytes": None}], "threads": 2,
        "device": "cpu", "hardware": {"cpu": "A processor", "accelerator": None},
        "memory_shape": {"batch": 32, "length": 128},
    }  # fmt: skip


def test_a_row_for_every_shape_and_runtime():
    header, body = rows(result(steady=False))
    assert header == ["batch x length", "runtime", "dense ms", "compressed ms", "speed-up", "over eager"]
    assert body[:3] == [
        ["1 x 23 (median)", "eager", "23.0 (20.7-27.6)", "11.5 (10.3-13.8)?", "within the noise", ""],
        ["", "onnx", "18.4 (16.6-22.1)", "9.20 (8.28-11.0)", "within the noise", "2.11x (1.94-2.30)"],
        ["1 x 128", "eager", "128 (115-154)", "64.0 (57.6-76.8)?", "2.11x (1.94-2.30)", ""],
    ]
    assert len(body) == 8 and is_busy(result(steady=False)) and not is_busy(result())


def test_one_net_is_compared_with_nothing():
    header, body = rows(result(dense=False))
    assert header == ["batch x length", "runtime", "compressed ms", "over eager"] and len(body[0]) == 4


def test_tables_are_printed():
    said = Console(file=io.StringIO(), width=120)
    said.print(programs_table(result()), times_table(result()))
    lines = said.file.getvalue().splitlines()
    assert any("peak MiB, 32 x 128" in line for line in lines) and max(map(len, lines)) <= 110
    assert any(all(text in line for text in ("4e-01! ", "4.4", "1.60", "0.02", "1,234")) for line in lines)


def test_hollow_points_are_not_carried():
    figure = speed_figure(result())
    short, long = figure.axes
    assert (short.get_title(), long.get_title()) == ("23 tokens", "128 tokens")
    for axes, colour in ((short, {"white"}), (long, {"C0", "C1"})):
        assert {line.get_markerfacecolor() for line in axes.lines if line.get_marker() == "o"} == colour
    assert [text.get_text() for text in long.get_legend().get_texts()] == ["eager", "onnx"]
    alone = speed_figure(result(dense=False, steady=False)).axes[0]
    assert alone.get_ylabel() == "ms per text" and alone.get_yscale() == "log"
    assert {line.get_markerfacecolor() for line in alone.lines if line.get_marker() == "o"} == {"white", "C1"}
