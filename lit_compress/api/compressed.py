"""A compressed model in memory: a transformers model that knows its export, and writes it again."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_compress.cli.targets import find_target
from lit_compress.export.copies import copy_export, export_folder
from lit_compress.export.folder import check_out, check_owner
from lit_compress.export.modelling import write_model
from lit_compress.export.table import markdown
from lit_compress.models.files import LazyTensors, net_shapes
from lit_compress.models.own_code import forget_code
from lit_compress.models.storage import load_net, tied
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import read_json
from lit_compress.utils.hub import is_name
from lit_compress.utils.manifest import check_manifest, write_manifest
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    class Compressed(PreTrainedModel):
        """A compressed model: a transformers model with some layers replaced.

        Attributes:
            report: every number of it and of the dense model, as ``report.json`` of an export has them.
            folder: of its export, which is there as long as the model is.
        """

        report: Report
        folder: Path

else:
    Compressed = "Compressed"


class Report(dict[str, Any]):
    """The content of ``report.json``; printed, or shown in a notebook, it is the final table."""

    def __str__(self) -> str:
        return markdown(self)

    _repr_markdown_ = __str__


class Shared(tempfile.TemporaryDirectory[str]):
    """A folder that goes with the last model that holds it: copies share it, and of a pickled one only the path."""

    def __deepcopy__(self, _: object) -> Shared:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.name,)


def load(folder: str | Path) -> Compressed:
    """Load a compressed model: an export, or a finished run.

    Args:
        folder: that a command or ``save_pretrained`` wrote; or ``OWNER/NAME[@REVISION]`` of one on the hub.

    Returns:
        The model on the CPU in evaluation mode, in the dtype of the file.

    Raises:
        UserError: there is no such folder or name, or no compressed model in it.

    Example:
        >>> small = load("runs/lpaf-sst2")  # doctest: +SKIP
        >>> small.report["compressed"]["density"]  # doctest: +SKIP
        0.25
    """
    given = find_target(str(folder), "load").folder
    if not (given / "structure.json").is_file():
        raise UserError(f"load: '{folder}' is not a compressed model (no structure.json); transformers loads others")
    return with_export(given if is_name(str(folder)) else given.resolve())


def with_export(folder: Path, temporary: Shared | None = None) -> Compressed:
    """Return the model of an export, with which a ``temporary`` folder that holds it goes."""
    net: Any = load_net(folder, as_stored=True)
    net.folder_holder, net.folder, path = temporary, folder, folder / "report.json"
    net.report = Report(read_json("load", path, dict) if path.is_file() else {})
    net.save_pretrained, net.push_to_hub = partial(_save, net), _push
    return net


def _save(net: Compressed, save_directory: str | Path) -> None:
    """Write the export; of a model whose weights were changed without report, card and programs, which are not its."""
    out, same = Path(save_directory).expanduser(), _is_as_exported(net)
    check_out(out)
    check_owner(out, net.folder)
    if out.exists() and out.samefile(net.folder) and same:
        return
    with export_folder(out) as temporary:
        if same:
            check_manifest(f"'{net.folder}'", net.folder)
            copy_export(f"'{net.folder}'", net, net.folder, temporary)
            return
        from transformers import AutoTokenizer

        note(f"'{save_directory}': the weights are not those that were measured; report.json and the card are left out")
        write_model(net, temporary)
        AutoTokenizer.from_pretrained(net.folder, trust_remote_code=False).save_pretrained(temporary)
        forget_code(temporary)
        write_manifest(temporary)


def _is_as_exported(net: Compressed) -> bool:
    """Return whether the tensors of ``net`` are those of its export."""
    aliases, file = tied(net), LazyTensors(net.folder, "export")
    tensors = {name: value for name, value in net.state_dict().items() if name not in aliases}
    return set(net_shapes(net.folder)) == set(tensors) and all(
        (old := file[name]).dtype == new.dtype and torch.equal(old, new.cpu()) for name, new in tensors.items()
    )


def _push(*_: Any, **__: Any) -> None:
    """Refuse what the library's method would do: it creates a repository, and writes a card of its own."""
    raise UserError("push_to_hub: save_pretrained(FOLDER), then `hf upload USER/NAME FOLDER .` uploads it")
