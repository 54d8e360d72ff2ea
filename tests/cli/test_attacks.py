"""Folders of somebody else: whatever their files name, no command runs it.

Every payload writes the file ``ran``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from mistakes import fit

import lit_compress as lc
from lit_compress.__main__ import main
from lit_compress.cli.targets import find_target, open_target, parse_stored
from lit_compress.cli.words import Line
from lit_compress.export.check import check_export
from lit_compress.run.folder import Run
from lit_compress.utils import progress

CODE = "modeling_compressed.py"
OLD = Path(__file__).resolve().parents[1] / "old_runs"


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The file that a payload writes, next to the working folder, from which modules can be imported."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(str(tmp_path / "work"))
    monkeypatch.setattr(progress, "_noted", set())
    return tmp_path / "ran"


@pytest.fixture
def stolen(run, ran, tmp_path):
    """A copy of a run, for an attack."""
    left = shutil.ignore_patterns("*.ckpt", "events*", "manifest.json")  # who changes files can change their sums
    return shutil.copytree(run, tmp_path / "work" / "runs" / "stolen", ignore=left)


def code(ran, base, name=None):
    """A file with a class that writes ``ran`` when it is imported."""
    module, _, kind = base.rpartition(".")
    return f"import pathlib, {module}\npathlib.Path({str(ran)!r}).touch()\nclass {name or kind}({base}): pass\n"


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_config(run, edit):
    """Let ``edit`` change all copies of the config of a run."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    edit(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for path in (run / "report.json", run / "export" / "report.json"):
        change(path, config=config)


def attempt(words):
    """Return the exit code of a command, or of a function as a command would have it."""
    try:
        words() if callable(words) else main([str(word) for word in words])
    except lc.UserError:
        return 2
    except SystemExit as stop:
        return stop.code
    return 0


# ------------------------------------------------------------------------------------------------- stored configs


def stored(folder):
    """What ``export`` makes of a run."""
    run = Run(folder)
    return parse_stored(run.config(), Line("export"), run.net("dense")).build()


def calls(function, **given):
    return {"class_path": function, "init_args": given}


def strategy(name, **given):
    return {"strategy": calls(f"lightning.pytorch.strategies.{name}", **given)}


TRAINER = {
    "os.system": lambda touch: strategy("DDPStrategy", ddp_comm_hook=calls("os.system", command=touch)),
    "getoutput": lambda touch: strategy("FSDPStrategy", auto_wrap_policy=calls("subprocess.getoutput", cmd=touch)),
    "hub": lambda touch: strategy(
        "DDPStrategy", ddp_comm_hook=calls("torch.hub.load", repo_or_dir="runs/stolen", model="SVD", source="local")
    ),
    "accelerator": lambda touch: {"accelerator": calls("os.system", command=touch)},
    "precision": lambda touch: {"precision": calls("os.system", command=touch)},
    "words": lambda touch: {"strategy": "runs.stolen.payload.SVD", "plugins": "runs.stolen.payload.SVD"},
}
OPTIMIZER = {"retrain": {"optimizer": calls("torch.optim.SGD", lr=1e-3), "lr_scheduler": "runs.stolen.payload.SVD"}}
REST = {
    "method": {"class_path": "runs.stolen.payload.SVD"},
    "settings": {"dense": calls("runs.stolen.payload.SVD")},
    "settings in settings": {"retrain": {"epochs": calls("runs.stolen.payload.SVD")}},
    "file": {"dense": "runs/stolen/payload.yaml"},
    "dots": {"dense.class_path": "runs.stolen.payload.SVD"},
}


