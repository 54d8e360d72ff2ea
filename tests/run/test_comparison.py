"""The plan of a comparison: its cells and commands; equal updates; mistakes in its config."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lit_compress.run.comparison import divide, jobs_of, read_comparison
from lit_compress.utils.errors import UserError

OUT = Path("out")
BASE = {
    "budgets": [0.25, "size=20MB"], "seeds": [1, 2], "learning_rates": [1e-4, 3e-4], "updates": 12,
    "options": {"data.task": "sst2", "data.batch_size": 4, "trainer.precision": "bf16-mixed"},
    "taught": {"model.distillation.alpha": 0.5},
    "methods": {
        "LPAF": {"split": {"prune": 1, "retrain": 2}},
        "SVD, no training": {"train": False},
        "SP3": {"without": "model.distillation", "options": {"trainer.precision": "32-true"}},
    },
}  # fmt: skip
STAGES = {"LPAF": ("prune", "retrain"), "SVD": ("retrain",), "SP3": ("prune",)}


def plan(**changes):
    """Return the runs without their teachers."""
    made = read_comparison(BASE | changes, "c.yaml")
    methods = [replace(e, stages=STAGES[e.method]) for e in made.entries()]
    splits = [entry.shares() for entry in methods]
    return [job for job in jobs_of(made, methods, OUT, *divide(made.updates, splits, 5)) if job.label]


def options(job):
    return dict(word[2:].split("=", 1) for word in job.words[1:])


def test_every_method_budget_and_seed_is_a_cell_and_trained_ones_try_the_same_rates():
    found = plan()
    assert Counter(Counter(job.cell for job in found).values()) == {2: 8, 1: 4}
    assert [job.name for job in plan(seeds=[1, 2, 1])] == [job.name for job in found]
    assert [job.name for job in found[:2]] == [f"lpaf-density=0.25-seed=1-rate={rate}" for rate in ("0.0001", "0.0003")]
    assert {job.teacher.name for job in found} == {"seed=1", "seed=2"}
    for job in found:
        given = options(job)
        assert given["run_dir"] == str(job.folder) == f"out/runs/{job.name}" and given["ckpt_path"] == "last"
        assert given["seed_everything"] == str(job.seed) and job.teacher.name == f"seed={job.seed}"
        assert given["model.teacher"] == f"out/teachers/seed={job.seed}/dense/net"
        size = {"density=0.25": {"model.density": "0.25"}, "size=20MB": {"model.budget": "size=20MB"}}
        assert given.items() >= size[job.budget].items()


def test_all_trained_methods_make_the_same_updates():
    found = plan()
    for job in found:
        given = options(job)
        epochs = [int(v) for k, v in given.items() if k.endswith(".epochs")]
        steps = sum(epochs) * int(given["trainer.limit_train_batches"])
        assert steps == (0 if job.rate is None else 12), job.name
        assert given["trainer.accumulate_grad_batches"] == "1"
    lpaf = options(found[0])
    assert lpaf["model.retrain.epochs"] == "2" and lpaf["model.prune.learning_rate"] == "0.0001"


def test_options_of_a_method_replace_those_of_all():
    by_label = {job.label: options(job) for job in plan()}
    sp3, lpaf = by_label["SP3"], by_label["LPAF"]
    assert sp3["trainer.precision"] == "32-true" and "model.distillation.alpha" not in sp3
    assert lpaf["trainer.precision"] == "bf16-mixed" and lpaf["model.distillation.alpha"] == "0.5"


def test_a_method_may_have_budgets_of_its_own():
    found = plan(methods={"SVD": {"train": False}, "LPAF": {"train": False, "budgets": [0.33, 0.25]}},
                 budgets=[0.5, 0.25], seeds=[1])  # fmt: skip
    assert [(job.label, job.budget) for job in found] == [
        ("SVD", "density=0.5"), ("SVD", "density=0.25"), ("LPAF", "density=0.25"), ("LPAF", "density=0.33"),
    ]  # fmt: skip
    assert options(found[-1])["model.density"] == "0.33"


def test_a_given_teacher_is_that_of_all_seeds():
    assert {(job.teacher, options(job)["model.teacher"]) for job in plan(teacher="my_model")} == {(None, "my_model")}


def test_an_epoch_is_limited_to_its_steps():
    found = plan(options={"trainer.accumulate_grad_batches": 3})
    assert options(found[0])["trainer.limit_train_batches"] == "4"


def test_updates_are_divided_into_whole_epochs_that_the_data_has():
    halves, thirds, none = {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 0}
    assert divide(1000, [halves, none], 250) == (4, 250)
    assert divide(1000, [{"a": 1}], 2000) == (1, 1000)
    assert divide(12, [halves, thirds], 5) == (6, 2)
    with pytest.raises(UserError, match=r"updates: 1009 cannot be divided .* nearest: updates 1010"):
        divide(1009, [{"a": 1}], 250)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": [1]}, "unknown key 'budget' in 'c.yaml'; did you mean 'budgets'?"),
        ({"methods": None}, "'c.yaml' names no methods"),
        ({"methods": {"A": {"optoins": {}}}}, "unknown key 'optoins' in methods.A; did you mean 'options'?"),
        ({"methods": {"SVD": {"each": {"a": [1]}}}}, "unknown key 'each' in methods.SVD"),
        ({"methods": {"A b": {}, "A-B": {}}}, "two would have the same folder"),
        ({"learning_rates": ["1e-4"]}, "give a list of numbers above 0, with a point, e.g. [1.0e-4]"),
        ({"methods": {"X": {"method": 5}}}, "methods.X.method: 5; give the name of a class, e.g. LPAF"),
        ({"methods": {"SVD": {"budgets": 0.5}}}, "methods.SVD.budgets: 0.5; give a list, e.g. [0.25]"),
        ({"methods": {"SVD": {"options": 5}}}, "methods.SVD.options: 5; give OPTION: VALUE"),
        ({"seeds": [0.5]}, "seeds: [0.5]; give a list of whole numbers, e.g. [1]"),
        ({"seeds": [True]}, "seeds: [True]; give a list of whole numbers, e.g. [1]"),
        ({"updates": True}, "updates: True; give a whole number from 1 on"),
        ({"updates": 0}, "updates: 0; give a whole number from 1 on"),
        ({"epochs": 4}, "unknown key 'epochs' in 'c.yaml'"),
        ({"methods": {"SVD": {"options": {"data.batch_size": 8}}}}, "data.batch_size is the same for all methods"),
        ({"methods": {"SVD": {"options": {"model.retrain.epochs": 8}}}}, "is the same for all methods"),
        ({"budgets": ["much"]}, "'density=much' is no number"),
        ({"budgets": [[0.25]]}, "budgets: [[0.25]]; give a list, e.g. [0.25]"),
        ({"methods": {"LPAF": {"split": {"retain": 1}}}}, "no stage 'retain'; did you mean 'retrain'?"),
        ({"methods": {"LPAF": {"split": {"prune": 0}}}}, "LPAF.split: {'prune': 0}; give whole numbers from 0 on"),
    ],
)
def test_mistakes_are_one_line(changes, said):
    with pytest.raises(UserError) as error:
        plan(**changes)
    assert said in str(error.value) and "\n" not in str(error.value)
