"""Which of several failures was the cause, and which only followed from it. Pure."""

from __future__ import annotations

import re
from signal import SIGABRT, SIGTERM

from elastic_adapter.core.model import WorkerExit

# How collectives, stores and sockets say that somebody else is gone, or did not come: gloo, NCCL, torch, paddle, Python.
# Paddle's gloo says TIMEOUT at once when a peer is gone; its store tells the place, and the reason a line above.
_PEER_IS_GONE = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted|lost)|broken pipe|peer is gone|closed by peer|reset by peer"
    r"|remote process exited|ncclremoteerror|ncclsystemerror|nccl communicator was aborted|socket ?timeout"
    r"|connectionerror|eoferror|disterror|distnetworkerror|distbackenderror|diststoreerror|no route to host|econnreset"
    r"|timeout self_rank =|timed out waiting \d+ ?ms for (?:recv|send)|application timeout caused pair closure"
    r"|store/tcp_utils\.h:",
    re.IGNORECASE,
)
# Of what a worker said last, so many lines tell why it ended.
_LAST_LINES = 6


def follows(exit: WorkerExit) -> int:
    """How much a failure looks like the consequence of another: 0 not at all, 2 by its own words."""
    if exit.signal is not None:
        return 1 if exit.signal in (SIGABRT, SIGTERM) else 0
    said = [exit.error] if exit.error else [line for line in exit.detail.splitlines() if line.strip()]
    return 2 if _PEER_IS_GONE.search("\n".join(said[-_LAST_LINES:])) else 0


def earlier(one: WorkerExit, other: WorkerExit) -> bool:
    """Whether the first is rather the cause: by what it looks like, then by the clock (each node's own)."""
    return (follows(one), one.at) < (follows(other), other.at)
