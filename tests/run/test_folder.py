"""The run folder: begun once, continued only by the same config."""

from __future__ import annotations

import copy
import shutil
import sys
from dataclasses import asdict

import pytest
import torch
from tiny import make_net

from lit_compress.export.choices import Choices
from lit_compress.models.storage import save_net
from lit_compress.run.folder import CURVES, SETTINGS, Run, checked_config, end_work
from lit_compress.stages.recompute import recompute
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import link_if_equal

CONFIG = {
    "run_dir": "a",
    "export": asdict(Choices()),
    "model": {"class_path": "LPAF", "init_args": {"density": 0.25, "prune": {"epochs": 3}, "teacher": "moved"}},
    "data": {"path": "here", "batch_size": 8},
    "trainer": {"devices": 1, "precision": "32"},
}


def test_a_config_alone_is_not_a_started_run(tmp_path):
    run = Run(tmp_path / "new" / "run")
    assert not run.foreign
    run.begin(CONFIG)
    assert run.recorded() == CONFIG and not run.started and not run.foreign
    (run.folder / "a").touch()
    assert not run.foreign and Run(run.folder.parent).foreign
    run.finish({"name": "dense", "steps": 3})
    assert run.started and run.finished() == {"dense": {"name": "dense", "steps": 3}}
    run.finish({"name": "prune"})
    assert list(run.finished()) == ["dense", "prune"]


def changed(path, value):
    config = inner = copy.deepcopy(CONFIG)
    *parents, last = path.split(".")
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return config


def test_only_what_changes_no_result_may_change(tmp_path):
    run = Run(tmp_path)
    run.begin(CONFIG)
    names = "run_dir data.path data.num_workers data.batch_size trainer.devices trainer.accumulate_grad_batches"
    for path in f"{names} model.init_args.recompute model.init_args.teacher".split():
        run.check_same(changed(path, "other"))
    for path, shown in {
        "model.init_args.density": "model.density was 0.25, now other",
        "model.init_args.prune.epochs": "model.prune.epochs was 3, now other",
        "trainer.precision": "trainer.precision was 32",
        "model.class_path": "model.class_path was LPAF",
    }.items():
        with pytest.raises(UserError, match=shown):
            run.check_same(changed(path, "other"))
    run.begin(changed("model.init_args.teacher", None))
    with pytest.raises(UserError, match=r"model\.teacher was None, now moved; give the same"):
        run.check_same(CONFIG)


def test_a_run_whose_seed_split_its_file_keeps_that_split_and_an_older_one_is_refused(tmp_path):
    run = Run(tmp_path)
    run.begin(CONFIG | {"seed_everything": 7})
    assert run.config()["data"]["split_seed"] == 7
    now = CONFIG | {"seed_everything": 7, "data": CONFIG["data"] | {"split_seed": 42}}
    with pytest.raises(UserError, match=r"data.split_seed was 7, now 42; give the same config"):
        run.check_same(now)
    run.begin(now)
    assert run.recorded() == now
    run.begin({name: values for name, values in CONFIG.items() if name != "export"})
    with pytest.raises(UserError, match=r"config.yaml' is of a version before 0.2, which this one does not read; make"):
        run.config()


def test_a_run_with_an_option_that_is_gone_is_read_and_does_not_go_on(tmp_path):
    old, run = CONFIG | {"export": CONFIG["export"] | {"pivot": True}}, Run(tmp_path)
    run.begin(old)
    assert run.recorded() == run.config() | {"run_dir": "a"} == CONFIG
    with pytest.raises(UserError, match=r"pivot: True was removed in version 0\.3; see .*another --run_dir"):
        run.check_same(CONFIG)
    run.begin(CONFIG | {"trust_remote_code": True})
    with pytest.raises(UserError, match=r"trust_remote_code: True was removed .*another --run_dir"):
        run.check_same(CONFIG)
    run.begin(CONFIG | {"export": CONFIG["export"] | {"pivot": False}, "trust_remote_code": False})
    run.check_same(CONFIG)
    now = changed("model.init_args.retrain", {"removes": None})
    run.begin(now)
    run.keep("removal.json", {"removes": "both", "density": 0.5, "tried": [], "asked": ["speedup=2x", "both"]})
    assert run.density("speedup=2x") == 0.5 and run.density("speedup=3x") is None and run.recorded() == now
    with pytest.raises(UserError, match=r"removes: 'both' was removed in version 0\.3; see"):
        run.check_same(now)
    run.keep("removal.json", {"removes": "components", "density": 0.5, "tried": [], "asked": ["speedup=2x", "both"]})
    assert run.config()["model"]["init_args"]["retrain"] == {"removes": "components"}


