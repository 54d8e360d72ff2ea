"""Loading of backbones: from a folder, or by a hub name.

A name becomes the folder of its snapshot (utils/hub.py) before anything is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_compress.models.checks import check_head, check_tensors, check_tokenizer, is_finetuned, refuse_compressed
from lit_compress.models.files import check_form
from lit_compress.models.own_code import check_code, read_config
from lit_compress.models.padding import finds_last, names_padding, set_pad_token
from lit_compress.models.sites import Model
from lit_compress.models.surgery import as_linears
from lit_compress.tasks import TaskType, task_type, task_type_of_net
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError
from lit_compress.utils.hub import is_name, model_snapshot
from lit_compress.utils.types import Config, Tokenizer

DEFAULT = "google-bert/bert-base-uncased"  # on the hub


def resolve(backbone: str, option: str = "model.backbone") -> str:
    """Return the folder to load: for a name its snapshot of the hub. Messages name ``option``.

    Raises:
        UserError: the path is not a folder with a ``config.json``, and the hub does not give a model of this name; or
            it has a form that cannot be read, see :func:`~lit_compress.models.files.check_form`.
    """
    what = f"{option}: '{backbone}'"
    path = Path(backbone).expanduser()
    if path.is_dir() and (path / "config.yaml").is_file():
        raise UserError(f"{what} is a run, not a model; give its model, {path / 'dense' / 'net'}")
    if not path.exists():
        if not is_name(backbone):
            raise UserError(f"{option}: no folder '{backbone}'; give a folder with a config.json, or a hub name")
        path = model_snapshot(option, backbone).folder
    check_form(what, path)
    if not (path / "config.json").is_file():
        raise UserError(f"{what} holds no config.json; give a folder written by save_pretrained")
    check_code(what, path)
    return str(path)


@contextmanager
def one_line(what: str, name: str, option: str) -> Iterator[None]:
    """Turn the many errors of loading ``what`` from ``name`` into one line with advice; it begins with ``option``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:160]
        if "weights_only" in str(error):  # torch advises to run the file's code
            reason = "its weights are a pickle that holds other things than tensors; save the model as safetensors"
        raise UserError(f"{option}: cannot load the {what} from '{name}': {reason}") from error


def load_tokenizer(backbone: str, task: Task, option: str = "model.backbone") -> Tokenizer:
    """Load the fast tokenizer of ``backbone``, with a token that can pad (models/padding.py).

    Raises:
        UserError: the folder is missing or broken, or the hub cannot be reached; it has no tokenizer, one with more
            tokens than embeddings, or one without a token that can pad.
    """
    from tokenizers.normalizers import Lowercase, Sequence
    from transformers import AutoTokenizer

    name, what = resolve(backbone, option), f"{option}: '{backbone}'"
    with one_line("tokenizer", name, option):
        config = read_config(what, Path(name))
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        check_tokenizer(what, tokenizer, config)
    tokenizer.init_kwargs.pop("auto_map", None)  # no export may ask its users to run code that is not in it
    if "local_files_only" in tokenizer.init_kwargs:  # whether the hub was asked says nothing about the tokenizer
        tokenizer.init_kwargs["local_files_only"] = False
    set_pad_token(what, tokenizer, config, task)
    backend = tokenizer.backend_tokenizer
    own = backend.normalizer
    if task.pooling.lower and (own is None or own.normalize_str("A") != "a"):  # sentence-transformers: do_lower_case
        backend.normalizer = Sequence([Lowercase(), *([] if own is None else [own])])
    return tokenizer


def set_padding(config: Config, backbone: str, task: Task, option: str) -> None:
    """Let a configuration that names no padding token name the tokenizer's, where a head looks for the last token.

    Elsewhere it stays unchanged: the embedding of a padding token gets no gradient, and the token may be the end.
    """
    if finds_last(config, task) and not names_padding(config):
        config.pad_token_id = load_tokenizer(backbone, task, option).pad_token_id


