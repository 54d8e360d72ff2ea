"""Count what a process does - files, steps, batches - and let a kill or a broken disk meet it at the n-th of them.

A moment is named by a number, not by a time: the same run does the same things in the same order, so that a point can
be repeated, and a record says what was hit. Python tells of every file that is opened, renamed or removed; torch,
safetensors and tokenizers write past it, and are wrapped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_PATHS = {"os.rename": "rename", "os.mkdir": "mkdir", "os.remove": "remove", "os.rmdir": "rmdir", "open": "open"}
FILES = (*_PATHS.values(), "write")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PACKAGE = f"{os.sep}lit_compress{os.sep}"
_TEMPORARY = re.compile(r"(^|/)\.([^/]+?)(?:\.\d+)?\.tmp(?=/|$)")


@dataclass(frozen=True)
class Event:
    """Something that a process is about to do.

    Attributes:
        kind: ``open`` (to write), ``write`` (by torch, safetensors or tokenizers), ``rename``, ``mkdir``, ``remove``,
            ``rmdir``; ``step`` of an optimizer, ``stepped`` after it; ``batch``, a forward of a model.
        what: the file, relative to the run; of a batch its number.
        stage: that is being run; empty before and after the stages.
        part: the folder of the package that does it, e.g. ``calibration``.
    """

    kind: str
    what: str
    stage: str = ""
    part: str = ""

    @property
    def name(self) -> str:
        """The file's name when it is complete."""
        return _TEMPORARY.sub(r"\1\2", self.what)

    @property
    def group(self) -> str:
        """What a point is counted as in the tables."""
        if self.kind in FILES:
            name = self.what.rpartition("/")[2]
            if "ckpt" in name:
                return "checkpoint"
            if self.what.startswith((".export", "export")):
                return "export"
            return "net" if "/net" in self.what or "/.net" in self.what else "records"
        if self.part == "calibration":
            return "calibration"
        if self.part in ("evaluation", "export") or not self.stage:
            return "evaluation"
        return "mid-accumulation" if self.what.endswith("b") else "mid-epoch"


