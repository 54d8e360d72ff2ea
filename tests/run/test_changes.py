"""What a run that goes on has and was not begun with: refused in one line, or allowed and written down."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_folder import CONFIG

from lit_compress.run import changes
from lit_compress.run.folder import Run
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError
from lit_compress.version import __version__


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    made.begin(CONFIG)
    made.finish({"name": "dense", "data": "old", "version": __version__})
    return made


def altered(run, path, value):
    """The run's config with another value at a dotted path."""
    config = inner = run.config()
    *parents, last = path.split(".")
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return config


def data(name, steps=5, split=(8, 1, 1), task="sst2"):
    return SimpleNamespace(
        fingerprint=lambda: name, steps_per_epoch=lambda: steps, split=list(split), record=get_task(task)
    )


def test_options_that_may_change_are_returned(run):
    found = run.check_same(altered(run, "model.init_args.density", 0.5), allowed=True)
    assert found == [{"what": "model.density", "was": 0.25, "now": 0.5}]
    for path in ("model.class_path", "model.init_args.backbone", "data.task"):
        with pytest.raises(UserError, match=r"allow_changed: .*now other; the run there cannot continue"):
            run.check_same(altered(run, path, "other"), allowed=True)


def test_what_changes_no_result_may_change(run):
    for path in ("model.init_args.recompute", "model.init_args.teacher", "trainer.devices", "data.num_workers",
                 "data.batch_size", "trainer.accumulate_grad_batches"):  # fmt: skip
        assert run.check_same(altered(run, path, 2)) == []


def test_what_is_allowed_is_in_the_record_of_its_stage(run):
    config, found = altered(run, "data.seed", 4), [{"what": "data.seed", "was": 8, "now": 4}]
    run.change(config, found, "prune")
    run.keep_changes(found, "prune")  # once more, after another kill
    run.finish({"name": "prune"})
    assert run.finished()["prune"]["changed"] == run.changes() == [{"stage": "prune", **found[0]}]
    assert "changed" not in run.finished()["dense"]
    assert run.check_same(config) == []
    assert changes.changed_line(run.changes()[0]) == "data.seed was 8, from stage prune on 4"


@pytest.mark.parametrize(("option", "stage", "again"), [
    ("model.density", "prune", True), ("model.prune.init", "prune", True), ("model.retrain.rank", "prune", False),
    ("model.prune.learning_rate", "prune", False), ("model.distillation.alpha", "prune", False),
    ("data.batch_size", "prune", False), ("model.density", "dense", False), ("model.dense.parameters", "dense", True),
])  # fmt: skip
def test_only_a_stage_whose_model_changes_loses_its_checkpoints(option, stage, again, tmp_path):
    run = Run(tmp_path)
    run.begin(CONFIG)
    if stage != "dense":
        run.finish({"name": "dense"})
    method = SimpleNamespace(stages=lambda: [SimpleNamespace(name=name) for name in ("dense", "prune", "retrain")])
    run.stage(stage).mkdir()
    (run.stage(stage) / "last.ckpt").touch()
    changes.go_on(run, CONFIG, [{"what": option, "was": 1, "now": 2}], method)()
    assert (run.stage(stage) / "last.ckpt").exists() is not again and run.changes()[0]["stage"] == stage


@pytest.mark.parametrize("mark", [{}, {"data": "old", "version": __version__}])
def test_other_data(run, mark):
    assert changes.check_unchanged(run, data("old"), mark, False) == []
    with pytest.raises(UserError, match=r"data.path: the data is not that of stage dense of .*or --allow_changed"):
        changes.check_unchanged(run, data("new"), mark, False)
    found = changes.check_unchanged(run, data("new"), mark, True)
    assert found == [{"what": "data", "was": "old", "now": "new"}]


@pytest.mark.parametrize(("task", "split", "line"), [
    ("sst2", [4, 2, 1], None),
    ("sst2", [4, 1, 2], None),
    ("sst2", [8, 1, 2], r"data.batch_size: the global batch of .* was 8, now 16 \(batch_size, .*give the same product"),
    ("stsb_embedding", [4, 2, 1], r"data.batch_size: the split of .* was \[8, 1, 1\], now \[4, 2, 1\] .*vectors"),
])  # fmt: skip
def test_a_step_may_be_divided_otherwise(run, task, split, line):
    mark = {"data": "old", "split": [8, 1, 1], "version": __version__}
    now = data("old", split=split, task=task)
    if line is None:
        assert changes.check_unchanged(run, now, mark, False) == []
        return
    with pytest.raises(UserError, match=line):
        changes.check_unchanged(run, now, mark, False)
    [found] = changes.check_unchanged(run, now, mark, True)
    assert found["was"] in (8, [8, 1, 1])


def test_positions_that_counted_micro_batches_begin_again(run):
    mark = {"data": "old", "version": __version__}
    assert changes.check_unchanged(run, data("old"), mark, False) == []
    [found] = changes.check_unchanged(run, data("old", split=[4, 2, 1]), mark, True)
    assert found["what"] == "split"


def test_another_version(run):
    mark = {"data": "old", "version": "0.0.1"}
    with pytest.raises(UserError, match=rf"lit_compress 0.0.1 made .*, this is {__version__}"):
        changes.check_unchanged(run, data("old"), mark, False)
    found = changes.check_unchanged(run, data("old"), mark, True)
    assert found == [{"what": "version", "was": "0.0.1", "now": __version__}]


def test_a_stage_of_another_length_begins_anew():
    stage = SimpleNamespace(settings=SimpleNamespace(epochs=3))
    assert changes.other_length(stage, data("x"), {}, {}) == []
    assert changes.other_length(stage, data("x"), {}, {"total_steps": 15}) == []
    assert changes.other_length(stage, data("x", 4), {}, {"total_steps": 15}) == [
        {"what": "steps", "was": 15, "now": 12}
    ]
