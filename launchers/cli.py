"""The command ``elastic-launch``. What it does not need at once it imports later: misuse and --help answer quickly."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from elastic_adapter.core.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    _open_standard_streams()
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        sys.stderr.write(f"elastic-launch: error: {' '.join(str(error).splitlines())}\n")
        return 2
    except KeyboardInterrupt:
        # Before the agent handles signals there is nothing to stop but ourselves.
        return 128 + 2


def _open_standard_streams() -> None:
    """Who closed one of them (>&-) gets nothing written there; no pipe or socket of ours may take its number."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115


def _print(text: str) -> int:
    """Write to stdout; a reader that has gone away or a full disk is an exit code, not a traceback."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return 0


def _main(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("status", "events", "clear"):
        from elastic_adapter.launchers import look

        return look.main(argv[0], argv[1:])
    if argv and argv[0] == "checkpoints":
        from elastic_adapter.launchers import checkpoints

        text, code = checkpoints.main(argv[1:], os.environ)
        return _print(text) or code
    from elastic_adapter.launchers.command_line import help_text, parse

    line = parse(argv)
    if "help" in line.options:
        return _print(help_text())
    if "version" in line.options:
        from importlib.metadata import version

        return _print(f"elastic-launch {version('elastic-adapter')}\n")
    if sys.platform != "linux":
        raise UserError(f"elastic-launch runs on Linux only, this is {sys.platform}")
    return _launch(line.options, line.words)


def _launch(options: dict[str, str], words: tuple[str, ...]) -> int:
    from elastic_adapter.launchers.devices import this_machine
    from elastic_adapter.launchers.resolve import resolve
    from elastic_adapter.launchers.settings import read
    from elastic_adapter.launchers.streams import make_folder

    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working folder no longer exists: go to one that does") from None
    values = read(options, os.environ)
    plan = resolve(values, words, os.environ, this_machine())
    if values["dry-run"].on:
        from elastic_adapter.launchers.dry_run import describe

        return _print(describe(plan, os.environ))
    if plan.summary_file is not None and os.path.isdir(plan.summary_file):
        raise UserError(f"--summary-file {plan.summary_file}: expected a file, and this is a folder")
    if plan.node.output.log_dir is not None:
        make_folder(plan.node.output.log_dir, next(row.origin for row in plan.sources if row.name == "log-dir"))
    from elastic_adapter.launchers.run import launch

    return launch(plan)


if __name__ == "__main__":
    sys.exit(main())
