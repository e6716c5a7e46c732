"""How the process that writes checkpoints is started, whoever starts it."""

from __future__ import annotations

import sys

# Not by -m: that has the working folder in the path, where a file of the user's may be called like a module of ours.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); from elastic_adapter.core.checkpoint.saver import main; main()"
)


def saver_command(channel: int) -> list[str]:
    """The saver's command line; ``channel`` is a descriptor that it inherits."""
    return [sys.executable, "-c", _PROGRAM, str(channel)]
