"""What earlier versions had: options, values, commands. Each is refused in one line that says what to do."""

from __future__ import annotations

from typing import Any

from lit_compress.utils.errors import UserError

# option, or its last one or two parts -> the value that is always used now
_CONSTANTS: dict[str, Any] = {
    "centred": True, "gradient_damping": 0.01, "input_damping": 0.001, "estimator": "per_example", "stacked": True,
    "max_skipped": 20, "fidelity": "paper", "prune.norm": "rms", "head_projections": "dense", "skip_sites": 0,
    "match_last": True, "exact_target": True, "ridge": 1e-6, "prune.reduction": "sum", "prune.scope": "global",
    "prune.calibration_seed": 42, "prune.group": 1, "prune.projections": "pca", "train_originals": False,
    "score_point": "after", "sigma_side": "out", "prune.importance": "element1", "prune.score": "absolute",
    "power": 0.5, "prune.ratio": "exact",
}  # fmt: skip
_GATES = (  # of SP3, and of CoFiLoSparse
    ["hidden", "qk", "vo", "neurons", "heads", "attention_layer", "ffn_layer"],
    ["attention_layer", "ffn_layer", "heads"],
)
_LESS = "peft trains low-rank updates of an export; with --model.recompute true training takes less memory"
# the same -> this value, or these, and what to do in place of another
REMOVED: dict[str, tuple[Any, str]] = {
    **{name: (value, f"leave it out: it is always {value}") for name, value in _CONSTANTS.items()},
    "refit": (False, "factorize --refine STEPS fits the blocks to the dense model's outputs"),
    "allow_changed": (False, "give the run's own options, data and version, or another --run_dir"),
    "pivot": (False, "factors are stored as they are, which is as fast"),
    "prune.dropout": (True, "the backbone's config.json says how much there is, e.g. hidden_dropout_prob"),
    "prune.weighting": ("none", "the plain SVD gives the factors; --model SecondOrder takes them by K-FAC"),
    "prune.rows": ("sensitivity", "rows are ranked by their sensitivity; --model SecondOrder removes parts by K-FAC"),
    "model.params": (None, "--model.density 0.0589 is 5M of BERT-base's 85M, the number in SP3's tables"),
    "model.sites": (None, "add a record of the architecture, docs/how_to/add_an_architecture.md says how"),
    "prune.tolerance": (0.005, "the density is always met exactly"),
    "squared_temperature": (False, "distillation.alpha is the weight of the logits' term"),
    "retrain.labels": (None, "leave it out: they are exact for two classes, else drawn from the model"),
    "retrain.parameters": ("all", f"all are trained; {_LESS}"),
    "prune.parameters": ("all", f"all are trained; {_LESS}"),
    "lora.rank": (16, f"there are no updates; {_LESS}"),
    "lora.alpha": (32.0, f"there are no updates; {_LESS}"),
    "lora.targets": (None, f"there are no updates; {_LESS}"),
    "consistency_after_decay": (True, "two forwards go on after it; --model.retrain.consistency 0 turns them off"),
    "scope": (
        "blocks",
        "a density counts the blocks' matrices; --export.embeddings int8 makes the table of tokens smaller",
    ),
    "double_forward": (None, "two forwards are one batch of twice the size on an accelerator, and two on a CPU"),
    "through": (None, "one jump to the density is as good"),
    "price": ("parameters", "a density counts parameters; --budget flops=0.3 counts FLOPs"),
    "merge": ("large", "factors and rows are stored as they are; a budget of speedup measures them"),
    "model.revision": (None, "give it with the name: --model.backbone NAME@REVISION"),
    "trust_remote_code": (False, "leave it out: no code in the folder of a model runs, and exports need none here"),
    "push_to_hub": (None, "`hf upload USER/NAME OUT .` uploads the export"),
    "private": (None, "`hf upload USER/NAME OUT . --private` uploads the export"),
    "json": (None, "`report FOLDER` writes report/results.csv, with the same columns"),
    "against": (None, "`evaluate MODEL` has the metric, `bench OUT --baseline OTHER` the times of two"),
    "texts": (None, "`python -m benchmarks.device.gpu` in a clone times texts of mixed lengths, padded and packed"),
    "model.blocks": (None, "--model.density 0.5 keeps half of the blocks"),
    "model.slicing": (None, "--model.density 0.84 keeps as much of a block as a slice of 25 %"),
    "prune.parts": ("blocks", "--model SecondOrder --model.retrain.removes structures removes sub-layers"),
    "prune.gates": (_GATES, "leave it out: a model has all gates that it can have"),
    "export.round_to": (None, "--model.round_to makes widths multiples of a number when the model is compressed"),
}

