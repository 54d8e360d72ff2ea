"""factorize --refine and --distil: the better model is kept; work that was stopped continues; mistakes in one line."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from mistakes import fails
from tiny import write_backbone, write_texts

from lit_compress.__main__ import main
from lit_compress.cli import factorizing, fitting
from lit_compress.cli.factorizing import run_factorize
from lit_compress.cli.lines import read_line
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.models.files import stamps
from lit_compress.run import distilling
from lit_compress.run.distilling import Distilling, Recovery
from lit_compress.run.folder import Run
from lit_compress.stages import rounded
from lit_compress.stages.rounded import RoundedStage
from lit_compress.utils import progress
from lit_compress.utils.errors import UserError
from lit_compress.utils.fields import check_effects


def test_factorize_refines_and_distils_without_labels(words, tmp_path):
    """Texts without labels: of a file, and of a training split that has none; both end in the report."""
    model, data = words
    texts = tmp_path / "texts.txt"
    texts.write_text("a great film\nthe plot is dull and the cast is poor\n" * 20)
    line = [*data, "--density", "0.5", "--calibration_examples", "30"]
    main(["factorize", *model, str(tmp_path / "plain"), *line])
    main(["factorize", *model, str(tmp_path / "out"), *line, "--refine", "10", "--distil", "8",
          "--distil_texts", str(texts), "--data.batch_size", "16", "--trainer.precision", "bf16-mixed",
          "--distil_rate", "1e-4"])  # fmt: skip
    plain, report = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("plain", "out"))
    assert plain["refined"] is None and plain["distilled"] is None
    refined, distilled = report["refined"], report["distilled"]
    assert (refined["steps"], refined["texts"], len(refined["after"])) == (10, 30, 2)
    assert (distilled["steps"], distilled["batch"], distilled["file"]) == (8, 16, "texts.txt")
    assert (distilled["precision"], distilled["learning_rate"]) == ("bf16-mixed", 1e-4)
    assert all(after <= before for before, after in zip(refined["before"], refined["after"], strict=True))
    assert "10 steps of every block" in (tmp_path / "out" / "README.md").read_text()
    assert [path.name for path in (tmp_path / "out.distil").iterdir()] == ["tensorboard"]  # checkpoints are gone


def test_kept_blocks_are_refined(words, tmp_path):
    """The one block that is left learns what both gave."""
    model, data = words
    more = ["--model.prune.choice", "measured", "--model.prune.examples", "20", "--refine", "20"]
    main(["factorize", *model, str(tmp_path / "out"), *data, "--method", "Layers", "--density", "0.5", *more])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    refined = report["refined"]
    assert len(refined["before"]) == 1 and refined["after"][-1] < refined["before"][-1] and refined["texts"] == 100
    assert report["compressed"]["density"] == 0.5 and report["calibration"]["measured_loss"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--refine", "5", "--method", "Magnitude"], "Magnitude has to train"),
        (["--refine", "few"], "refine: 'few' is not a valid int"),
        (["--distil", "5", "--method", "SliceGPT", "--refine", "5"], "--refine: SliceGPT leaves no dense hidden"),
        (["--distil", "5", "--distil_texts", "nowhere.txt"], "--distil_texts: 'nowhere.txt' is no file"),
        (["--distil", "5", "--trainer.precision", "16-true"], "trainer.precision: '16-true' keeps the weights"),
        (["--distil", "5", "--by_block", "float32"], "--by_block: --distil 5 needs the whole model; nearest: --refine"),
    ],
)
def test_what_cannot_be_trained_afterwards_is_one_line(options, message, words, tmp_path, capsys):
    model, data = words
    line = fails(capsys, "factorize", *model, tmp_path / "out", *data, "--density", "0.5", *options)
    assert message in line and not (tmp_path / "out").exists()


@pytest.fixture
def made(words, tmp_path, monkeypatch):
    """A function of options that returns what would be exported."""
    monkeypatch.setattr(factorizing, "write_export", lambda out, source, choices: source)
    (model,), data = words

    def make(recovery=Recovery(), *options, name="out"):
        size = () if "--budget" in options else ("--density", "0.5")
        line = read_line("factorize", [model, str(tmp_path / name), *data, *size, *options])
        return run_factorize(line.own["model"], line.own["out"], line, recovery)

    return make


def equal(one, other):
    return all(torch.equal(value, other.net.state_dict()[name]) for name, value in one.net.state_dict().items())


def worse(dense, net, kind, parts, steps, *_):
    """Refine in the wrong direction."""
    with torch.no_grad():
        net.classifier.weight.neg_(), net.classifier.bias.neg_()
    return {"steps": steps, "texts": 8}


@pytest.mark.parametrize(
    ("recovery", "rounds"),
    [(Recovery(refine=4), False), (Recovery(distil=4, rate=0.9), False), (Recovery(distil=4, rate=0.9), True)],
    ids=["refine", "distil", "rounded"],
)
def test_the_model_before_is_kept_if_it_is_better(recovery, rounds, made, monkeypatch, capsys):
    """Also in its own weights, if only training would have rounded them."""
    if rounds:
        monkeypatch.setattr(distilling, "CompressedStage", RoundedStage)
        monkeypatch.setattr(rounded, "GROUP", 8)
    monkeypatch.setattr(progress, "_noted", set())
    monkeypatch.setattr(factorizing, "refine_net", worse)
    plain, kept = made(), made(recovery)
    assert equal(plain, kept)
    said, (before, after) = capsys.readouterr().err, (kept.more["refined"] or kept.more["distilled"])["metric"]
    if recovery.refine:
        assert before > after and not kept.more["refined"]["kept"]
        assert f"--refine: dev accuracy went from {before:.4f} to {after:.4f}: the model before it is kept" in said
    else:
        assert after == (evaluate(kept.net, kept.data) if rounds else before)
        assert kept.more["distilled"]["best_step"] == 0
        score = f"dev accuracy {before['val/accuracy']:.4f}"
        assert f"distil: the model before training, {score}, is better than every epoch" in said


def test_distillation_that_was_stopped_continues(made, tmp_path, monkeypatch, capsys):
    """The compressed model is read, not made again; work of other settings is refused."""
    monkeypatch.setattr(progress, "_noted", set())
    recovery, fit, few = Recovery(distil=4), Distilling.fit, ("--calibration_examples", "24")
    whole = made(recovery, *few, name="whole")
    monkeypatch.setattr(Distilling, "fit", lambda *_: sys.exit(1))
    with pytest.raises(SystemExit):
        made(recovery, *few)
    monkeypatch.setattr(Distilling, "fit", fit)
    said = "/out.distil' is not finished; repeat its command, fit with --ckpt_path last"
    assert fails(capsys, "export", str(tmp_path / "out.distil"), str(tmp_path / "shipped")).endswith(said)
    with pytest.raises(UserError, match=r"out.distil' holds unfinished work of other settings or data; give the same"):
        made(Recovery(distil=5), *few)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="holds unfinished work of other settings"):
        patch.setattr(factorizing, "stamps", lambda folder: [*map(str, stamps(folder)), "later"])
        made(recovery, *few)  # the model was written again
    monkeypatch.setattr(factorizing, "compress_and_refine", lambda *_: pytest.fail("compressed again"))
    again = made(recovery, *few)
    assert equal(whole, again)
    told = [one.more | {"distilled": one.more["distilled"] | {"seconds": 0}} for one in (whole, again)]
    assert told[0] == told[1] and whole.before["dense"].metric == again.before["dense"].metric
    (tmp_path / "out.distil" / "mine.txt").write_text("x")
    with pytest.raises(UserError, match=r"out.distil' holds something else; give another OUT"):
        made(recovery, *few)


def test_a_distilled_model_whose_export_was_stopped_is_not_trained_again(made, monkeypatch):
    recovery, write = Recovery(distil=4), factorizing.write_export
    whole = made(recovery, name="whole")
    monkeypatch.setattr(factorizing, "write_export", lambda *_: sys.exit(1))
    with pytest.raises(SystemExit):
        made(recovery)
    monkeypatch.setattr(factorizing, "write_export", write)
    monkeypatch.setattr(distilling, "run_stage", lambda *_: pytest.fail("trained again"))
    again = made(recovery)
    assert equal(whole, again) and again.more["distilled"]["steps"] == 4


def test_other_processes_compress_and_export_nothing(made, monkeypatch):
    """They take what the first one decided, and train."""
    fitted = []
    config = {"model": {"init_args": {}}}
    monkeypatch.setattr(fitting, "of_first", lambda *_: {"config": config, "density": 0.5})
    monkeypatch.setattr(factorizing, "of_first", lambda *_: None)
    monkeypatch.setattr(factorizing, "is_first", lambda: False)
    monkeypatch.setattr(Distilling, "fit", lambda *args: fitted.append(args))
    for name in ("compress_and_refine", "write_export"):
        monkeypatch.setattr(factorizing, name, lambda *_: pytest.fail("work of the first process"))
    assert made(Recovery(distil=2)) is None and len(fitted) == 1
    monkeypatch.setattr(fitting, "solve", lambda *_: pytest.fail("times programs"))
    assert made(Recovery(distil=2), "--budget", "speedup=1.1x@eager,1x8") is None and len(fitted) == 2


def test_a_sliced_model_learns_the_logits_alone(made):
    """Its hidden states are narrower."""
    own = ("--model.prune.optimizer", "torch.optim.SGD", "--model.prune.optimizer.lr", "0.01")
    source = made(Recovery(distil=6), "--method", "SliceGPT", "--model.prune.examples", "20", *own)
    assert source.config["model"]["init_args"]["distillation"]["alpha_layers"] == 0
    assert (source.more["distilled"]["steps"], source.more["distilled"]["learning_rate"]) == (6, 0.01)
    with pytest.raises(UserError, match="--distil_rate: the optimizer has its own"):
        made(Recovery(distil=6, rate=0.1), "--method", "SliceGPT", *own)
    source = made(Recovery(distil=2), "--model.distillation.alpha_layers", "0", name="logits")
    assert source.config["model"]["init_args"]["distillation"]["alpha"] == 1


@pytest.mark.parametrize(
    ("own", "temperature", "states"),
    [("", 1, 0), ("--data.task plain_text", 1, 0), ("--model.distillation.temperature 2", 2, 0),
     ("--config CONFIG", 3, 0), ("--model.distillation.alpha 0", 2, 10), ("--method Layers", 1, 0),
     ("--method Layers --model.distillation.alpha_layers 5", 1, 5),
     ("--format openvino --dtype int4 --model.distillation.alpha_layers 5", 1, 5)],
)  # fmt: skip
def test_the_usual_losses_of_a_language_model(own, temperature, states, tmp_path, monkeypatch):
    """Outputs alone, also of fewer blocks, and of texts of the user's own, which have no name of a task."""
    made = {}
    monkeypatch.setattr(factorizing, "_factorized", lambda out, job, *_: made.update(job=job))
    model, texts = write_backbone(tmp_path / "net", "llama", "plain_text"), write_texts(tmp_path)
    (tmp_path / "own.yaml").write_text("model: {init_args: {distillation: {temperature: 3}}}")
    words = f"{model} {tmp_path}/out --data.path {texts}/train.txt --density 0.5 {own}"
    line = read_line("factorize", words.replace("CONFIG", f"{tmp_path}/own.yaml").split())
    run_factorize(line.own["model"], line.own["out"], line, Recovery(distil=2))
    losses = made["job"].method.distillation
    assert (losses.temperature, losses.alpha_layers) == (temperature, states)
    check_effects(made["job"].method)
    stage = Distilling(made["job"], Recovery(distil=2), Run(tmp_path / "run")).made()
    assert isinstance(stage, RoundedStage) == ("int4" in own)
