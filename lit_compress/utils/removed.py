"""Options and values of earlier versions: each is refused in one line, or left out of a stored config."""

from __future__ import annotations

from typing import Any

from lit_compress.utils.errors import UserError

LINE = "was removed in version 0.3; see 'Removed' in CHANGELOG.md"
# option, or its last one or two parts -> the value that is always used now, or a tuple of those that changed nothing;
# ... where no value changed anything
REMOVED: dict[str, Any] = {
    "centred": True, "gradient_damping": 0.01, "input_damping": 0.001, "estimator": "per_example", "stacked": True,
    "max_skipped": 20, "fidelity": "paper", "prune.norm": "rms", "head_projections": "dense", "skip_sites": 0,
    "match_last": True, "exact_target": True, "ridge": 1e-6, "prune.reduction": "sum", "prune.scope": "global",
    "prune.calibration_seed": 42, "prune.group": 1, "prune.projections": "pca", "train_originals": False,
    "score_point": "after", "sigma_side": "out", "prune.importance": "element1", "prune.score": "absolute",
    "power": 0.5, "prune.ratio": "exact", "refit": False, "allow_changed": False, "pivot": False,
    "prune.dropout": True, "prune.weighting": "none", "prune.rows": "sensitivity", "model.params": None,
    "model.sites": None, "prune.tolerance": 0.005, "squared_temperature": False, "retrain.labels": None,
    "retrain.parameters": "all", "prune.parameters": "all", "lora.rank": 16, "lora.alpha": 32.0, "lora.targets": None,
    "consistency_after_decay": True, "scope": "blocks", "double_forward": None, "through": None,
    "price": "parameters", "merge": "large", "model.revision": None, "trust_remote_code": False, "push_to_hub": None,
    "private": None, "json": None, "texts": None, "against": None, "model.blocks": None, "model.slicing": None,
    "prune.parts": "blocks", "export.round_to": None, "prune.form": "hard", "prune.threshold": 0.1,
    "prune.penalty": 10.0, "prune.fill": True, "axis": "in", "retrain.calibration_seed": None,
    "score_learning_rate": ...,
    "prune.gates": (  # of SP3, and of CoFiLoSparse
        ["hidden", "qk", "vo", "neurons", "heads", "attention_layer", "ffn_layer"],
        ["attention_layer", "ffn_layer", "heads"],
    ),
}  # fmt: skip
# last part of an option -> values that it had
VALUES = {
    "format": ("torch",), "removes": ("auto", "blocks", "both"),
    "weighting": ("importance", "scores_abs", "scores_all", "scores_raw", "scores_shifted", "mask"),
}  # fmt: skip
# options that could be null, and have their default now
NULL = ("recompute",)
GROUPS = ("lora",)  # of which no option is left


def removed(option: str) -> str | None:
    """Return one line on an option that was removed, named in full or by its last parts; None for any other."""
    names = (option, *(".".join(option.split(".")[-parts:]) for parts in (2, 1)))
    return f"{option}: this option {LINE}" if any(name in REMOVED for name in names) else None


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
        full = f"{'model' if of_model else group}.{name}"
        if full in REMOVED or name in REMOVED:
            usual = REMOVED[full if full in REMOVED else name]
            had_effect = usual is not ... and value not in (*(usual if isinstance(usual, tuple) else (usual,)), None)
        elif not (had_effect := isinstance(value, str) and value in VALUES.get(name, ())):
            # a class, such as an optimizer, has options of its own, which may have these names
            inside = isinstance(value, dict) and (name == "model" or "class_path" not in value)
            left = without_removed(value, strict, name) if inside else value
            if name not in GROUPS:
                kept[name] = left
        if had_effect and strict:
            raise UserError(f"{name}: {value!r} {LINE}")
    return kept
