"""Models and data by name: resolved once, to a commit that the run keeps; then nothing is asked, whatever main is."""

from __future__ import annotations

import json
import re
import shutil

import huggingface_hub.constants
import pytest
import yaml
from hub import as_a_new_process, running
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from mistakes import fails, rewrite

import lit_compress as lc
from lit_compress.__main__ import main
from lit_compress.cli import fitting
from lit_compress.run.folder import Run

CARD = b"---\nlicense: apache-2.0\n---\n# a net\n"


def by_name(short_run, *more):
    """Return the options of a short run with the backbone's name in place of its folder, and one epoch a stage."""
    words = ["1" if word == "2" else word for word in short_run]
    words[words.index("--model.backbone") + 1] = "me/net"
    return ["fit", "--model", "SVD", "--model.density", "0.5", "--trainer.logger", "false", *words, *map(str, more)]


def backbone_files(tiny_backbone):
    files = {path.name: path.read_bytes() for path in tiny_backbone.iterdir()}
    return files | {"README.md": CARD, "tf_model.h5": b"x", "onnx/model.onnx": b"x", "pytorch_model.bin": b"x"}


def other_vocabulary(files):
    """Return the files with the words of the tokenizer in another order, and another card."""
    made = json.loads(files["tokenizer.json"])
    vocabulary = made["model"]["vocab"]
    words = [word for word in vocabulary if not word.startswith("[")]
    numbers = [vocabulary[word] for word in words]
    vocabulary.update(zip(words, reversed(numbers), strict=True))
    return files | {"tokenizer.json": json.dumps(made).encode(), "vocab.txt": b""}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_backbone, short_run):
    """A run of a named backbone, whose hub is gone before the first stage; its place, commit, and what was asked."""
    place, begin = tmp_path_factory.mktemp("named"), fitting.run_stages
    with running(place / "cache") as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "run_stages", lambda *args: (hub.close(), begin(*args))[1])
        commit = hub.add("me/net", backbone_files(tiny_backbone))
        main(by_name(short_run, "--run_dir", place / "run"))
        asked = list(hub.asked())
    return place, commit, asked


@pytest.fixture
def run(made, tmp_path):
    """A copy of the run."""
    return shutil.copytree(made[0] / "run", tmp_path / "run")


