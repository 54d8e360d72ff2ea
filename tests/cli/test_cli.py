"""The command line: every mistake is one line with exit code 2; runs and exports are evaluated, nothing is lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time

import processes
import pytest
import torch

from lit_compress.__main__ import main
from lit_compress.cli.recipes import FOLDER, find_config, shipped
from lit_compress.run.callbacks import Checkpoints


@pytest.fixture(scope="module")
def run(short_run, tmp_path_factory):
    """A finished SVD run."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.MonkeyPatch.context() as patch:  # tests give its checkpoints where they do not belong
        patch.setattr("lit_compress.run.runner.remove_checkpoints", lambda run, stage: None)
        main(["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--run_dir", str(folder)])
    return folder


def fails(capsys, *args) -> str:
    """Return the one line a command fails with."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in args])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    lines = [line for line in re.split(r"[\r\n]", err) if line.startswith("error: ")]
    assert len(lines) == 1 and err.endswith(f"{lines[0]}\n") and "Traceback" not in err
    return lines[0]


CONFIG = ("fit", "--config", "lpaf_sst2.yaml")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("fitt",), "unknown command 'fitt'; did you mean 'fit'?"),
        (("fit", "--config", "lpaf_sst3.yaml"), "'lpaf_sst3.yaml'; did you mean 'lpaf_sst2.yaml'?"),
        (("fit",), "no method given"),
        (("fit", "--print_config"), "no method given"),
        ((*CONFIG, "--seed_everything", "-1"), "seed_everything: -1 is not in [0, 4294967295]; nearest valid 0"),
        ((*CONFIG, "--model.rank", "0"), "error: model.rank: 0 is below 1, the smallest valid value"),
        ((*CONFIG, "--model.retrain.learning_rate=-1"), "error: model.retrain.learning_rate: -1.0 is not above 0"),
        ((*CONFIG, "--model.prune.interval", "0"), "error: model.prune.interval: 0 is below 1"),
        (("fit", "lpaf_sst2.yaml"), "'lpaf_sst2.yaml' stands without its option; --config lpaf_sst2.yaml"),
        (("fit", "--config"), "no file or shipped config is named after --config"),
        (("fit", "--model", "Lpaf"), "unknown method 'Lpaf'; did you mean 'LPAF'?"),
        (
            ("fit", "--model", "SP3", "--model.retrain.epochs", "1"),
            "SP3 has no stage retrain; its stages: dense, prune",
        ),
        ((*CONFIG, "--model.density", "0.2", "--model.rank", "30"), "only one of them can decide the ranks"),
        (("fit", "--model", "SVD", "--model.density", "0.2", "--model.rank_ratio", "0.3"), "only one of them"),
        (("fit", "--model.density", "0.3"), "no method given"),
        ((*CONFIG, "--data.task", "sst3"), "data.task: unknown task 'sst3'; did you mean 'sst2'?"),
        ((*CONFIG, "--model", "LPAFF"), "unknown method 'LPAFF'; did you mean 'LPAF'?"),
        ((*CONFIG, "--model.densty", "0.3"), "unknown option 'model.densty'; did you mean 'model.density'?"),
        ((*CONFIG, "--model.prune.scor", "signed"), "did you mean 'model.prune.score'?"),
        ((*CONFIG, "--model.prune.score", "sign"), "model.prune.score: 'sign' is not a valid value of"),
        ((*CONFIG, "--data.pth", "x"), "unknown option 'data.pth'; did you mean 'data.path'?"),
        ((*CONFIG, "--trainer.max_epoch", "3"), "did you mean 'trainer.max_epochs'?"),
        ((*CONFIG, "--trainer.max_epochs", "3"), "trainer.max_epochs: 3 would hold for every stage"),
        ((*CONFIG, "--model.density", "0"), "model.density: 0.0 is not in (0, 1]; nearest valid value 0.01"),
        ((*CONFIG, "--model.density", "1.5"), "model.density: 1.5 is not in (0, 1]; nearest valid value 1.0"),
        ((*CONFIG, "--model.density", "abc"), "model.density: 'abc' is not a valid float"),
        ((*CONFIG, "--data.batch_size", "0"), "data.batch_size: 0 "),
        ((*CONFIG, "--checkpoint_every", "0"), "checkpoint_every: 0 is below 1"),
        ((*CONFIG, "--model.prune.start", "0.8"), "0.8 + 0.3 leave no step to prune"),
        ((*CONFIG, "--model.backbone", "./nowhere"), "no folder './nowhere'"),
        ((*CONFIG, "--model.backbone", "no-such/model"), "without network give the folder"),
        (("predict", "/nowhere"), "no folder '/nowhere'"),
        (("validate",), "the following arguments are required: TARGET"),
        (
            ("export", "RUN", "OUT", "--format", "onx"),
            "--format: invalid choice: 'onx' (choose from 'hf', 'onnx', 'torch')",
        ),
        (("export", "/nowhere", "/tmp/out"), "'/nowhere' is not a run folder"),
    ],
)
def test_mistakes_are_one_line(args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, *args)
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model: {class_path: lit_compress.methods.LPAF\n", "mine.yaml' is not readable YAML: while parsing"),
        ("modl: {class_path: x}\n", "unknown option 'modl"),
        ("model: {class_path: lit_compress.methods.Nope}\n", "unknown method 'lit_compress.methods.Nope'"),
        (
            "model: {class_path: lit_compress.methods.LPAF, init_args: {prune: {epoch: 3}}}\n",
            "did you mean 'model.prune.epochs'",
        ),
        ("model: {class_path: lit_compress.methods.LPAF, init_args: {densty: 3}}\n", "did you mean 'model.density'"),
    ],
)
def test_mistakes_in_a_config_are_one_line(content, words, capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(content)
    assert words in fails(capsys, "fit", "--config", tmp_path / "mine.yaml")


def fit(short_run, folder, *extra):
    return ["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--run_dir", str(folder), *extra]


def test_no_saving_rank_is_refused_before_training(capsys, short_run, tmp_path):
    line = fails(capsys, *fit(short_run, tmp_path / "run", "--model.density", "null", "--model.rank", "22"))
    assert "model.rank: 22 makes no matrix smaller; the largest rank that does is 21" in line
    assert not (tmp_path / "run").exists()


def test_stages_of_no_epochs(capsys, short_run, tmp_path):
    """What a stage is built with is what it leaves, and its metric is that before training; pruning needs steps."""
    main(fit(short_run, tmp_path / "run", "--model.retrain.epochs", "0", "--trainer.logger", "false"))
    dense, retrain = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert retrain["steps"] == 0 < dense["steps"] and retrain["metric"] == retrain["initial"] != dense["metric"]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["compressed"]["metric"] == pytest.approx(retrain["metric"]["val/accuracy"])
    assert 0.4 < report["compressed"]["density"] <= 0.5
    line = fails(capsys, "fit", "--model", "LPAF", *short_run, "--model.prune.epochs", "0")
    assert "prune.epochs: 0 is below 1, the smallest valid value" in line


def test_schedule_longer_than_training_is_refused_before_training(capsys, short_run, tmp_path):
    args = ["fit", "--model", "LPAF", *short_run, "--model.prune.epochs", "1", "--model.prune.start", "0.9",
            "--model.prune.end", "0.09", "--data.batch_size", "100", "--run_dir", str(tmp_path / "run")]  # fmt: skip
    assert "leave no step of total=1" in fails(capsys, *args)


def test_a_schedule_is_checked_for_all_processes(capsys, tiny_backbone, tiny_data, tmp_path):
    """100 examples in batches of 8: 13 steps on one process, 2 on seven, with nothing between start and end."""
    args = [*CONFIG, "--model.backbone", str(tiny_backbone), "--data.path", str(tiny_data), "--data.batch_size", "8",
            "--trainer.accelerator", "cpu", "--trainer.strategy", "ddp", "--trainer.devices", "7",
            "--model.prune.epochs", "1", "--model.prune.start", "0.3", "--model.prune.end", "0.6",
            "--run_dir", str(tmp_path / "run")]  # fmt: skip
    assert "leave no step of total=2" in fails(capsys, *args)
    assert not (tmp_path / "run" / "dense").exists()
    assert not (tmp_path / "run").exists()


def test_bad_data_is_one_line_and_writes_nothing(capsys, short_run, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"sentence": "a film", "label": 3}\n')
    (tmp_path / "data" / "validation.jsonl").write_text('{"sentence": "a film", "label": 1}\n')
    line = fails(capsys, *fit(short_run, tmp_path / "run", "--data.path", str(tmp_path / "data")))
    assert "row 1: label 3" in line and not (tmp_path / "run").exists()


def test_trainer_refusal_is_one_line(capsys, short_run, tmp_path):
    assert "trainer.devices: 'foo': " in fails(capsys, *fit(short_run, tmp_path / "run", "--trainer.devices", "foo"))


def test_an_existing_run_is_not_overwritten(run, capsys, short_run):
    assert "exists already; continue it with --ckpt_path last" in fails(capsys, *fit(short_run, run))


def test_a_run_of_another_config_is_refused(run, capsys, short_run):
    line = fails(capsys, *fit(short_run, run, "--model.retrain.learning_rate", "0.5", "--ckpt_path", "last"))
    assert "model.retrain.learning_rate was 0.001, now 0.5" in line


def test_a_finished_run_shows_its_table_again(run, capsys, short_run):
    before = (run / "export" / "model.safetensors").stat().st_mtime_ns
    main(fit(short_run, run, "--ckpt_path", "last"))
    assert "site density" in capsys.readouterr().out
    assert (run / "export" / "model.safetensors").stat().st_mtime_ns == before


@pytest.fixture
def stopped(run, tmp_path):
    """The run as it stood in the middle of its last stage."""
    folder = tmp_path / "stopped"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("export", "report.json", "net"))
    shutil.copytree(run / "dense" / "net", folder / "dense" / "net")
    records = json.loads((folder / "stages.json").read_text())[:1]
    (folder / "stages.json").write_text(json.dumps(records))
    return folder


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00\x01broken", "is not a readable checkpoint"),
        (b"", "is not a readable checkpoint"),
        ({"state_dict": {}}, "was not written by lit_compress"),
        ({"lit_compress": {"method": "LPAF", "stage": "retrain"}}, "is of LPAF, stage retrain, not of SVD"),
    ],
)
def test_corrupt_or_foreign_checkpoint_is_one_line(stopped, content, words, capsys, short_run):
    path = stopped / "retrain" / "last.ckpt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    kept = path.read_bytes()
    assert words in fails(capsys, *fit(short_run, stopped, "--ckpt_path", "last"))
    assert path.read_bytes() == kept


def test_checkpoint_of_elsewhere_is_refused(run, stopped, capsys, short_run):
    for path in (run / "retrain" / "best.ckpt", stopped / "nothing.ckpt"):
        assert "ckpt_path: " in fails(capsys, *fit(short_run, stopped, "--ckpt_path", path))


def test_a_changed_length_is_refused(run, stopped, capsys, short_run, tmp_path, tiny_data):
    """The schedules would move: other data under the same config."""
    checkpoint = torch.load(run / "retrain" / "best.ckpt", weights_only=True)
    assert checkpoint["lit_compress"]["total_steps"] == 26
    data = tmp_path / "less"
    shutil.copytree(tiny_data, data)
    lines = (data / "train.jsonl").read_text().splitlines()
    (data / "train.jsonl").write_text("\n".join(lines[:50]) + "\n")
    args = fit(short_run, stopped, "--checkpoint_every", "2")
    with pytest.MonkeyPatch.context() as patch:  # stop after the first checkpoint
        from lit_compress.run.callbacks import Checkpoints

        save = Checkpoints._save

        def once(self, trainer, name, weights_only=False):
            save(self, trainer, name, weights_only)
            if name == "last.ckpt":
                raise RuntimeError("stopped")

        patch.setattr(Checkpoints, "_save", once)
        with pytest.raises(RuntimeError, match="stopped"):
            main([*args, "--ckpt_path", "last"])
    line = fails(capsys, *args, "--ckpt_path", "last", "--data.path", str(data))
    assert "begun with 26 optimizer steps, this config makes 14" in line
    lines[0] = lines[0].replace("a film", "dull film").replace('"sentence": "', '"sentence": "very ')
    (data / "train.jsonl").write_text("\n".join(lines) + "\n")  # as many rows, another text
    line = fails(capsys, *args, "--ckpt_path", "last", "--data.path", str(data))
    assert "the data is not what the stage was begun with" in line


def test_a_checkpoint_is_read_once(run, stopped, short_run, monkeypatch):
    from lit_compress.run import runner

    read, save, found = runner.read_checkpoint, Checkpoints._save, []

    def stop(self, trainer, name, weights_only=False):
        save(self, trainer, name, weights_only)
        raise RuntimeError("stopped")

    args = [*fit(short_run, stopped), "--checkpoint_every", "2", "--ckpt_path", "last"]
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_save", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            main(args)
    monkeypatch.setattr(runner, "read_checkpoint", lambda path: found.append(path.name) or read(path))
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda net, path: 0.0)
    main(args)
    assert found == ["last.ckpt", "best.ckpt"]


def test_validate_run_and_export_agree_with_the_report(run, capsys):
    report = json.loads((run / "report.json").read_text())
    for target in (run, run / "export"):
        capsys.readouterr()
        main(["validate", str(target)])
        said = dict(line.split() for line in capsys.readouterr().out.splitlines())
        assert list(said) == ["val/accuracy", "val/rows", "val/accuracy_low95", "val/accuracy_high95"]
        assert float(said["val/accuracy"]) == pytest.approx(report["compressed"]["metric"], abs=1e-6)
        assert said["val/rows"] == "40"
        assert float(said["val/accuracy_low95"]) < float(said["val/accuracy"]) < float(said["val/accuracy_high95"])


def test_test_needs_labels(run, capsys, tmp_path, tiny_data):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    shutil.copy(data / "validation.jsonl", data / "test.jsonl")
    main(["test", str(run), "--data.path", str(data)])
    assert capsys.readouterr().out.startswith("test/accuracy ")
    (data / "test.jsonl").write_text('{"sentence": "a film", "label": -1}\n')
    assert "labels" in fails(capsys, "test", run, "--data.path", data)


@pytest.mark.parametrize("target", ["", "export"])
def test_predict_writes_text_label_probability(run, target, tmp_path, tiny_data):
    out = tmp_path / "p.jsonl"
    main(["predict", str(run / target), "--output", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [json.loads(line) for line in (tiny_data / "validation.jsonl").read_text().splitlines()]
    assert [line["sentence"] for line in lines] == [row["sentence"] for row in rows]
    assert all(line["label"] in ("negative", "positive") and 0.5 <= line["probability"] <= 1 for line in lines)


def test_a_limit_on_validation_examples_is_no_limit_on_predictions(run, tmp_path, capsys, tiny_data):
    """What fit was given holds for validate, not for predict, which takes it when it is given to itself."""
    folder, out = tmp_path / "export", tmp_path / "p.jsonl"
    shutil.copytree(run / "export", folder)
    report = json.loads((folder / "report.json").read_text())
    report["config"]["data"]["validation_examples"] = 7
    (folder / "report.json").write_text(json.dumps(report))

    def said(command, *args):
        main([command, str(folder), *args])
        return capsys.readouterr().out

    assert said("predict", "--output", str(out)).startswith("40 predictions")
    every = out.read_text().splitlines()
    assert said("predict", "--output", str(out), "--data.validation_examples", "6").startswith("6 predictions")
    assert set(out.read_text().splitlines()) < set(every)
    stored = said("validate")
    assert float(stored.split()[1]) * 7 == pytest.approx(round(float(stored.split()[1]) * 7), abs=1e-5)
    assert stored != said("validate", "--data.validation_examples", "null")
    words = "data.validation_examples: 41 is more than there are; the largest is 40"
    assert words in fails(capsys, "validate", folder, "--data.validation_examples", "41")


def test_more_fisher_examples_than_there_are_are_refused_before_training(capsys, short_run, tmp_path):
    args = ["fit", "--model", "FWSVD", *short_run, "--run_dir", str(tmp_path / "run")]
    line = fails(capsys, *args, "--model.retrain.fisher_examples", "101")
    assert "retrain.fisher_examples: 101 is more than there are; the largest is 100" in line
    line = fails(capsys, *args, "--model.retrain.fisher_examples", "100", "--data.train_examples", "99")
    assert "the largest is 99" in line and not (tmp_path / "run").exists()


def test_predict_needs_no_labels(run, tmp_path):
    (tmp_path / "test.csv").write_text("sentence\na great film\n")
    main(["predict", str(run), "--data.path", str(tmp_path), "--output", str(tmp_path / "p.jsonl")])
    (line,) = (tmp_path / "p.jsonl").read_text().splitlines()
    assert json.loads(line)["sentence"] == "a great film"


def test_predict_keeps_ids_and_given_labels(run, tmp_path):
    """Also labels that are no classes: nothing is scored."""
    rows = ["id,sentence,label", "7,a great film,1", "x,a dull film,unknown", ",a warm film,"]
    (tmp_path / "test.csv").write_text("\n".join(rows) + "\n")
    main(["predict", str(run), "--data.path", str(tmp_path / "test.csv"), "--output", str(tmp_path / "p.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert list(lines[0]) == ["id", "sentence", "given", "label", "probability"]
    assert [(line.get("id"), line["sentence"], line.get("given")) for line in lines] == [
        ("7", "a great film", "positive"), ("x", "a dull film", "unknown"), (None, "a warm film", None)
    ]  # fmt: skip


def test_output_may_stand_anywhere_and_is_checked_before_the_work(run, tmp_path, capsys, monkeypatch, tiny_data):
    for args in (
        ["--output", "OUT", "RUN"],
        ["RUN", "--output=OUT"],
        ["RUN", "--data.batch_size", "8", "--output", "OUT"],
    ):
        out = tmp_path / "new" / "folder" / "p.jsonl"
        main(["predict", *(arg.replace("OUT", str(out)).replace("RUN", str(run)) for arg in args)])
        assert len(out.read_text().splitlines()) == 40
        out.unlink()
    monkeypatch.setattr("lit_compress.cli.targets.load_net", None)  # nothing is loaded
    (tmp_path / "file").write_text("")
    assert "is a folder; give a file" in fails(capsys, "predict", "--output", tmp_path, run)
    assert f"'{tmp_path}/file' is a file" in fails(capsys, "predict", run, "--output", tmp_path / "file" / "p.jsonl")
    data = tmp_path / "mine.jsonl"
    shutil.copy(tiny_data / "validation.jsonl", data)
    line = fails(capsys, "predict", run, "--output", data, "--data.path", data)
    assert "is the file that is read; give another" in line and len(data.read_text().splitlines()) == 40


def test_validate_and_test_read_all_of_a_file_that_fit_has_not_seen(run, tmp_path, capsys, tiny_data):
    shutil.copy(tiny_data / "validation.jsonl", tmp_path / "mine.jsonl")
    for command, prefix in (("validate", "val"), ("test", "test")):
        main([command, str(run), "--data.path", str(tmp_path / "mine.jsonl")])
        assert f"{prefix}/rows 40\n" in capsys.readouterr().out


def test_export_again_gives_the_same_net(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["export", str(run), "out", "--format", "torch"])
    assert "model.pt2: its logits differ by 0.0e+00" in capsys.readouterr().out
    program = json.loads((tmp_path / "out" / "report.json").read_text())["program"]
    assert program["file"] == "model.pt2" and (tmp_path / "out" / "model.pt2").stat().st_size == program["bytes"]
    assert program["inputs"] == ["input_ids", "attention_mask", "token_type_ids"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'torch.export.load("model.pt2").module()(**inputs)' in card
    assert "model.pt2" not in (run / "export" / "README.md").read_text()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (run / "export" / "model.safetensors").read_bytes()
    assert "--round_to 8 is for nets with narrow" in fails(capsys, "export", run, tmp_path / "x", "--round_to", "8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose me")
    assert "holds something that is not an export" in fails(capsys, "export", run, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_unfinished_run_is_not_exported(stopped, tmp_path, capsys):
    assert "stage retrain of" in fails(capsys, "export", stopped, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_config_names_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("lpaf_sst2.yaml") == find_config("lpaf_sst2") == (FOLDER / "lpaf.yaml", "sst2")
    (tmp_path / "lpaf_sst2.yaml").write_text("mine")
    assert find_config("lpaf_sst2.yaml") == (tmp_path / "lpaf_sst2.yaml", None)


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_config_parses(name):
    from lit_compress.cli.options import CommandLine

    parts = CommandLine(["--config", name], "fit").build()
    assert parts.method.task.name == parts.data.record.name
    assert (parts.method.stages()[0].name == "dense") == (parts.method.teacher is None)


@pytest.mark.slow
def test_help_is_fast_to_import_and_complete():
    """`--help` of the package imports nothing heavy; that of a command documents every option."""
    code = "import sys; from lit_compress.__main__ import main; main(['--help']); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert (
        out.strip().endswith("False")
        and "  lpaf_{cola,mnli,mrpc,qnli,qqp,rte,squad,squad_v2,sst2,stsb,wikitext2}.yaml" in out
    )
    out = subprocess.run(
        [sys.executable, "-m", "lit_compress", "fit", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--data.path" in out and "Folder of the run" in out and "--trainer.precision" not in out
    command = [sys.executable, "-m", "lit_compress", "fit", "--help", "trainer", "--config", "lpaf_sst2.yaml"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--model.prune.score" in out and "--model.retrain.p_init" in out and "--trainer.precision" in out


@pytest.mark.slow
def test_quickstart_starts_from_nothing(tmp_path, monkeypatch):
    """With an empty cache: the embedded data and backbone are made, the whole pipeline runs."""
    monkeypatch.setenv("LIT_COMPRESS_CACHE", str(tmp_path / "cache"))
    args = ["fit", "--config", "quickstart.yaml", "--ckpt_path", "last", "--run_dir", str(tmp_path / "run")]
    args += ["--data.train_examples", "96", "--trainer.enable_progress_bar", "false"]
    args += [text for stage in ("dense", "prune", "retrain") for text in (f"--model.{stage}.epochs", "1")]
    main(args)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["task"] == "docstrings"


@pytest.mark.slow
def test_a_terminated_run_does_not_end_as_if_it_were_done(short_run, tmp_path):
    args = ["fit", "--model", "SVD", *short_run, "--run_dir", str(tmp_path / "run"), "--checkpoint_every", "1"]
    process = processes.fork(args, tmp_path / "errors")
    while not (tmp_path / "run" / "dense" / "last.ckpt").exists():
        assert process.exitcode is None, (tmp_path / "errors").read_text()
        time.sleep(0.005)
    process.terminate()
    process.join()
    assert process.exitcode == 143
    assert "--ckpt_path last continues" in (tmp_path / "errors").read_text()


def test_options_hold_wherever_they_stand():
    """A config that comes later does not undo them."""
    from lit_compress.cli.options import CommandLine

    parts = CommandLine(["--model.density", "0.1", "--config", "lpaf_sst2.yaml", "--data.batch_size=8"], "fit").build()
    assert (parts.method.density, parts.data.batch_size) == (0.1, 8)
