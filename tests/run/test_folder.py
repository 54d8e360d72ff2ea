"""The run folder: begun once, continued only by the same config."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from lit_compress.export.choices import Choices
from lit_compress.run.config import bring_up_to_date
from lit_compress.run.folder import Run
from lit_compress.utils.errors import UserError

CONFIG = {
    "run_dir": "a",
    "export": asdict(Choices()),
    "model": {"class_path": "LPAF", "init_args": {"density": 0.25, "prune": {"epochs": 3}}},
    "data": {"path": "here", "batch_size": 8},
    "trainer": {"devices": 1, "precision": "32"},
}


def test_a_config_alone_is_not_a_started_run(tmp_path):
    run = Run(tmp_path / "run")
    run.begin(CONFIG)
    assert run.recorded() == CONFIG and not run.started
    run.finish({"name": "dense", "steps": 3})
    assert run.started and run.finished() == {"dense": {"name": "dense", "steps": 3}}
    run.finish({"name": "prune"})
    assert list(run.finished()) == ["dense", "prune"]


def changed(path, value):
    import copy

    config = copy.deepcopy(CONFIG)
    *parents, last = path.split(".")
    inner = config
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return config


@pytest.mark.parametrize("path", ["run_dir", "data.path", "trainer.devices"])
def test_where_it_runs_may_change(path, tmp_path):
    run = Run(tmp_path)
    run.begin(CONFIG)
    run.check_same(changed(path, "other"))


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("model.init_args.density", "model.density was 0.25, now other"),
        ("model.init_args.prune.epochs", "model.prune.epochs was 3, now other"),
        ("trainer.precision", "trainer.precision was 32"),
        ("model.class_path", "model.class_path was LPAF"),
    ],
)
def test_what_it_computes_may_not(path, shown, tmp_path):
    run = Run(tmp_path)
    run.begin(CONFIG)
    with pytest.raises(UserError, match=shown):
        run.check_same(changed(path, "other"))


def test_unreadable_config_is_one_line(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match="is not readable YAML") as error:
        Run(tmp_path).config()
    assert "\n" not in str(error.value)


def of_lpaf(**init):
    return CONFIG | {"model": {"class_path": "lit_compress.methods.LPAF", "init_args": {"rank": None, **init}}}


def test_the_shape_of_layers_was_free_before_it_was_an_option(tmp_path):
    run = Run(tmp_path)
    run.begin(of_lpaf(density=0.25))
    assert run.check_same(of_lpaf(density=0.25, shape="free")) == []
    with pytest.raises(UserError, match=r"model\.shape was free, now uniform"):
        run.check_same(of_lpaf(density=0.25, shape="uniform"))


def test_a_density_that_an_earlier_version_stored_is_the_usual_one(tmp_path):
    """It stored 0.25 where none was given."""
    run = Run(tmp_path)
    run.begin(of_lpaf(density=0.25))
    run.check_same(of_lpaf(density=None))
    run.check_same(of_lpaf(density=0.25))
    with pytest.raises(UserError, match=r"model.density was 0.25, now 0.5"):
        run.check_same(of_lpaf(density=0.5))
    run.begin(of_lpaf(density=0.25, rank=30))
    run.check_same(of_lpaf(density=None, rank=30))
    with pytest.raises(UserError, match=r"model.density was None, now 0.25"):
        run.check_same(of_lpaf(density=0.25))


def test_the_share_of_factors_was_a_number_in_earlier_versions(tmp_path):
    def of_losparse(density, low_rank):
        init = {"density": density, "prune": {"low_rank": low_rank}}
        return CONFIG | {"model": {"class_path": "lit_compress.methods.LoSparse", "init_args": init}}

    for density in (0.1, None):
        run = Run(tmp_path / str(density))
        run.begin(of_losparse(density, 0.05))
        assert run.check_same(of_losparse(density, None)) == []
    run = Run(tmp_path / "small")
    run.begin(of_losparse(0.05, 0.05))
    with pytest.raises(UserError, match=r"model.prune.low_rank was 0.05, now 0.025"):
        run.check_same(of_losparse(0.05, None))


def test_a_run_whose_seed_split_its_file_keeps_that_split(tmp_path):
    run = Run(tmp_path)
    run.begin(CONFIG | {"seed_everything": 7})
    assert run.config()["data"]["split_seed"] == 7
    now = CONFIG | {"seed_everything": 7, "data": CONFIG["data"] | {"split_seed": 42}}
    with pytest.raises(UserError, match=r"data.split_seed was 7, now 42; give the same config"):
        run.check_same(now)
    run.begin(now)
    assert run.recorded() == now


@pytest.mark.parametrize(("method", "relative"), [("SecondOrder", True), ("LPAF", False)])
def test_older_configs_say_whether_distances_were_relative(method, relative):
    config = {"model": {"class_path": f"lit_compress.methods.{method}", "init_args": {"distillation": {"alpha": 0.5}}}}
    assert bring_up_to_date(config)["model"]["init_args"]["distillation"] == {"alpha": 0.5, "relative": relative}


def test_a_run_with_an_option_that_is_gone_is_read_and_does_not_go_on(tmp_path):
    old, run = CONFIG | {"export": CONFIG["export"] | {"pivot": True}}, Run(tmp_path)
    run.begin(old)
    assert run.recorded() == run.config() | {"run_dir": "a"} == CONFIG
    with pytest.raises(UserError, match=r"pivot: True was removed in version 0\.3; factors are stored"):
        run.check_same(CONFIG)
    run.begin(CONFIG | {"export": CONFIG["export"] | {"pivot": False}})
    assert run.check_same(CONFIG) == []
    run.keep_removal({"removes": "both", "density": 0.5, "tried": [], "asked": ["speedup=2x", "structures", "both"]})
    assert run.density("speedup=2x") == 0.5
    with pytest.raises(UserError, match=r"cannot go on: removes 'both': this value was removed in version 0\.3; auto"):
        run.removal(["speedup=2x", "structures", "components"])