def load_config(name: str, task: Task, option: str = "model.backbone", trained: bool = False) -> Config:
    """Load the configuration of a model with the head of ``task``: label names, problem type, class of the model.

    Args:
        name: folder or hub name; no weights are read.
        task: whose head it has.
        option: that named the model.
        trained: it was fine-tuned on ``task``, and keeps its own head.

    Raises:
        UserError: as :func:`load_tokenizer`; or the model is compressed already, the architecture has no such head, or
            no record, or the trained head does not fit.
    """
    folder, kind, what = Path(resolve(name, option)), task_type(task), f"{option}: '{name}'"
    if trained:
        refuse_compressed(what, folder)
    with one_line("configuration", str(folder), option):
        config: Any = read_config(what, folder, **({} if trained else kind.head(task)))
        kind.adopt(config, folder, option)
        if trained:
            check_head(what, config, task)
    classes = _auto_class(kind)._model_mapping
    if type(config) not in classes or (kind.one_stack and config.is_encoder_decoder):
        raise UserError(
            f"{what} has architecture {config.model_type}, which has no head for {kind.name}; "
            f"task '{task.name}' needs another"
        )
    config.architectures = [classes[type(config)].__name__]
    if kind.problem and config.problem_type is not None:
        config.problem_type = kind.problem
    set_padding(config, name, task, option)
    return config


def _auto_class(kind: TaskType) -> Any:
    """Return the class of transformers that builds models of ``kind``."""
    import transformers

    return getattr(transformers, kind.auto_class)


def load_net(name: str, task: Task, option: str = "model.backbone", trained: bool = False) -> Model:
    """Load a model with the head of ``task`` in float32, whatever dtype it is stored in; arguments as above.

    A head that the checkpoint lacks, or that has another size, is initialised randomly, and named. Unused tensors that
    it lacks are 0. The library's own report is off: ``check_tensors`` refuses the same or notes it, once.

    Raises:
        UserError: as :func:`load_config`; or its tensors do not match its configuration, or a trained head is missing.
    """
    import torch

    folder, kind, what = resolve(name, option), task_type(task), f"{option}: '{name}'"
    refuse_compressed(what, Path(folder))
    config, library = load_config(name, task, option, trained), logging.getLogger("transformers.modeling_utils")
    base: str = _auto_class(kind)._model_mapping[type(config)].base_model_prefix
    renamed = {r"^model\.": "transformer."} if base == "transformer" else None  # of a Llama's with a head for spans
    library.addFilter(_is_no_report)
    try:
        with one_line("model", folder, option):
            net, info = _auto_class(kind).from_pretrained(
                folder, config=config, key_mapping=renamed, dtype=torch.float32,
                ignore_mismatched_sizes=True, output_loading_info=True, trust_remote_code=False,
            )  # fmt: skip
    finally:
        library.removeFilter(_is_no_report)
    for unused in [key for key in info["missing_keys"] if key.startswith(kind.unused)]:
        net.get_parameter(unused).data.zero_()
        info["missing_keys"].remove(unused)
    kind.configure(net, task)
    if trained and (missing := sorted(info["missing_keys"])):
        raise UserError(f"{what} is not fine-tuned, it has no '{missing[0]}'; give a fine-tuned model")
    check_tensors(what, net, info, new_head=not trained)
    return as_linears(net)


def load_finetuned(name: str, task: Task, option: str = "model.teacher") -> Model:
    """Load the model that ``option`` names with its head, which was trained on ``task``; see :func:`load_net`."""
    return load_net(name, task, option, trained=True)


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def finetuned_on(backbone: str, task: Task) -> bool:
    """Return whether the head of ``backbone`` was trained on the classes of ``task``, see :func:`is_finetuned`.

    If the labels are a teacher's vectors, the backbone's own, it always is.
    """
    if task.wants_vectors:
        return True
    folder = Path(resolve(backbone) if is_name(backbone) else backbone).expanduser()
    return is_finetuned(f"model.backbone: '{backbone}'", folder, task)


def empty_net(config: Config) -> Model:
    """Build the model of ``config`` with random float32 weights, to be filled from a checkpoint."""
    import torch

    made = _auto_class(task_type_of_net(config))
    return as_linears(made.from_config(config, dtype=torch.float32, trust_remote_code=False))
