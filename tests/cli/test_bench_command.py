"""bench through the command line: a run, an export or a model in, tables, numbers and a figure out."""

from __future__ import annotations

import json
import shutil

import pytest
from mistakes import fails

from lit_compress.__main__ import main
from lit_compress.export import bench as module
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


def test_lengths_are_those_of_the_task(run, tmp_path, capsys):
    """From the report, or from data: then beside given ones, too."""
    shutil.copytree(run / "export", tmp_path / "export")
    report = json.loads((run / "export" / "report.json").read_text())
    main(["bench", str(tmp_path / "export"), *FEW])
    result = found(tmp_path / "export")
    longest = report["data"]["splits"][1]["longest"]
    assert result["own_lengths"] == {"median": report["dense"]["latency_ms"]["length"], "longest": longest}
    assert {s["length"] for s in result["shapes"]} == {32, *result["own_lengths"].values()}
    assert [left["what"] for left in result["left_out"]] == ["length 128", "length 384"]  # of 64 positions
    said = capsys.readouterr()
    assert "left out: length 384: the model reads 64 tokens" in said.out
    assert "is compared with nothing; name its dense model with --baseline DENSE" in said.err
    rows = [{"sentence": " ".join(["film"] * n)} for n in (1, 2, 3, 4, 17)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["bench", str(tmp_path / "export"), *FEW, "--length", "8", "--data.path", str(tmp_path / "texts.jsonl")])
    assert "longest length are from 5 of 5 rows of split all" in capsys.readouterr().err
    result = found(tmp_path / "export")
    assert result["own_lengths"] == {"median": 5, "longest": 19}  # with [CLS] and [SEP]
    assert [s["length"] for s in result["shapes"]] == [5, 8, 19]


def test_any_model_and_any_baseline(tiny_backbone, run, tmp_path, capsys):
    line = ["bench", str(tiny_backbone), "--baseline", str(run / "dense" / "net"), *FEW, "--length", "8"]
    main([*line, "--output", str(tmp_path)])
    assert found(tmp_path)["nets"]["dense"] == str(run / "dense" / "net")
    assert not (tiny_backbone / "bench.json").exists() and not capsys.readouterr().err


def test_several_models_have_their_accuracy_in_one_table(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module.BenchedNet, "file", lambda self, form, dtype: self.folder)
    for name, dtype in (("twin", "float32"), ("int8", "int8")):
        fake = Runtime(name, ("torch",), RUNTIMES["eager"].load, (("onnx", dtype),))
        monkeypatch.setitem(RUNTIMES, name, fake)
    shutil.copytree(run / "export", tmp_path / "one")
    line = ["bench", str(run), "--runtimes", "eager", "twin", "int8", "--rounds", "2", "--batch", "1", "2",
            "--length", "8", "--output", str(tmp_path)]  # fmt: skip
    main([*line, "--against", str(tmp_path / "one")])
    result, report = found(tmp_path), json.loads((run / "export" / "report.json").read_text())
    assert list(result["nets"]) == ["dense", "one", "compressed"]
    by_key = {(e["net"], e["runtime"]): e for e in result["programs"]}
    for net, stage in (("dense", "dense"), ("one", "compressed"), ("compressed", "compressed")):
        assert by_key[net, "eager"]["metric"] == pytest.approx(report[stage]["metric"])
        assert by_key[net, "twin"]["metric"] == by_key[net, "int8"]["metric"] == by_key[net, "eager"]["metric"]
    said = capsys.readouterr().out
    assert "texts/s, 2 x 8" in said
    assert "another model has the label 'one'" in fails(capsys, *line, "--against", tmp_path / "one", tmp_path / "one")


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
    said = capsys.readouterr()
    assert stop.value.code == 130 and said.err == "stopped by Ctrl-C\n"
    assert "stopped: 1 of 2 shapes are measured" in said.out and len(found(tmp_path)["shapes"]) == 1


def test_mistakes_are_one_line(run, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for words, text in [
        ([], "OUT: it is missing"),
        (["/nowhere"], "bench: no folder '/nowhere'; give a run folder, an export or a model"),
        ([run, "--runtimes", "onx"], "--runtimes: unknown runtime 'onx'; did you mean 'onnx'?"),
        ([run, "--batch", "0"], "batch: '0' is not a positive integer; the smallest is 1"),
        ([run, "--threads", "two"], "threads: 'two' is not a valid int"),
        ([run, "--lenght", "8"], "unknown option 'lenght'; did you mean 'length'?"),
        ([run, "--baseline", "/nowhere"], "--baseline: no folder '/nowhere'"),
        ([run, "--output", tmp_path / "file"], "is a file; give a new or empty folder"),
        ([run, "--length", "4000"], "length: 4000 is more than the model reads; the largest is 64"),
        ([run / "retrain" / "net"], "is the model of a stage, which loads in this package only; give the run"),
        ([run / "dense" / "net", "--data.pth", "x"], "unknown option 'data.pth'; did you mean 'data.path'?"),
    ]:
        assert text in fails(capsys, "bench", *words), words
    assert not (run / "export" / "bench.json").exists()
