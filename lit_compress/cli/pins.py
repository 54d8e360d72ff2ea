"""Names on the hub among the options: each is resolved once, before the work, and the config keeps its commit.

So a run, its report and its card say which revision they are of, and a run that is continued reads the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jsonargparse import Namespace

from lit_compress.data.sources import located
from lit_compress.models.backbones import EMBEDDED, resolve
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError
from lit_compress.utils.hub import is_name, model_snapshot, split_name

_NEWEST = (None, "main")  # revisions that move on


def _is_name(text: str) -> bool:
    return text != EMBEDDED and is_name(text)


def _teacher(init: Namespace, before: Mapping[str, Any]) -> str:
    """Return a named teacher with the commit that the run has of it, or the revision of the backbone of this name."""
    name, revision = split_name("model.teacher", init.teacher)
    kept = str(before.get("teacher"))
    if revision in _NEWEST and kept.startswith(f"{name}@"):
        return kept
    if revision is None and init.get("revision") is not None and name == init.backbone:
        return f"{name}@{init.revision}"
    return str(init.teacher)


def pin(
    config: Namespace, recorded: Mapping[str, Any], task: Callable[[], Task], option: str = "model.backbone"
) -> dict[str, str]:
    """Give the names in a config their commits, in place, and return the folders of the models by option.

    Args:
        config: ``model.revision`` and ``data.revision`` become commits, a teacher ``NAME@COMMIT``.
        recorded: config of the run that is continued, whose commits stay, whatever ``main`` is now; {}: of none.
        task: makes the task of the model and data from the config, without ``@REVISION`` in names.
        option: the command's name for the backbone.

    Raises:
        UserError: the hub does not give one of them, a folder is not usable, two revisions of one name are given, or a
            revision of a folder.
    """
    init, data, folders = config.model.init_args, config.data, {}
    before, known = recorded.get("model", {}).get("init_args", {}), recorded.get("data", {})
    if named := _is_name(init.backbone):
        init.backbone, init.revision = split_name("model.backbone", init.backbone, init.get("revision"))
        data.backbone = init.backbone
        if init.revision in _NEWEST and before.get("backbone") == init.backbone:
            init.revision = before.get("revision") or init.revision
    elif init.get("revision") is not None:
        raise UserError(
            f"model.revision: '{init.revision}' is given, but model.backbone '{init.backbone}' is no name on the hub; "
            "leave it out (null)"
        )
    if taught := init.get("teacher") and _is_name(init.teacher):
        init.teacher = _teacher(init, before)
    if data.get("path") is not None and is_name(data.path):
        data.path, data.revision = split_name("data.path", data.path, data.get("revision"))
    if data.get("revision") in _NEWEST and (known.get("task"), known.get("path")) == (data.task, data.get("path")):
        data.revision = known.get("revision") or data.get("revision")
    record = task()
    if named:
        snapshot = model_snapshot(option, init.backbone, init.get("revision"))
        folders["backbone"] = resolve(str(snapshot.folder), record, option)
        init.revision = _kept(before, init.revision, snapshot.commit)
    elif init.backbone != EMBEDDED:
        resolve(init.backbone, record, option)  # is it a model, before data is asked for?
    if taught:
        snapshot = model_snapshot("model.teacher", init.teacher)
        init.teacher, folders["teacher"] = snapshot.pinned, resolve(str(snapshot.folder), record, "model.teacher")
    if (rows := located(data.task, data.get("path"), data.get("revision"), data.custom.configuration)) is not None:
        data.revision = _kept(known, data.get("revision"), rows.commit)
    return folders


def _kept(before: Mapping[str, Any], given: str | None, commit: str) -> str | None:
    """Return the revision that a config keeps: a run of an earlier version does not know it, and stays that run."""
    return None if before and before.get("revision") is None and given is None else commit
