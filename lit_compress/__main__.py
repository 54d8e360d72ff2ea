"""The entry point ``python -m lit_compress``: usage, commands, exit codes. Slow imports wait for a command."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from importlib import import_module
from inspect import signature
from types import ModuleType

COMMANDS = (
    "fit", "plan", "compare", "evaluate", "predict", "export", "report", "list", "bench", "factorize",
)  # fmt: skip
# names of version 0.2
OLD = {"validate": ["evaluate", "--split", "validation"], "test": ["evaluate", "--split", "test"]}


def main(argv: list[str] | None = None) -> None:
    """Run one command; a user's mistake gives one line on stderr and exit code 2."""
    from lit_compress.utils.errors import UserError, nearest

    # Threads that wait for another one sleep: where it does not get a core, spinning ones would take it from it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    # By default 1,024 products, each of one shape, are kept with their buffers: 0.7 GB after 100 steps in bf16-mixed.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if not sys.stderr.isatty():  # bars of other libraries would fill a file
        for library in ("HUB", "DATASETS"):
            os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--version"]:
        from lit_compress.version import __version__

        print(__version__)
        return
    raised = threading.excepthook
    threading.excepthook = _told_by_main
    try:
        if not argv or argv[0] in ("-h", "--help"):
            import_module("lit_compress.cli.lines").print_usage(COMMANDS)
            return
        argv = [*OLD.get(argv[0], argv[:1]), *argv[1:]]
        if argv[0] not in COMMANDS:
            raise UserError(f"unknown command '{argv[0]}'; {nearest(argv[0], COMMANDS)}")
        line = import_module("lit_compress.cli.lines").read_line(argv[0], argv[1:])
        import_module("lit_compress.utils.progress").silence_libraries()
        function = getattr(_commands(), "list_" if argv[0] == "list" else argv[0])
        function(**line.own, **({"line": line} if "line" in signature(function).parameters else {}))
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as stop:
        code = getattr(stop, "code", 130)
        if code not in (130, 128 + signal.SIGTERM):
            raise
        hints = {"fit": " with --ckpt_path last continues", "compare": " continues",
                 "factorize": " continues --distil and --by_block"}  # fmt: skip
        hint = f"; the same command{hints[argv[0]]}" if argv[0] in hints else ""
        print(f"stopped by {'Ctrl-C' if code == 130 else 'SIGTERM'}{hint}", file=sys.stderr)
        sys.exit(code)
    except Exception as error:
        if (said := _line(error, argv)) is None:
            raise
        print(f"error: {said}", file=sys.stderr)
        sys.exit(2)
    finally:
        threading.excepthook = raised


def _commands() -> ModuleType:
    """Import the commands; the garbage collector, which else takes a second, never looks at what libraries made."""
    name = "lit_compress.cli.commands"
    if name in sys.modules or not gc.isenabled():
        return import_module(name)
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _told_by_main(raised: threading.ExceptHookArgs) -> None:
    """Be silent about a file that a thread cannot write, as the main thread fails for it; show other errors."""
    from lit_compress.utils.files import write_failure

    if write_failure(raised.exc_value) is None:
        threading.__excepthook__(raised)


def _line(error: Exception, argv: list[str]) -> str | None:
    """Return the line that says what the user can mend, such as a mistake or a full disk; None for a bug."""
    from lit_compress.utils.errors import printable, user_error

    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "lit_compress":
        advice = "run `. .venv/bin/activate` in the clone after `make quickstart`, or `pip install .`"
        return f"this Python has no package '{error.name}'; {advice}"
    if (mistake := user_error(error)) is not None:
        return printable(import_module("lit_compress.cli.words").as_typed(str(mistake), argv))
    if (reason := import_module("lit_compress.utils.files").write_failure(error)) is None:
        return None
    again = " with --ckpt_path last" if argv[0] == "fit" else ""
    return f"{reason}; finished work is kept. Fix this and rerun the same command{again}"


if __name__ == "__main__":
    main()