@pytest.mark.parametrize("attack", [*TRAINER, *REST, "optimizer"])
def test_a_stored_config_gives_plain_values(attack, stolen, ran):
    for name in ("payload.py", "hubconf.py"):
        (stolen / name).write_text(code(ran, "lit_compress.methods.SVD"))
    (stolen / "payload.yaml").write_text("class_path: runs.stolen.payload.SVD\n")

    def edit(config):
        if attack in TRAINER:
            config["trainer"] |= TRAINER[attack](f"touch {ran}")
        elif attack == "optimizer":  # nothing is trained: it is left out
            config["model"]["init_args"] |= OPTIMIZER
        elif attack == "method":
            config["model"] |= REST[attack]
        else:
            config["model"]["init_args"] |= REST[attack]

    change_config(stolen, edit)
    for place in (".", "export", "dense/net"):
        found = attempt(lambda: open_target(find_target(str(stolen / place), "test"), Line("evaluate")))  # noqa: B023
        assert found == 0
    assert attempt(lambda: stored(stolen)) == 0
    assert not ran.exists()


COMMANDS = {
    "validate": lambda run, out, _: ["validate", run],
    "validate dense": lambda run, out, _: ["validate", run / "dense" / "net"],
    "test": lambda run, out, _: ["test", run / "export", "--data.path", out / "test.jsonl"],
    "predict": lambda run, out, _: ["predict", run, "--output", out / "p.jsonl"],
    "export": lambda run, out, _: ["export", run, out / "again"],
    "export again": lambda run, out, _: ["export", run / "export", out / "copy"],
    "bench": lambda run, out, _: [
        "bench", run / "export", "--runtimes", "eager", "--batch", "1", "--length", "8", "--rounds", "1",
        "--output", out,
    ],
    "report": lambda run, out, _: ["report", run, "--out", out / "page"],
    "list": lambda run, out, _: ["list", run.parent],
    "plan": lambda run, out, short: ["plan", *fit(short, run)[1:]],
    "fit": lambda run, out, short: fit(short, run, "--ckpt_path", "last"),
    "lc.load": lambda run, out, _: lambda: lc.load(run).save_pretrained(out / "saved"),
    "lc.evaluate": lambda run, out, _: lambda: lc.evaluate(str(run)),
    "lc.evaluate loaded": lambda run, out, _: lambda: lc.evaluate(lc.load(run / "export")),
}  # fmt: skip
READ_NO_MODEL = {"list", "report"}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_the_code_of_a_model(command, stolen, ran, tmp_path, short_run):
    """A file says trust_remote_code; the models of the run bring code."""
    change_config(stolen, lambda config: config.update(trust_remote_code=True))
    for net in (stolen / "export", stolen / "dense" / "net"):
        (net / "evil.py").write_text(code(ran, "transformers.BertConfig", "EvilConfig"))
        named = json.loads((net / "config.json").read_text()).get("auto_map", {})
        change(net / "config.json", auto_map=named | {"AutoConfig": "evil.EvilConfig"})
        if net.name == "export":
            change(net / "config.json", dense_auto_map={"AutoConfig": "evil.EvilConfig"})
    expected = 0 if command in (*READ_NO_MODEL, "plan") else 2
    assert (attempt(COMMANDS[command](stolen, tmp_path / "out", short_run)), ran.exists()) == (expected, False)


# --------------------------------------------------------------------------------------------------------- models


