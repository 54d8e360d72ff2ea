"""The plan of a comparison: its cells and commands; equal updates; mistakes in its config."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lit_compress.run.comparison import Plan, divide, read_comparison, shares
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
    made = read_comparison(BASE | changes, "c.yaml")
    methods = [replace(e, stages=STAGES[e.method], words=(f"--model={e.method}",)) for e in made.entries()]
    splits = [*map(shares, methods)]
    return Plan(made, methods, OUT, *divide(made.updates, made.epochs, splits, 5))


def options(job):
    return dict(word[2:].split("=", 1) for word in job.words[1:])


def test_every_method_budget_and_seed_is_a_cell_and_trained_ones_try_the_same_rates():
    found = plan().cells
    assert len(found) == 2 * 2 * 3 == len({cell.name for cell in found})
    assert Counter(len(cell.jobs) for cell in found) == {2: 8, 1: 4}
    assert (
        found[0].name == "lpaf-density=0.25-seed=1" and found[0].jobs[1].name == "lpaf-density=0.25-seed=1-rate=0.0003"
    )
    assert [*plan().teachers] == [1, 2]
    for cell in found:
        for job in cell.jobs:
            given = options(job)
            assert given["run_dir"] == f"out/{job.folder}" and given["ckpt_path"] == "last"
            assert given["seed_everything"] == str(cell.seed) and job.teacher.name == f"seed={cell.seed}"
            assert given["model.teacher"] == f"out/teachers/seed={cell.seed}/dense/net"
            size = {"density=0.25": {"model.density": "0.25"}, "size=20mb": {"model.budget": "size=20MB"}}
            assert given.items() >= size[cell.budget.lower()].items()


def test_all_trained_methods_make_the_same_updates():
    found = plan().cells
    for cell in found:
        for job in cell.jobs:
            given = options(job)
            epochs = [int(v) for k, v in given.items() if k.endswith(".epochs")]
            steps = sum(epochs) * int(given["trainer.limit_train_batches"])
            assert steps == (0 if job.rate is None else 12), job.name
            assert given["trainer.accumulate_grad_batches"] == "1"
    lpaf = options(found[0].jobs[0])
    assert lpaf["model.retrain.epochs"] == "2" and lpaf["model.prune.learning_rate"] == "0.0001"


def test_options_of_a_method_replace_those_of_all():
    found = plan().cells
    by_label = {cell.label: options(cell.jobs[0]) for cell in found}
    assert by_label["SP3"]["trainer.precision"] == "32-true" and "model.distillation.alpha" not in by_label["SP3"]
    assert (
        by_label["LPAF"]["trainer.precision"] == "bf16-mixed" and by_label["LPAF"]["model.distillation.alpha"] == "0.5"
    )


def test_a_method_may_have_budgets_of_its_own():
    found = plan(methods={"SVD": {}, "LPAF": {"budgets": [0.33, 0.25]}}, budgets=[0.5, 0.25], seeds=[1]).cells
    assert [(cell.label, cell.budget) for cell in found] == [
        ("SVD", "density=0.5"), ("SVD", "density=0.25"), ("LPAF", "density=0.25"), ("LPAF", "density=0.33"),
    ]  # fmt: skip
    assert options(found[-1].jobs[0])["model.density"] == "0.33"


def test_a_given_teacher_is_that_of_all_seeds():
    made = plan(teacher="my_model")
    assert made.teachers == {} and {options(c.jobs[0])["model.teacher"] for c in made.cells} == {"my_model"}


def test_an_epoch_is_limited_to_its_steps():
    found = plan(options={"trainer.accumulate_grad_batches": 3}).cells
    assert options(found[0].jobs[0])["trainer.limit_train_batches"] == "4"


def test_updates_are_divided_into_whole_epochs_that_the_data_has():
    halves, thirds, none = {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 0}
    assert divide(1000, None, [halves, none], 250) == (4, 250)
    assert divide(1000, None, [{"a": 1}], 2000) == (1, 1000)
    assert divide(12, None, [halves, thirds], 5) == (6, 2)
    assert divide(1000, 8, [halves], 250) == (8, 125)
    with pytest.raises(UserError, match="nearest: epochs 4"):
        divide(1000, 3, [halves], 250)
    with pytest.raises(UserError, match=r"updates: 1009 cannot be divided .* nearest: updates 1010"):
        divide(1009, None, [{"a": 1}], 250)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": [1]}, "unknown key 'budget' in 'c.yaml'; did you mean 'budgets'?"),
        ({"methods": None}, "'c.yaml' names no methods"),
        ({"methods": {"A": {"optoins": {}}}}, "unknown key 'optoins' in methods.A; did you mean 'options'?"),
        (
            {"methods": {"SVD": {"each": {"a": [1]}}}},
            "each in methods.SVD: this key was removed in version 0.3; give",
        ),
        ({"methods": {"A b": {}, "A-B": {}}}, "two would have the same folder"),
        ({"learning_rates": ["1e-4"]}, "learning_rates: ['1e-4']; give numbers above 0, with a point: 1.0e-4"),
        ({"methods": {"SVD": {"budgets": 0.5}}}, "methods.SVD.budgets: '0.5'; give a list, e.g. [0.25]"),
        ({"seeds": [1, 1]}, "seeds: [1, 1]; give a list of one or more, each once"),
        ({"updates": 0}, "updates: 0; give a whole number from 1 on"),
        ({"epochs": 0}, "epochs: 0; give a whole number from 1 on"),
        ({"methods": {"SVD": {"options": {"data.batch_size": 8}}}}, "data.batch_size is the same for all methods"),
        ({"methods": {"SVD": {"options": {"model.retrain.epochs": 8}}}}, "is the same for all methods"),
        ({"budgets": ["much"]}, "'much' is no density"),
        ({"methods": {"LPAF": {"split": {"retain": 1}}}}, "no stage 'retain'; did you mean 'retrain'?"),
        ({"methods": {"LPAF": {"split": {"prune": 0}}}}, "all shares are 0; give train: false"),
    ],
)
def test_mistakes_are_one_line(changes, said):
    with pytest.raises(UserError) as error:
        plan(**changes).cells  # noqa: B018
    assert said in str(error.value) and "\n" not in str(error.value)