@pytest.fixture
def again(made, monkeypatch, hub):
    """The hub with the model's commit, and the cache that the run left."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(made[0] / "cache"))
    return hub


def test_a_name_is_resolved_once_to_a_commit_and_only_what_is_needed_comes(made):
    place, commit, asked = made
    assert sum("/api/models/me/net" in line and "/tree/" not in line for line in asked) == 1
    assert not [line for line in asked if "resolve/main" in line]
    assert not [line for line in asked if "onnx" in line or "tf_model" in line or "pytorch_model" in line]
    assert sum(line == f"GET /me/net/resolve/{commit}/model.safetensors" for line in asked) == 1
    config = yaml.safe_load((place / "run" / "config.yaml").read_text())["model"]["init_args"]
    report = json.loads((place / "run" / "report.json").read_text())["config"]["model"]["init_args"]
    assert config["backbone"] == f"me/net@{commit}" == report["backbone"]


def test_export_takes_the_tokenizer_of_the_run(made, run, again, tiny_backbone, tmp_path, monkeypatch):
    """A new commit has the words in another order, or model and cache are gone: a finished run needs neither."""
    before = json.loads((run / "report.json").read_text())["compressed"]["metric"]
    for step in ("other", "gone"):
        if step == "other":
            again.add("me/net", backbone_files(tiny_backbone))
            again.add("me/net", other_vocabulary(backbone_files(tiny_backbone)))
        else:
            again.repositories.clear()
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
        as_a_new_process()
        main(["export", str(run), str(tmp_path / step)])
        assert json.loads((tmp_path / step / "report.json").read_text())["compressed"]["metric"] == before
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / step / name).read_bytes() == (run / "export" / name).read_bytes()
    assert not again.asked()


def test_a_finished_run_is_evaluated_without_a_request(run, again, capsys):
    for command in ("validate", "predict"):
        main([command, str(run)])
    assert not again.asked()


@pytest.fixture
def stopped(run):
    """The run as it stood after its first stage."""
    shutil.rmtree(run / "export")
    shutil.rmtree(run / "retrain")
    (run / "report.json").unlink()
    rewrite(run / "stages.json", json.dumps(json.loads((run / "stages.json").read_text())[:1]))
    return run


def test_a_run_goes_on_with_its_commit(made, stopped, again, tiny_backbone, short_run):
    again.add("me/net", other_vocabulary(backbone_files(tiny_backbone)))
    main(by_name(short_run, "--run_dir", stopped, "--ckpt_path", "last"))
    first, second = (json.loads((place / "report.json").read_text()) for place in (made[0] / "run", stopped))
    assert first["compressed"]["metric"] == second["compressed"]["metric"] and not again.asked()


def test_a_run_that_knows_no_commit_goes_on(stopped, again, tiny_backbone, short_run):
    """As version 0.2 made them."""
    again.add("me/net", backbone_files(tiny_backbone))
    config = (stopped / "config.yaml").read_text()
    rewrite(stopped / "config.yaml", re.sub(r"me/net@\w+", "me/net", config))
    main(by_name(short_run, "--run_dir", stopped, "--ckpt_path", "last"))
    assert "me/net\n" in (stopped / "config.yaml").read_text()


def test_other_processes_take_the_commit_of_the_first(made, run, again, tiny_backbone, short_run, monkeypatch):
    """They are started at once, and main may move between the requests of two."""
    told = {"config": Run(run).config(), "density": None}
    again.add("me/net", other_vocabulary(backbone_files(tiny_backbone)))
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    seen = []
    monkeypatch.setattr(fitting, "of_first", lambda *_: told)
    monkeypatch.setattr(
        fitting, "settle_budget", lambda cli, *_, **__: seen.append(cli.config.model.init_args.backbone)
    )
    monkeypatch.setattr(fitting, "run_stages", lambda *_: None)
    monkeypatch.setattr(fitting, "_report", lambda *_: None)
    as_a_new_process()
    main(by_name(short_run, "--run_dir", run))
    assert seen == [f"me/net@{made[1]}"]


def test_another_revision_is_another_run(made, stopped, again, tiny_backbone, short_run, capsys):
    other = again.add("me/net", other_vocabulary(backbone_files(tiny_backbone)), revision="v2")
    words = by_name(short_run, "--run_dir", stopped, "--ckpt_path", "last", "--model.backbone", "me/net@v2")
    assert f"model.backbone was me/net@{made[1]}, now me/net@{other}" in fails(capsys, *words)


def test_a_revision_of_a_folder_is_refused(short_run, capsys, tmp_path):
    words = ["fit", "--model", "SVD", *short_run, "--run_dir", str(tmp_path / "run"), "--data.revision", "v1"]
    assert "is no name on the hub; leave it out" in fails(capsys, *words)


# --------------------------------------------------------------------------------- fine-tuned models, exports, data


@pytest.fixture
def named(made, hub, tmp_path, monkeypatch):
    """A hub with a fine-tuned model, ``me/trained``, and an export, ``me/small``; the working folder is empty."""
    net = {path.name: path.read_bytes() for path in (made[0] / "run" / "dense" / "net").iterdir()}
    del net["structure.json"], net["manifest.json"]
    hub.add("me/trained", net | {"README.md": CARD})
    hub.add("me/small", made[0] / "run" / "export")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
    return hub


def test_a_fine_tuned_model_is_the_teacher_as_it_is(named, short_run, tmp_path, capsys):
    words = [word.replace("me/net", "me/trained") for word in by_name(short_run, "--run_dir", tmp_path / "run")]
    words = [word for at, word in enumerate(words) if not any("dense" in w for w in words[max(0, at - 1) : at + 1])]
    main(words)
    commit = named.repositories["models", "me/trained"].revisions["main"]
    assert "it is the teacher;" in capsys.readouterr().err
    init = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["init_args"]
    assert init["teacher"] == init["backbone"] == f"me/trained@{commit}"
    stages = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert stages[0]["steps"] == 0 and stages[0]["teacher"] == "me/trained"
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert "license: apache-2.0" in card and "base_model: me/trained" in card
    assert f"Made from `me/trained` at commit `{commit}`" in card
    main([*words, "--ckpt_path", "last", "--model.teacher", "me/trained"])  # at its commit: the same run


def test_commands_take_names(named, tiny_data, made, capsys, tmp_path):
    data = ["--data.task", "sst2", "--data.path", str(tiny_data)]
    scores = []
    run = made[0] / "run"
    for words in (["me/trained", *data], [str(run / "dense" / "net")], ["me/small"], [str(run)]):
        capsys.readouterr()
        main(["validate", *words])
        scores.append(capsys.readouterr().out.splitlines())
    assert scores[0] == scores[1] and scores[2] == scores[3]
    assert lc.load("me/small").report["method"] == "SVD" and lc.evaluate("me/small")["rows"] == 40
    main(["predict", "me/small"])
    assert len((tmp_path / "here" / "predictions.jsonl").read_text().splitlines()) == 40
    main(["factorize", "me/trained", "small", *data, "--density", "0.5", "--weighting", "none"])
    card = (tmp_path / "here" / "small" / "README.md").read_text()
    assert "license: apache-2.0" in card and "at commit" in card
