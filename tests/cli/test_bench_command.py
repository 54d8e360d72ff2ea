"""bench through the command line: a run, an export or a model in, tables, numbers and a figure out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from mistakes import fails

from lit_compress.__main__ import main
from lit_compress.cli.bench import _show, times_table
from lit_compress.export.runtimes import RUNTIMES, Runtime

FEW = ["--runtimes", "eager", "--rounds", "3", "--batch", "1"]


def found(folder):
    return json.loads((folder / "bench.json").read_text())


def test_a_run_is_compared_with_its_dense_net(run, tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    main(["bench", str(run), *FEW, "--output", str(out), "--length", "8", "16"])
    said = capsys.readouterr()
    result = found(out)
    assert result["nets"] == {"dense": str(run / "dense" / "net"), "compressed": str(run / "export")}
    assert [(s["batch"], s["length"]) for s in result["shapes"]] == [(1, 8), (1, 16)]
    assert result["command"] == f"lit_compress bench {run} {' '.join(FEW)} --output {out} --length 8 16"
    assert "1 thread, " in said.out and "│ 1 x 8 " in said.out and "compressed ms" in said.out and not said.err
    assert f"numbers: {out / 'bench.json'}" in said.out
    for shape in result["shapes"]:
        gain = shape["times"][1]["over_dense"]
        text = {"noise": "within the noise", "unsteady": "too noisy"}.get(gain["verdict"])
        assert (text or f"{gain['median']:.2f}x (") in said.out


def test_lengths_that_the_model_does_not_read(run, tmp_path, capsys):
    shutil.copytree(run / "export", tmp_path / "export")
    main(["bench", str(tmp_path / "export"), *FEW])
    result, said = found(tmp_path / "export"), capsys.readouterr()
    assert {s["length"] for s in result["shapes"]} == {32}
    assert [left["what"] for left in result["left_out"]] == ["length 128", "length 384"]  # of 64 positions
    assert "left out: length 384: the model reads 64 tokens" in said.out
    assert "is compared with nothing; name its dense model with --baseline DENSE" in said.err


def test_any_model_and_any_baseline(run, tmp_path, capsys):
    line = ["bench", str(run / "retrain" / "net"), "--baseline", str(run / "dense" / "net"), *FEW, "--length", "8"]
    main([*line, "--output", str(tmp_path)])
    assert found(tmp_path)["nets"]["dense"] == str(run / "dense" / "net")
    assert not (run / "retrain" / "net" / "bench.json").exists() and not capsys.readouterr().err


def test_ctrl_c_keeps_what_is_measured(run, tmp_path, capsys, monkeypatch):
    def load(folder, setting):
        eager = RUNTIMES["eager"].load(folder, setting)

        def call(inputs):
            if inputs["input_ids"].shape[1] == 16:
                raise KeyboardInterrupt
            return eager(inputs)

        return call

    monkeypatch.setitem(RUNTIMES, "slow", Runtime("slow", ("torch",), load))
    line = ["bench", str(run), "--runtimes", "slow", "--rounds", "2", "--batch", "1", "--length", "8", "16"]
    with pytest.raises(SystemExit) as stop:
        main([*line, "--output", str(tmp_path)])
    assert stop.value.code == 130 and capsys.readouterr().err == "stopped by Ctrl-C\n"
    assert len(found(tmp_path)["shapes"]) == 1 and found(tmp_path)["asked"] == 2


def test_mistakes_are_one_line(run, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for words, text in [
        ([], "OUT: it is missing"),
        (["/nowhere"], "bench: no folder '/nowhere'; give a run folder, an export or a model"),
        ([run, "--runtimes", "onx"], "--runtimes: unknown runtime 'onx'; did you mean 'onnx'?"),
        ([run, *FEW, "--texts", "9"], "texts: this option was removed in version 0.3; "),
        ([run, *FEW, "--against", run], "against: this option was removed in version 0.3; "),
        ([run, "--batch", "0"], "batch: '0' is not a positive integer; the smallest is 1"),
        ([run, "--threads", "two"], "threads: 'two' is not a valid int"),
        ([run, "--lenght", "8"], "unknown option 'lenght'; did you mean 'length'?"),
        ([run, "--baseline", "/nowhere"], "--baseline: no folder '/nowhere'"),
        ([run, "--output", tmp_path / "file"], "is a file; give a new or empty folder"),
        ([run, "--length", "4000"], "length: 4000 is more than the model reads; the largest is 64"),
        ([run / "dense" / "net", "--data.pth", "x"], "unknown option 'data.pth'; did you mean 'data.path'?"),
    ]:
        assert text in fails(capsys, "bench", *words), words
    assert not (run / "export" / "bench.json").exists()


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
                    times("compressed", "onnx", 40 * size, **gain)]  # fmt: skip
        shapes.append({"batch": batch, "length": length, "rounds": 30, "times": entries})
    program = {"runtime": "eager", "net": "compressed", "bytes": 4_400_000, "difference": 0.4, "far": True}
    return {
        "nets": {"dense": "a", "compressed": "b"} if dense else {"compressed": "b"},
        "shapes": shapes, "programs": [program, {**program, "bytes": None}], "threads": 2,
        "device": "cpu", "hardware": {"cpu": "A processor", "accelerator": None, "cores": 2},
    }  # fmt: skip


def test_a_row_for_every_shape_and_runtime():
    header, body = times_table(result(steady=False))
    assert header == ["batch x length", "runtime", "dense ms", "compressed ms", "speed-up"]
    assert body[:3] == [
        ["1 x 23", "eager", "23.0 (20.7-27.6)", "11.5 (10.3-13.8)?", "within the noise"],
        ["", "onnx", "18.4 (16.6-22.1)", "9.20 (8.28-11.0)", "within the noise"],
        ["1 x 128", "eager", "128 (115-154)", "64.0 (57.6-76.8)?", "2.11x (1.94-2.30)"],
    ]
    assert len(body) == 8
    header, body = times_table(result(dense=False))  # one model is compared with nothing
    assert header == ["batch x length", "runtime", "compressed ms"] and len(body[0]) == 3


def test_tables_are_printed(capsys):
    _show(result(steady=False) | {"rounds": 30, "left_out": []}, Path("out"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 110 and any("4e-01! " in line and "4.4" in line for line in lines)
    assert lines[-2].startswith("?: the machine was busy") and any(line.startswith("!: its integers") for line in lines)
