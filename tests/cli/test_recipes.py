"""Recipes (tests/test_options.py has the values of all): rows are merged over the head, every mistake is one line."""

from __future__ import annotations

import pytest
import yaml
from mistakes import fails

from lit_compress.__main__ import main
from lit_compress.cli.recipes import merge_row, recipes, resolve_config
from lit_compress.tasks.records import TASKS

MINE = """
model: {class_path: lit_compress.methods.LPAF, init_args: {density: 0.4, prune: {epochs: 9, learning_rate: 1e-4}}}
data: {batch_size: 4}
tasks:
  sst2: {model.init_args.prune.epochs: 3, trainer.accumulate_grad_batches: 8}
  rte:
"""


def printed(capsys, *args) -> dict:
    """Return what ``fit ... --print_config`` prints."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *args, "--print_config"])
    assert not stop.value.code
    return yaml.safe_load(capsys.readouterr().out)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a recipe of the user's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path


def test_every_row_is_of_a_task_and_found_by_its_name_or_by_the_task():
    for recipe, tasks in recipes().items():
        for task in tasks:
            content = resolve_config(f"{recipe}_{task}.yaml", "wnli")  # the name comes first
            assert task in TASKS and content["data"]["task"] == task
            assert resolve_config(recipe, task) == content


@pytest.mark.parametrize(
    ("row", "merged"),
    [
        ({}, {"a": {"b": 1, "c": {"d": 2}}}),
        ({"a.b": 3}, {"a": {"b": 3, "c": {"d": 2}}}),
        ({"a.c": {"e": 4}}, {"a": {"b": 1, "c": {"d": 2, "e": 4}}}),
        ({"a": {"c": {"d": None}}}, {"a": {"b": 1, "c": {"d": None}}}),
        ({"a.b.x": 5}, {"a": {"b": {"x": 5}, "c": {"d": 2}}}),
        ({"a.c": [6]}, {"a": {"b": 1, "c": [6]}}),
        ({"a.c.e": {"f.g": 7}, "h.i": 8}, {"a": {"b": 1, "c": {"d": 2, "e": {"f.g": 7}}}, "h": {"i": 8}}),
    ],
)
def test_a_row_is_merged_over_the_head(row, merged):
    head = {"a": {"b": 1, "c": {"d": 2}}}
    assert merge_row(head, row) == merged
    assert head == {"a": {"b": 1, "c": {"d": 2}}}


def test_the_row_is_that_of_the_name_or_of_the_task(capsys):
    """Wherever the task is given; options override a config, wherever they stand."""
    row = printed(capsys, "--config", "lpaf_rte.yaml")
    for args in (
        ["--config", "lpaf.yaml", "--data.task", "rte"],
        ["--data.task=rte", "-c", "lpaf"],
        ["--data.task", "sst2", "--config=lpaf.yaml", "--data.task=rte"],
        ["--data.task", "rte", "--config=lpaf_rte"],
        ["--model", "LPAF", "--config", "lpaf_rte.yaml"],
    ):
        assert printed(capsys, *args) == row
    shorter = printed(capsys, "--model.prune.epochs", "2", "--config", "lpaf_rte.yaml")
    assert shorter["model"]["init_args"]["prune"]["epochs"] == 2 != row["model"]["init_args"]["prune"]["epochs"]
    other = printed(capsys, "--config", "lpaf_rte.yaml", "--data.task", "wnli")
    assert other["data"]["task"] == "wnli" and other["model"] == row["model"]


def test_a_task_without_a_row_gets_the_head(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "platon.yaml", "--data.task", "wnli", "--print_config"])
    out, err = capsys.readouterr()
    rows = "cola, mnli, mrpc, qnli, qqp, rte, squad, sst2, stsb"
    assert err == f"note: platon.yaml has no row for task 'wnli'; its head is used; rows: {rows}\n"
    config = yaml.safe_load(out)
    assert config["data"]["task"] == "wnli" and config["model"]["init_args"]["prune"]["init"] == "pretrained"


def test_a_recipe_says_which_tasks_it_has(capsys):
    line = fails(capsys, "fit", "--config", "low_rank_1.yaml")
    rows = "mnli, mrpc, rte, sst2"
    assert line == f"error: config: 'low_rank_1.yaml' has a row per task; choose one with --data.task: {rows}"


def test_an_only_row_or_a_task_in_the_head_needs_no_choice(mine):
    assert resolve_config("sp3_llama") == resolve_config("sp3_llama_wikitext2")
    (mine / "mine.yaml").write_text(MINE.replace("batch_size: 4", "task: rte"))
    assert resolve_config("mine.yaml") == resolve_config("mine.yaml", "rte")
    assert resolve_config("quickstart")["model"]["class_path"].endswith(".LPAF")


def test_a_recipe_of_ones_own(mine, capsys):
    config = printed(capsys, "--config", "mine.yaml", "--data.task", "sst2")
    init = config["model"]["init_args"]
    assert init["prune"]["epochs"] == 3 and init["prune"]["learning_rate"] == 1e-4 and init["density"] == 0.4
    assert config["data"]["batch_size"] == 4 and config["trainer"]["accumulate_grad_batches"] == 8
    config = printed(capsys, "--config", str(mine / "mine.yaml"), "--data.task", "rte")
    assert config["model"]["init_args"]["prune"]["epochs"] == 9 and config["data"]["task"] == "rte"
    assert "'mine.yaml' has a row per task; choose one with --data.task: sst2, rte" in fails(
        capsys, "fit", "--config", "mine.yaml"
    )
    assert [path.name for path in mine.iterdir()] == ["mine.yaml"]


def test_a_config_of_ones_own(mine, capsys):
    """What --print_config prints is a config as well: the same comes out again."""
    config = printed(capsys, "--config", "lpaf_cola")
    (mine / "lpaf.yaml").write_text(yaml.safe_dump(config))
    assert resolve_config("lpaf.yaml") == yaml.safe_load(
        (mine / "lpaf.yaml").read_text()
    )  # a path comes before the shipped recipe
    assert printed(capsys, "--config", "lpaf.yaml") == config


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nosuch.yaml", "no file or shipped config 'nosuch.yaml'; valid: "),
        ("lpaff.yaml", "no file or shipped config 'lpaff.yaml'; did you mean 'lpaf.yaml'?"),
        ("losparse_bret_rte", "no file or shipped config 'losparse_bret_rte'; did you mean 'losparse_bert_rte.yaml'?"),
        ("lpaf_wnli.yaml", "no file or shipped config 'lpaf_wnli.yaml'; did you mean 'lpaf_"),
        (
            "nowhere/lpaf_sst2.yaml",
            "no file or shipped config 'nowhere/lpaf_sst2.yaml'; did you mean 'lpaf_sst2.yaml'?",
        ),
    ],
)
def test_unknown_names_are_one_line(name, words, capsys):
    assert words in fails(capsys, "fit", "--config", name, "--data.task", "sst2")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"tasks: {sst2: {\n", "mine.yaml' is not readable YAML: while parsing"),
        (b"\xff\xfe\x00", "mine.yaml' is not readable YAML: 'utf-8' codec"),
        (b"tasks: [sst2]\n", "mine.yaml' is no table; write one row per task, 'sst2: {OPTION: VALUE}'"),
        (b"tasks:\n", "mine.yaml' is no table; write one row per task"),
        (b"tasks: {sst2: 3}\n", "mine.yaml' is no table; write one row per task"),
        (b"tasks: {sst2: {modl.density: 3}}\n", "unknown option 'modl"),
        (b"{model: {class_path: SVD, init_arg: {}}}", "unknown key 'model.init_arg'; did you mean 'init_args'?"),
        (b"{model: {class_path: SVD, density: 0.5}}", "unknown key 'model.density'; did you mean 'init_args.density'?"),
        (b"{model: {class_path: SVD}, data: {custom: {txt: x}}}", "did you mean 'data.custom.text'?"),
        (b"{model: {class_path: SVD}, trainer: {devics: 1}}", "did you mean 'trainer.devices'?"),
        (b"{model: {class_path: SVD}, sed_everything: 1}", "did you mean 'seed_everything'?"),
        (b"tasks: {sst2: {model.class_path: lit_compress.methods.LPAFF}}\n", "did you mean 'LPAF'?"),
        (MINE.replace("prune.epochs", "prune.epoch").encode(), "did you mean 'model.prune.epochs'"),
        (MINE.replace("prune.epochs: 3", "densty: 3").encode(), "did you mean 'model.density'"),
        (MINE.replace("prune.epochs: 3", "density: abc").encode(), "model.density: 'abc' is not a valid float"),
    ],
)
def test_mistakes_in_a_recipe_are_one_line(content, words, mine, capsys):
    (mine / "mine.yaml").write_bytes(content)
    assert words in fails(capsys, "fit", "--config", "mine.yaml", "--data.task", "sst2")
