"""``python -m lit_compress``: the commands, and how they end. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys

USAGE = """usage: python -m lit_compress COMMAND ...

  fit --config NAME.yaml [--model.density 0.25] [--data.path DIR] [--run_dir DIR] [--ckpt_path last]
                         run every stage of a method and export the result; `last` continues a stopped run
  validate TARGET        dev metrics of a run or an export
  test TARGET            metrics on the test split
  predict TARGET         write text, label and probability of every row as JSON lines
  export RUN OUT [--format hf|onnx|torch] [--round_to 8]
                         write a finished run as a folder that loads without this package; also as one program
  factorize MODEL OUT --data.task NAME [--rank_ratio 0.33] [--weighting fisher] [--axis in]
                         factorize a fine-tuned model at once, without training, and export it
  analyze truncation|sweep|spectra|ranks|neurons|pattern|allocation NET OUT --data.task NAME
                         what truncation does to a net, what pruning left of it: table and figure

COMMAND --help shows every option with its default; NAME.yaml is a path or a shipped config:
  {configs}
"""

COMMANDS = ("fit", "validate", "test", "predict", "export", "factorize", "analyze")


def main(argv: list[str] | None = None) -> None:
    """Run one command; a user's mistake is one line on stderr and exit code 2."""
    from lit_compress.errors import UserError, nearest

    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        from lit_compress.configs_path import shipped

        print(USAGE.format(configs="\n  ".join(_grouped(shipped()))))
        return
    if argv[0] == "--version":
        from lit_compress import __version__

        print(__version__)
        return
    try:
        if argv[0] not in COMMANDS:
            raise UserError(f"unknown command '{argv[0]}'; {nearest(argv[0], COMMANDS)}")
        from lit_compress import cli

        getattr(cli, argv[0])(argv[1:])
    except Exception as error:
        if (found := _user_error(error)) is None:
            raise
        print(f"error: {found}", file=sys.stderr)
        sys.exit(2)


def _user_error(error: BaseException | None) -> BaseException | None:
    """Return the user's mistake behind ``error``; parsers and trainers wrap it in errors of their own."""
    from lit_compress.errors import UserError

    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def _grouped(names: list[str]) -> list[str]:
    """Return ``method_{task,task}.yaml`` for configs that differ in their task."""
    from lit_compress.tasks import TASKS

    groups: dict[str, list[str]] = {}
    for stem in (name.removesuffix(".yaml") for name in names):
        task = max((task for task in TASKS if stem.endswith(f"_{task}")), key=len, default="")
        groups.setdefault(stem.removesuffix(f"_{task}"), []).append(task)
    return [
        f"{method}_{{{','.join(tasks)}}}.yaml" if all(tasks) else f"{method}.yaml" for method, tasks in groups.items()
    ]


if __name__ == "__main__":
    main()
