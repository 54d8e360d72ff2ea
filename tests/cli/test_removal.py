"""What SecondOrder removes by itself at a speed-up; made-up times."""

import json
import shutil

import pytest
from mistakes import fails
from tiny import write_backbone

from lit_compress.__main__ import main
from lit_compress.export import speed_asked as speed
from lit_compress.models.accounting import count_params
from lit_compress.run.folder import Run


class ByWeights:
    """Programs that are as fast as they have few weights, factors half as fast."""

    def __init__(self, dense, tokenizer, place):
        self.place, self.weights, self.asked = place, count_params(dense).sites, 0

    def gains(self, net):
        self.asked += 1
        factors = any("LowRank" in type(module).__name__ for module in net.modules())
        gain = self.weights / max(1, count_params(net).sites) / (1 + factors)
        return [
            {"batch": batch, "length": length, "rounds": 7, "median": gain, "low": gain, "high": gain,
             "verdict": "faster", "dense_ms": gain, "ms": 1.0}
            for batch, length in self.place.shapes
        ]  # fmt: skip

    def speed_of(self, net, program):
        return {"runtime": "eager", "device": "cpu", "dtype": "float32", "shapes": self.gains(net)}


MADE_UP = ("__init__", "gains", "speed_of")


@pytest.fixture(autouse=True)
def by_weights(monkeypatch):
    for name in MADE_UP:
        monkeypatch.setattr(speed.Programs, name, vars(ByWeights)[name])


@pytest.fixture
def words(run, tiny_data, tmp_path):
    return ["factorize", str(run / "dense" / "net"), str(tmp_path / "out"), "--data.task", "sst2", "--data.path",
            str(tiny_data), "--data.batch_size", "8", "--calibration_examples", "24"]  # fmt: skip


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def test_factorize_gives_the_speed_that_is_asked_for(words, tmp_path, capsys):
    main([*words, "--budget", "speedup=3x@eager,2x8"])
    said, report = capsys.readouterr().out, report_of(tmp_path / "out")
    assert report["calibration"]["removes"] == "structures" and "tried" not in report
    assert report["budget"]["met"] is True and report["speed"]["runtime"] == "eager"
    assert [(gain["batch"], gain["length"]) for gain in report["speed"]["shapes"]] == [(2, 8)]
    for line in ["speed-up in eager, one thread: 2 x 8: ", "budget speedup=3x@eager,2x8: met"]:
        assert line in said
    words[2] = str(tmp_path / "factors")
    main([*words, "--removes", "components", "--budget", "speedup=3x@eager,2x8"])
    factors = report_of(tmp_path / "factors")
    assert factors["calibration"]["removes"] == "components"
    assert factors["budget"]["density"] < report["budget"]["density"]


@pytest.mark.parametrize("removes", ["auto", "blocks"])
def test_other_kinds_are_one_line(removes, words, short_run, tmp_path, capsys):
    line = f"'{removes}' is not a valid value of structures, components; valid: structures, components"
    assert line in fails(capsys, *words, "--removes", removes)
    assert line in fails(capsys, "plan", "--model", "SecondOrder", *short_run, "--model.retrain.removes", removes)


def test_of_a_family_whose_sublayers_cannot_go_others_are_named(short_run, tmp_path, capsys):
    backbone = str(write_backbone(tmp_path / "albert", "albert", "sst2"))
    own = [backbone if number == 1 else word for number, word in enumerate(short_run)]
    args = ["--model", "SecondOrder", *own, "--model.budget", "speedup=1.5x@eager,1x8"]
    for command in ("plan", "fit"):
        said = fails(capsys, command, *args, "--run_dir", str(tmp_path / "run"))
        assert "sub-layers of 'albert' cannot be removed" in said and "uniform, or retrain.removes components" in said
    main(["plan", *args, "--model.retrain.removes", "components"])
    main(["plan", *args, "--model.shape", "uniform"])


def test_a_run_of_an_earlier_version_keeps_the_kind_that_it_chose(short_run, tmp_path, capsys, monkeypatch):
    folder, asked = tmp_path / "run", "speedup=2x@eager,1x8"
    args = ["fit", "--model", "SecondOrder", *short_run, "--run_dir", str(folder), "--trainer.logger", "false",
            "--model.retrain.calibration_examples", "24", "--ckpt_path", "last", "--model.budget"]  # fmt: skip

    def killed(self, record, finish=Run.finish):
        finish(self, record)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Run, "finish", killed)
        main([*args, asked])
    run = Run(folder)
    assert not (folder / "retrain").exists() and list(run.finished()) == ["dense"]
    chosen = {"asked": [asked, "structures", "components"], "removes": "components", "density": 0.3, "tried": []}
    run.keep("removal.json", chosen | {"removes": "blocks"})
    assert "removes: 'blocks' was removed in version 0.3" in fails(capsys, *args, asked)
    run.keep("removal.json", chosen)
    other = "speedup=3x@eager,1x8"
    monkeypatch.setattr("lit_compress.cli.fitting.solve", lambda *_: 0.1)
    assert f"model.budget was {asked}, now {other}" in fails(capsys, *args, other)
    main([*args, asked])
    report = report_of(folder)
    assert (report["calibration"]["removes"], report["budget"]["density"]) == ("components", 0.3)
    main(["export", str(folder), str(tmp_path / "again")])
    again = report_of(tmp_path / "again")
    assert again["budget"] == report["budget"] and again["calibration"] == report["calibration"]


@pytest.mark.parametrize("command", ["plan", "fit", "factorize"])
def test_a_speed_up_out_of_reach_is_one_line_before_any_training(command, short_run, words, tmp_path, capsys):
    args = [command, "--model", "SecondOrder", *short_run, "--run_dir", str(tmp_path / "out"), "--model.budget"]
    args = [*words, "--budget"] if command == "factorize" else args
    said = fails(capsys, *args, "speedup=900x@eager,1x8")
    assert "'speedup=900x@eager,1x8' cannot be met by SecondOrder, which reaches " in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lacks", "options", "line"),
    [
        ("train", ("--budget", "speedup=2x@onnx-int8"), "has no split 'train'"),
        (
            "train",
            ("--weighting", "none", "--density", "0.5", "--format", "onnx", "--dtype", "int8"),
            "has no split 'train'",
        ),
        ("validation", ("--max_drop", "0.5", "--density", "0.5"), "validation"),
    ],
)
def test_what_is_missing_is_one_line(lacks, options, line, words, tiny_data, tmp_path, capsys):
    shutil.copytree(tiny_data, tmp_path / "data")
    for file in (tmp_path / "data").glob(f"{lacks}.*"):
        file.unlink()
    words[words.index(str(tiny_data))] = str(tmp_path / "data")
    if "none" in options:
        at = words.index("--calibration_examples")
        del words[at : at + 2]
    assert line in fails(capsys, *words, *options) and not (tmp_path / "out").exists()