# last part of the option, one of its values -> what to do in its place
VALUES = {
    ("axis", "element"): "both is as good, and one SVD",
    ("by_block", "bfloat16"): "states on disk are float32: --by_block",
    ("format", "torch"): "--format onnx writes a program, torch.export.export one of the loaded folder",
    ("recompute", "null"): "true computes activations again, false keeps them",
    ("weighting", "importance"): "--model LPAF prunes and factorizes by these scores",
    **{
        ("weighting", old): "scores sums the positive ones of kept weights"
        for old in ("scores_abs", "scores_all", "scores_raw", "scores_shifted", "mask")
    },
    ("removes", "auto"): "give structures, as for a speed-up without it, or components",
    ("removes", "blocks"): "use --model Layers, in factorize --method Layers",
    ("removes", "both"): "give structures or components, which are as good",
}
# options that could be null, and have their default now
NULL = ("recompute",)
GROUPS = ("lora",)  # of which no option is left
# command -> what to do in its place
COMMANDS = {
    "verify": "`export RUN OUT` makes the export of a run again, to be compared with RUN/export",
    "analyze": "`python -m benchmarks.analysis KIND MODEL OUT` in a clone of the repository draws the figures",
    "clean": "a run removes leftovers by itself; of runs of 0.2 also delete RUN/<stage>/*.ckpt of finished stages",
    "list methods": "`fit --help` names the methods; a folder of this name is ./methods",
    **dict.fromkeys(("list recipes", "list tasks"), "`--help` names the recipes and their tasks"),
}
# key in the config of a comparison -> what to do in its place
KEYS = {
    "claims": "python -m benchmarks.comparison.claims tests claims on the folder of a comparison",
    "config": "give the recipe's options in options",
    "each": "give every value a method of its own",
    "epochs": "leave it out, updates and the data decide",
}


def removed(option: str) -> str | None:
    """Return one line on an option that was removed, named in full or by its last parts; None for any other."""
    names = (option, *(".".join(option.split(".")[-parts:]) for parts in (2, 1)))
    _, advice = next((REMOVED[name] for name in names if name in REMOVED), (None, None))
    return advice and f"{option}: this option was removed in version 0.3; {advice}"


def removed_value(option: str, value: str) -> str | None:
    """Return one line on a value that was removed from an option, or None."""
    advice = VALUES.get((option.rpartition(".")[2].rpartition("--")[2], value))
    return advice and f"{option} '{value}': this value was removed in version 0.3; {advice}"


def without_removed(values: dict[str, Any], strict: bool, group: str = "") -> dict[str, Any]:
    """Return stored options by name, in groups, without those that were removed, and without values that were.

    Args:
        values: of ``group``.
        strict: refuse what had an effect, with a UserError; an existing model is read without it.
        group: name of the group.
    """
    kept, of_model = {}, group in ("", "init_args")
    if of_model and values.get("backbone") and values.get("revision"):
        values = {**values, "backbone": f"{values['backbone']}@{values['revision']}", "revision": None}
    package, _, _ = str(values.get("class_path") or "").rpartition(".")
    of_user = group == "model" and package != "" and package.partition(".")[0] != "lit_compress"
    for name, value in values.items():
        if of_user and name == "init_args":  # whose options may have these names
            kept[name] = value
            continue
        if name in NULL and value is None:
            continue
        if gone := REMOVED.get(f"{'model' if of_model else group}.{name}") or REMOVED.get(name):
            usual, advice = gone
            known = usual if isinstance(usual, tuple) else (usual,)
            line = None if value in (*known, None) else f"{name}: {value!r} was removed in version 0.3; {advice}"
        elif not isinstance(value, str) or (line := removed_value(name, value)) is None:
            # a class, such as an optimizer, has options of its own, which may have these names
            inside = isinstance(value, dict) and (name == "model" or "class_path" not in value)
            left = without_removed(value, strict, name) if inside else value
            if name not in GROUPS:
                kept[name] = left
            continue
        if line and strict:
            raise UserError(line)
    return kept
