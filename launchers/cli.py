"""The command ``elastic-launch``. What it does not need at once it imports later: misuse and --help answer quickly."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from elastic_adapter.core.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        sys.stderr.write(f"elastic-launch: error: {' '.join(str(error).splitlines())}\n")
        return 2
    except KeyboardInterrupt:
        # Before the agent handles signals there is nothing to stop but ourselves.
        return 128 + 2


def _main(argv: Sequence[str]) -> int:
    from elastic_adapter.launchers.command_line import help_text, parse

    line = parse(argv)
    if "help" in line.options:
        sys.stdout.write(help_text())
        return 0
    if "version" in line.options:
        from importlib.metadata import version

        sys.stdout.write(f"elastic-launch {version('elastic-adapter')}\n")
        return 0
    if sys.platform != "linux":
        raise UserError(f"elastic-launch runs on Linux only, this is {sys.platform}")
    return _launch(line.options, line.words)


def _launch(options: dict[str, str], words: tuple[str, ...]) -> int:
    from elastic_adapter.launchers.devices import this_machine
    from elastic_adapter.launchers.resolve import resolve
    from elastic_adapter.launchers.settings import read
    from elastic_adapter.launchers.streams import make_folder

    values = read(options, os.environ)
    plan = resolve(values, words, os.environ, this_machine())
    if values["dry-run"].on:
        from elastic_adapter.launchers.dry_run import describe

        sys.stdout.write(describe(plan, os.environ))
        return 0
    if plan.node.output.log_dir is not None:
        make_folder(values["log-dir"])
    from elastic_adapter.launchers.run import launch

    return launch(plan)


if __name__ == "__main__":
    sys.exit(main())
