"""What SecondOrder removes by itself: at a speed-up, and at a density; made-up times, real divergences."""

import json
import shutil

import pytest
from mistakes import fails
from tiny import write_backbone

from lit_compress.__main__ import main
from lit_compress.data.batching import drawn_order
from lit_compress.data.datamodule import DataModule
from lit_compress.export import speed_asked as speed
from lit_compress.methods import SecondOrder
from lit_compress.models.accounting import count_params
from lit_compress.run.folder import Run
from lit_compress.run.trials import trial_line

WAYS = ["structures", "components"]


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


def test_factorize_gives_the_speed_that_is_asked_for(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lit_compress.cli.fitting.solve", lambda *_: 1 / 0)  # the trials find the density
    main([*words, "--budget", "speedup=3x@eager,2x8"])
    said, report = capsys.readouterr().out, report_of(tmp_path / "out")
    tried = {trial["removes"]: trial for trial in report["tried"]}
    assert list(tried) == WAYS
    able = [trial for trial in tried.values() if trial["why"] is None]
    (best,) = (trial for trial in able if trial["chosen"])
    assert best["divergence"] == min(trial["divergence"] for trial in able)
    assert report["calibration"]["removes"] == best["removes"] and report["budget"]["density"] == best["density"]
    assert all(trial["speed"][0]["median"] >= 3 for trial in able)
    assert report["budget"]["met"] is True and report["speed"]["runtime"] == "eager"
    assert [(gain["batch"], gain["length"]) for gain in report["speed"]["shapes"]] == [(2, 8)]
    assert tried["structures"]["density"] > tried["components"]["density"] and tried["structures"]["round_to"] == 16
    for line in [
        *map(trial_line, report["tried"]),
        "speed-up in eager, one thread: 2 x 8: 3.",
        "budget speedup=3x@eager,2x8: met",
    ]:
        assert line in said


def test_auto_at_a_density(words, tmp_path):
    main([*words, "--removes", "auto", "--density", "0.4"])
    tried = report_of(tmp_path / "out")["tried"]
    assert [trial["removes"] for trial in tried] == WAYS and {trial["density"] for trial in tried} == {0.4}
    assert sum(trial["chosen"] for trial in tried) == 1 and all(trial["speed"] is None for trial in tried)


def test_on_a_gpu_whole_blocks_are_tried_and_blocks_can_be_asked_for(words, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(SecondOrder, "_on_cuda", True)
        main([*words, "--budget", "speedup=1.9x@eager,1x8"])
    tried = {trial["removes"]: trial for trial in report_of(tmp_path / "out")["tried"]}
    assert list(tried) == [*WAYS, "blocks"] and 0.5 <= tried["blocks"]["density"] < 1
    words[2] = str(tmp_path / "fast")  # whose memory is checked before the density is known
    main([*words, "--removes", "blocks", "--budget", "speedup=1.9x@eager,1x8", "--distil", "2"])
    words[2] = str(tmp_path / "blocks")
    main([*words, "--removes", "blocks", "--density", "0.5"])
    report = report_of(tmp_path / "blocks")
    assert len(report["calibration"]["kept"]["bert.encoder.layer"]) == 1 and "tried" not in report
    assert report["calibration"]["estimated_loss"] == pytest.approx(tried["blocks"]["divergence"], rel=0.5)


@pytest.mark.parametrize("family", ["albert"])
def test_of_a_family_whose_heads_and_neurons_cannot_go_components_go(family, short_run, words, tmp_path, capsys):
    """Before, plan and fit exited with an error under a speed budget."""
    backbone = str(write_backbone(tmp_path / family, family, "sst2"))
    own = [backbone if number == 1 else word for number, word in enumerate(short_run)]
    args = ["--model", "SecondOrder", *own, "--model.budget", "speedup=1.5x@eager,1x8",
            "--model.retrain.calibration_examples", "24", "--run_dir", str(tmp_path / "run")]  # fmt: skip
    for command in ("plan", "fit"):
        main([command, *args])
    said = capsys.readouterr().err
    assert said.count(f"retrain.removes: components; sub-layers of '{family}' cannot be removed") == 1
    words[1] = str(Run(tmp_path / "run").net("dense"))
    main([*words, "--budget", "speedup=1.5x@eager,1x8"])
    for report in map(report_of, (tmp_path / "run", tmp_path / "out")):
        assert [trial["removes"] for trial in report["tried"]] == WAYS and report["budget"]["met"] is True
        assert [trial["removes"] for trial in report["tried"] if trial["why"] is None] == ["components"]


def test_a_run_chooses_on_its_dense_model_and_keeps_that_after_a_kill(short_run, tmp_path, capsys, monkeypatch):
    folder, asked = tmp_path / "run", "speedup=2x@eager,1x8"
    args = ["fit", "--model", "SecondOrder", *short_run, "--run_dir", str(folder), "--trainer.logger", "false",
            "--model.retrain.calibration_examples", "24", "--ckpt_path", "last", "--model.budget"]  # fmt: skip

    keep = Run.keep

    def killed(self, name, chosen):
        keep(self, name, chosen)
        if name == "removal.json":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Run, "keep", killed)
        main([*args, asked])
    chosen = Run(folder).removal()
    assert not (folder / "retrain").exists() and chosen["asked"] == [asked, *WAYS]
    other = "speedup=3x@eager,1x8"
    assert f"model.budget was {asked}, now {other}" in fails(capsys, *args, other)
    with monkeypatch.context() as patch:
        for name in ("run.trials.choose_removal", "cli.fitting.solve"):
            patch.setattr(f"lit_compress.{name}", lambda *_: 1 / 0)
        main([*args, asked])
    run, report = Run(folder), report_of(folder)
    assert run.removal() == chosen and run.density(asked) == chosen["density"] == report["budget"]["density"]
    assert chosen["tried"] == report["tried"] and chosen["removes"] == report["calibration"]["removes"]
    assert report["budget"]["met"] is True
    main(["export", str(folder), str(tmp_path / "again")])
    assert report_of(tmp_path / "again")["budget"] == report["budget"]


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
        ("train", ("--budget", "speedup=2x@onnx-int8"), "training texts, and there are none; nearest: onnx"),
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


def test_held_out_rows_are_training_rows_that_the_calibration_does_not_read(tiny_backbone, tiny_data, capsys):
    data, order = DataModule("sst2", str(tiny_backbone), path=str(tiny_data), batch_size=8), drawn_order(100, 3)
    loaders = data.calibration_dataloader(60, 3), data.rest_dataloader(60, 30, 3), data.rest_dataloader(90, 30, 3)
    for loader, rows in zip(loaders, (order[:60], order[60:90], order[70:]), strict=True):
        own = data.train_tokens().select(sorted(rows))["input_ids"]
        assert list(loader.dataset.encoded["input_ids"]) == list(own)
    assert [line for line in capsys.readouterr().err.splitlines() if "also calibrate" in line] == [
        "note: too few training rows: 20 of the 30 held-out rows also calibrate"
    ]