def elsewhere(tmp_path, ran, kind="BertConfig"):
    """A reference to code in another folder, whose class transformers has by the same name, or has not."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "evil.py").write_text(code(ran, "transformers.BertConfig", kind))
    return {"AutoConfig": f"{tmp_path / 'other'}--evil.{kind}"}


NAMED = {  # what config.json says -> exit code
    "dense_auto_map": (lambda ref: {"dense_auto_map": ref}, 0),
    "below": (lambda ref: {"text_config": {"auto_map": ref, "dense_auto_map": ref}}, 0),
    "auto_map": (lambda ref: {"auto_map": ref}, 0),
    "auto_map below": (lambda ref: {"text_config": {"auto_map": ref}}, 0),
    "activations": (lambda ref: {"activations": {"auto_map": ref}}, 0),
    "kernel": (lambda ref: {"attn_implementation": "evil/kernel"}, 2),
}


@pytest.mark.parametrize("attack", NAMED)
def test_code_elsewhere_is_neither_run_nor_kept(attack, model, ran, tiny_data, tmp_path):
    named, expected = NAMED[attack]
    change(model / "config.json", **named(elsewhere(tmp_path, ran)))
    data = ["--data.task", "sst2", "--data.path", tiny_data]
    out = tmp_path / "out"
    found = attempt(["factorize", model, out, "--rank_ratio", "0.5", "--weighting", "none", *data])
    assert (found, ran.exists()) == (expected, False)
    assert not any("--evil" in path.read_text() for path in out.glob("*.json") if path.name != "report.json")


@pytest.mark.parametrize("command", ["fit", "validate", "lc.factorize"])
def test_other_commands_refuse_code_elsewhere(command, model, ran, short_run, tiny_data, tmp_path):
    change(model / "config.json", dense_auto_map=elsewhere(tmp_path, ran, "EvilConfig"))
    words = {
        "fit": [*fit(short_run, tmp_path / "run"), "--model.backbone", model],
        "validate": ["validate", model, "--data.task", "sst2", "--data.path", tiny_data],
        "lc.factorize": lambda: lc.factorize(str(model), data=str(tiny_data), task="sst2", density=0.5),
    }
    assert (attempt(words[command]), ran.exists()) == (2, False)


@pytest.mark.parametrize("place", ["dense/net", "retrain/net"])
def test_the_activations_of_a_run_name_no_code(place, stolen, ran, tmp_path):
    change(stolen / place / "config.json", activations={"auto_map": elsewhere(tmp_path, ran)}, structure={})
    assert (attempt(["export", stolen, tmp_path / "out"]), ran.exists()) == (0, False)
    assert "--evil" not in (tmp_path / "out" / "config.json").read_text()


# ----------------------------------------------------------------------------------------------- code of an export


def append(export, ran):
    (export / CODE).write_text((export / CODE).read_text() + f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")


def name_more(export, ran):
    (export / "evil.py").write_text(code(ran, "transformers.BertConfig"))
    named = json.loads((export / "config.json").read_text())["auto_map"]
    change(export / "config.json", auto_map=named | {"AutoConfig": "evil.BertConfig"})


def name_a_tokenizer(export, ran):
    (export / "evil.py").write_text(code(ran, "transformers.BertTokenizerFast"))
    change(export / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.BertTokenizerFast"]})


def name_a_module(export, ran):
    (export / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "evil.Transformer"}]))


@pytest.mark.parametrize(
    ("attack", "copies", "benches"),
    [(append, 0, 0), (name_more, 0, 0), (name_a_tokenizer, 0, None), (name_a_module, 2, None)],
)
def test_the_code_of_an_export_is_the_packages(attack, copies, benches, stolen, ran, tmp_path):
    """Nothing runs it; copies that would hand it on end with an error."""
    export, out = stolen / "export", tmp_path / "out"
    attack(export, ran)
    words = [
        (["validate", stolen], 0), (["predict", export, "--output", tmp_path / "p.jsonl"], 0),
        (["export", export, out], copies), (lambda: lc.load(export).save_pretrained(out), copies),
        (COMMANDS["bench"](stolen, tmp_path / "benched", None), benches),
    ]  # fmt: skip
    for command, expected in words:
        if expected is not None:
            assert (attempt(command), ran.exists()) == (expected, False)
        assert not any("evil" in p.read_text() for p in (*out.glob("*.py"), *out.glob("*config.json")))
        assert not any(str(ran) in p.read_text() for p in out.glob("*.py"))
        shutil.rmtree(out, ignore_errors=True)
    assert (attempt(["export", stolen, out]), ran.exists()) == (0, False)


def test_the_code_of_another_version_is_written_anew(ran, tmp_path):
    """The copy loads with this version's code, and everything else is as it was."""
    old, out = shutil.copytree(OLD / "lpaf" / "export", tmp_path / "old"), tmp_path / "out"
    append(old, ran)
    net = lc.load(old)
    net.save_pretrained(out)
    assert check_export(net, out) <= 1e-5 and not ran.exists()
    assert str(ran) not in (out / CODE).read_text()
    for name in ("model.safetensors", "tokenizer.json", "report.json"):
        assert (out / name).read_bytes() == (old / name).read_bytes()
