"""The plan of a comparison: its cells and commands; equal updates; mistakes in its config."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

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


def test_options_of_the_teacher_may_limit_its_training():
    made = read_comparison(BASE | {"teacher": {"model.dense.epochs": 1, "trainer.max_steps": 5}}, "c.yaml")
    assert "--trainer.max_steps=5" in jobs_of(made, [], OUT, 1, 1)[0].words


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


OWN: list[tuple[dict[str, Any], str]] = [  # options that a comparison gives its runs, and what the error says
    ({"model": "FWSVD"}, "model: compare does not take it; give methods"),
    ({"model.class_path": "FWSVD"}, "model.class_path: compare does not take it; give methods"),
    *(({f"model.{name}": 1}, f"model.{name}: compare does not take it; give budgets")
      for name in ("density", "rank", "rank_ratio", "budget")),
    ({"model.teacher": "net"}, "model.teacher: compare does not take it; give its folder as teacher"),
    ({"model.dense.epochs": 1}, "model.dense.epochs: compare does not take it; give it in teacher"),
    ({"model.init_args.retrain.epochs": 8}, "model.retrain.epochs: compare does not take it; give updates or split"),
    ({"model.retrain": {"learning_rate": 1}}, "model.retrain.learning_rate: compare does not take it; give learn"),
    ({"model.retrain": '{"epochs": 8}'}, "model.retrain.epochs: compare does not take it; give updates or split"),
    *(({f"trainer.{name}": 2}, f"trainer.{name}: compare does not take it; give updates") for name in (
        "max_steps", "min_steps", "max_epochs", "min_epochs", "max_time", "limit_train_batches", "fast_dev_run",
        "callbacks.duration",
    )),
    ({"trainer.callbacks+": "EarlyStopping"}, "trainer.callbacks: EarlyStopping ends some runs before others"),
    ({"trainer.callbacks": [{"class_path": "pl.EarlyStopping"}]}, "trainer.callbacks: EarlyStopping ends"),
    ({"run_dir": "x"}, "run_dir: compare does not take it; give --out"),
    ({"ckpt_path": "last"}, "ckpt_path: compare does not take it; leave it out"),
    ({"seed_everything": 3}, "seed_everything: compare does not take it; give seeds"),
    ({"data.hold_out": 3}, "data.hold_out: compare does not take it; give hold_out"),
    ({"config": "extra.yaml"}, "config: compare does not take it; give the options in it one by one"),
]  # fmt: skip
NOT_OF_A_TEACHER = [each for each in OWN if not next(iter(each[0])).startswith(("trainer.", "model.dense."))]


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
        *(
            (part, said)
            for values, said in OWN
            for part in ({"options": values}, {"taught": values}, {"methods": {"SVD": {"options": values}}})
        ),
        *(({"teacher": values}, f"config: teacher: {said}") for values, said in NOT_OF_A_TEACHER),
        ({"taught": {"data.train_examples": 10}}, "config: taught: data.train_examples is the same for all methods; "),
        *(
            ({"methods": {"SVD": {"options": {name: 2}}}}, f"SVD.options: {name} is the same for all methods; give it")
            for name in ("trainer.devices", "device", "trainer.val_check_interval", "trainer.limit_val_batches")
        ),
        *(
            ({"methods": {"SVD": {"without": bad}}}, f"methods.SVD.without: {bad}; give beginnings of options")
            for bad in (3, [1])
        ),
        *(({"teacher": bad}, f"teacher: {bad!r}; give OPTION: VALUE, or a folder") for bad in (3, ["a"], {1: 2})),
        *(({key: {1: 2}}, f"config: {key}: {{1: 2}}; give OPTION: VALUE") for key in ("options", "taught")),
        ({"methods": {"SVD": {"options": {1: 2}}}}, "methods.SVD.options: {1: 2}; give OPTION: VALUE"),
        ({"taught": {"data.revision": date(2026, 1, 31)}}, "give OPTION: VALUE, with a date in quotes"),
        ({"learning_rates": [1e-4, 1.0000001e-4]}, "learning_rates: 0.0001, 0.00010000001: two would have the same"),
        ({"budgets": ["params=5M", "params=.5M"]}, "budgets: params=5M, params=.5M: two would have the same folder"),
        (
            {"updates": 10**7},
            "at most 5 steps each, a multiple of 3 in number and at most 3000; nearest: updates 15000",
        ),
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
