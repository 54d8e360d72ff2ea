"""The tables of ``bench``, from results that are written down here."""

from __future__ import annotations

import io

from rich.console import Console

from lit_compress.analysis.speed import alternatives_table, is_busy, programs_table, rows, times_table

NAMED = {"median": 2.11, "low": 1.94, "high": 2.3, "verdict": "faster"}
NOISE = {"median": 1.1, "low": 0.9, "high": 1.2, "verdict": "noise"}


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
    program = {"runtime": "eager", "net": "compressed", "bytes": 4_400_000, "difference": 0.4, "far": True}
    return {
        "nets": {"dense": "a", "compressed": "b"} if dense else {"compressed": "b"}, "own_lengths": {"median": 23},
        "shapes": shapes, "programs": [program, {**program, "bytes": None}], "threads": 2,
        "device": "cpu", "hardware": {"cpu": "A processor", "accelerator": None},
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
    assert max(map(len, lines)) <= 110 and any("4e-01! " in line and "4.4" in line for line in lines)


def test_a_row_of_alternatives_has_what_was_measured():
    """Of all models and runtimes with a metric; ``front`` marks all that no other is better than in both."""

    def program(net, runtime, metric, megabytes, **more):
        return {"net": net, "runtime": runtime, "metric": metric, "bytes": megabytes and int(1e6 * megabytes),
                "interval": [metric - 0.02, metric + 0.02], "far": False} | more  # fmt: skip

    made = result()
    made["metric"] = {"name": "accuracy", "mode": "max"}
    made["programs"] = [
        program("dense", "eager", 0.9, 91.2), program("compressed", "eager", 0.9, 12.3, far=True),
        program("dense", "onnx", 0.8, None, interval=None), {**program("compressed", "onnx", 0.8, 12), "metric": None},
    ]  # fmt: skip
    table = alternatives_table(made)
    assert [str(column.header) for column in table.columns][3:] == ["MB", "ms, 1 x 23", "texts/s, 32 x 23", "front"]
    assert [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)] == [
        ["dense", "eager", "0.9000 ± 0.0200", "91.2", "23.00", "43", ""],
        ["compressed", "eager", "0.9000 ± 0.0200!", "12.3", "11.50", "87", "ms, MB"],
        ["dense", "onnx", "0.8000", "", "18.40", "54", ""],
    ]