class Watch:
    """Counts the events of this process from now on; there is no way back.

    Args:
        folder: of the run; files elsewhere are not counted.
        act: is called before every event.
    """

    def __init__(self, folder: Path, act: Act) -> None:
        self.folder, self.act = str(folder.absolute()), act
        self.seen: list[Event] = []
        self.sizes: dict[int, int] = {}  # event -> bytes of the file that was written then
        self.pending: Path | None = None  # the file that the event before wrote
        self._began = 0
        self._busy = False
        sys.addaudithook(self._hook)
        self._wrap_writers()
        self._wrap_steps()

    @property
    def number(self) -> int:
        """Of the event that is about to happen."""
        return len(self.seen) - 1

    def _hook(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in _PATHS or self._busy:
            return
        if name == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
            return
        at = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}.get(name)
        path = _path(arguments[0], arguments[at] if at else -1)
        if path is None or not (path == self.folder or path.startswith(self.folder + os.sep)):
            return
        fresh = name == "open" and bool(arguments[2] & (os.O_TRUNC | os.O_EXCL))
        self._event(_PATHS[name], path, path if fresh else None)

    def _event(self, kind: str, what: str, writes: str | None = None) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            stage, part = _place()
            shown = os.path.relpath(what, self.folder) if kind in FILES else what
            event = Event(kind, shown, stage, part)
            if self.pending is not None and self.pending.is_file():
                self.sizes[self._began] = self.pending.stat().st_size
            self.seen.append(event)
            self.act(self, event)
            self.pending, self._began = Path(writes) if writes else None, self.number
        finally:
            self._busy = False

    def _wrap_writers(self) -> None:
        import safetensors.torch
        import tokenizers
        import torch

        def told(function: Callable[..., Any], at: int) -> Callable[..., Any]:
            @functools.wraps(function)
            def write(*args: Any, **more: Any) -> Any:
                path = str(args[at]) if isinstance(args[at], str | os.PathLike) else ""
                if os.path.abspath(path).startswith(self.folder + os.sep):
                    self._event("write", os.path.abspath(path), path)
                return function(*args, **more)

            return write

        torch.save = told(torch.save, 1)
        safetensors.torch.serialize_file = told(safetensors.torch.serialize_file, 1)
        tokenizers.Tokenizer.save = told(tokenizers.Tokenizer.save, 1)  # type: ignore[method-assign]

    def _wrap_steps(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from transformers import PreTrainedModel

        def forward(module: Any, inputs: Any) -> None:
            if isinstance(module, PreTrainedModel) and type(module).__name__.endswith("ForSequenceClassification"):
                self._event("batch", _batch())

        register_module_forward_pre_hook(forward)
        register_optimizer_step_pre_hook(lambda *_: self._event("step", ""))
        register_optimizer_step_post_hook(lambda *_: self._event("stepped", ""))


Act = Callable[[Watch, Event], None]


def nothing(watch: Watch, event: Event) -> None:
    """Only count."""


def _path(path: Any, handle: int) -> str | None:
    """Return a path that an audit event names, maybe relative to an open folder; None for a descriptor."""
    if isinstance(path, int) or path is None:
        return None
    name = os.fsdecode(path)
    if not os.path.isabs(name) and handle >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{handle}"), name)
    return os.path.abspath(name)


def _frames() -> Iterator[Any]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place() -> tuple[str, str]:
    """Return the stage that is being run, and the folder of the package whose code does something now."""
    stage = part = ""
    for frame in _frames():
        file = frame.f_code.co_filename
        if _PACKAGE not in file:
            continue
        room = file.rpartition(_PACKAGE)[2].partition(os.sep)[0]
        part = "calibration" if room == "calibration" else part or room
        if frame.f_code.co_name == "run_stages":
            stage = str(frame.f_locals.get("name", ""))
    return stage, part


def _batch() -> str:
    """Return the number of the batch of training, and ``b`` for the second of an accumulation; empty elsewhere."""
    for frame in _frames():
        if frame.f_code.co_name == "training_step" and _PACKAGE in frame.f_code.co_filename:
            number = frame.f_locals["batch_idx"]
            return f"{number}{'ab'[number % 2]}"
    return ""


# ------------------------------------------------------------------------------------------------- what happens


class Kill:
    """End the process as ``kill -9`` does, before event ``at``; with ``torn`` the file before it is half written."""

    def __init__(self, at: int, torn: bool = False) -> None:
        self.at, self.torn = at, torn

    def __call__(self, watch: Watch, event: Event) -> None:
        if watch.number == self.at:
            if self.torn and watch.pending is not None and watch.pending.is_file():
                os.truncate(watch.pending, watch.pending.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


class Refuse:
    """Let the file system refuse an event at a file once, with an error, e.g. ``ENOSPC``.

    Args:
        at: number of the event, or its kind and name, e.g. ``("rename", "stages.json")``.
        code: the error's name.
    """

    def __init__(self, at: int | tuple[str, str], code: str) -> None:
        self.at, self.code, self.met = at, code, False

    def __call__(self, watch: Watch, event: Event) -> None:
        if self.met:
            _limit(None)
        if self.met or self.at not in (watch.number, (event.kind, event.name)):
            return
        self.met = True
        if event.kind == "write":  # Python has no say in it: the kernel refuses the first byte
            _limit(0)
            return
        number = getattr(errno, self.code)
        raise OSError(number, os.strerror(number), event.what)


class Fill:
    """Fill the disk at event ``at``: no file can be longer than ``size`` bytes from then on; what is begun is cut.

    Args:
        at: as :class:`Refuse`'s.
        size: bytes.
    """

    def __init__(self, at: int | tuple[str, str], size: int) -> None:
        self.at, self.size = at, size

    def __call__(self, watch: Watch, event: Event) -> None:
        if self.at in (watch.number, (event.kind, event.name)):
            _limit(self.size)


def _limit(size: int | None) -> None:
    """Set how long a file can be; None for no limit."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))


# ------------------------------------------------------------------------------------------------- processes


def command(
    args: Sequence[str], folder: Path, said: Path, act: Act | None = None, events: Path | None = None
) -> NoReturn:
    """Be ``python -m lit_compress ARGS``, but for the reload of the export in yet another process.

    Args:
        args: of the command.
        folder: that is watched.
        said: file for what it prints, if it ends by itself.
        act: what happens to it; None watches nothing.
        events: file for the events and the sizes of the files that were written, if it ends by itself.
    """
    import torch

    from lit_compress.__main__ import main
    from lit_compress.export import folder as exporting

    reader, writer = os.pipe()  # what is said must not end with the disk
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    sys.stdout = sys.stderr = os.fdopen(writer, "w", buffering=1)  # the old ones may know that theirs was a file
    torch.set_num_threads(1)
    exporting.check_export = lambda *_: 0.0
    code: object = 0
    watch = Watch(folder, act) if act is not None else None
    try:
        main(list(args))
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    _limit(None)
    sys.stdout.flush()
    os.set_blocking(reader, False)
    with contextlib.suppress(BlockingIOError):
        said.write_bytes(os.read(reader, 1 << 20))
    if watch is not None and events is not None:
        seen = [asdict(event) | {"size": watch.sizes.get(number)} for number, event in enumerate(watch.seen)]
        events.write_text(json.dumps(seen))
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def forked(*args: Any) -> int:
    """Run :func:`command` in a fork of this process, which has run nothing itself; return its exit code."""
    sys.stdout.flush()
    if not (child := os.fork()):
        try:
            command(*args)
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