@pytest.fixture
def done(tmp_path):
    """A finished run: its records, and words in place of its models."""
    made = Run(tmp_path / "run")
    made.begin(CONFIG)
    for name in ("dense", "prune"):
        made.net(name).mkdir(parents=True)
        (made.net(name) / "model.safetensors").write_text(name)
        made.finish({"name": name})
    return made


def claim(run):
    with run.claim():
        (run.folder / ".lock").unlink()


def test_what_killed_processes_left_goes_and_all_else_stays(done):
    """Checkpoints of a stage whose model is not there stay."""
    done.finish({"name": "retrain"})
    kept = [path for path in done.folder.rglob("*") if path.is_file()]
    kept += [done.stage("retrain") / name for name in ("best.ckpt", "last.ckpt")]
    left = [done.stage("dense") / name for name in ("best.ckpt", "last.ckpt", ".last.ckpt.tmp")]
    left += [done.folder / ".stages.json.7.tmp", done.stage("dense") / ".net.tmp" / "x"]
    for path in (*kept, *left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    claim(done)
    assert sorted(path for path in done.folder.rglob("*") if path.is_file()) == sorted(kept)


def test_finished_work_goes_at_once(tmp_path, monkeypatch):
    """Killed at the first removal, only its curves are there."""
    for path in (tmp_path / "work" / SETTINGS, tmp_path / "work" / CURVES / "x", tmp_path / "work" / "net" / "x"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: sys.exit())
    with pytest.raises(SystemExit):
        end_work(tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").iterdir()] == [CURVES]


def test_links_are_not_followed(done, tmp_path):
    """Not a stage's folder that is a link, not a stage whose name is a path."""
    other = tmp_path / "other"
    shutil.move(done.stage("prune"), other)
    done.stage("prune").symlink_to(other)
    (other / "best.ckpt").write_text("mine")
    claim(done)
    assert (other / "best.ckpt").exists()
    done.finish({"name": "../other"})
    with pytest.raises(UserError, match="holds something else than the records of stages"):
        claim(done)


def test_equal_files_are_stored_once(tmp_path, monkeypatch):
    """Where links are possible."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("same"), other.write_text("same")
    with monkeypatch.context() as patch:
        patch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
        link_if_equal(one, other)
    assert not one.samefile(other)
    link_if_equal(one, other)
    assert one.samefile(other)


CLASS = {"class_path": "os.system", "init_args": {"command": "true"}}


def stored_config(**values):
    model = {
        "class_path": "mine.Mine",
        "init_args": {"density": 0.5, "prune": {"epochs": 1, "gates": ["a", "b"], "tables": [1, [2.0, None]]}},
    }
    return {"model": model, "data": {"task": "sst2"}, "export": {}, "trainer": {"precision": "bf16-mixed"}, **values}


def test_known_keys_are_kept():
    stored = stored_config(seed_everything=3, run_dir="x", ckpt_path="last", trust_remote_code=True, anything=CLASS)
    kept = checked_config("x", stored)
    assert kept.keys() == {"model", "data", "export", "trainer", "seed_everything"}
    assert kept["model"] == stored_config()["model"] and kept["trainer"] == stored_config()["trainer"]


@pytest.mark.parametrize("value", [CLASS, [CLASS], [[CLASS]], {"a": CLASS}, {1: 2}, {"class_path": "os.system"}, {2}])
def test_a_class_is_left_out_or_refused(value):
    trainer = stored_config(trainer={"strategy": value, "devices": 1})
    assert not checked_config("x", trainer)["trainer"].get("strategy") and trainer["trainer"]["strategy"] == value
    stored = stored_config()
    stored["model"]["init_args"]["prune"]["tables"] = value
    assert not checked_config("x", stored)["model"]["init_args"]["prune"].get("tables")
    for group in ("data", "export"):
        with pytest.raises(UserError, match=rf"x: {group}\.labels.* is no plain value; a stored config cannot name"):
            checked_config("x", stored_config(**{group: {"labels": value}}))


def test_the_model_at_hand_is_as_it_would_be_loaded_and_given_once(tmp_path):
    run, net = Run(tmp_path), make_net()
    run.net("dense").mkdir(parents=True)
    save_net(net, run.net("dense"))
    for weight in (net.get_parameter(f"bert.encoder.layer.{i}.output.dense.weight") for i in range(2)):
        weight.data = weight.detach().t().contiguous().t()
    run.hand_on("dense", net.requires_grad_(False), make_net())
    found, loaded = run.load(run.net("dense")), run.load(run.net("dense"))
    assert found is net and loaded is not net
    for (name, value), (_, other) in zip(found.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(value, other) and value.stride() == other.stride() and value.requires_grad, name
    recompute(net)
    run.hand_on("dense", net, make_net())
    assert not run.at_hand
