"""Which of several failures was the cause, and which only followed from it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from signal import SIGABRT, SIGTERM

from elastic_adapter.core.model import Verdict, WorkerExit

# How collectives, stores and sockets say that somebody else is gone or did not come: gloo, NCCL, torch, paddle, Python.
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
# So many consequences are listed; more tell nothing new, and every node is told.
_LISTED = 16
_LONGEST_WORDS = 200


# How much a failure looks like the consequence of another, at most: by its own words.
COMPLAINS = 2


def follows(exit: WorkerExit) -> int:
    """How much a failure looks like the consequence of another: 0 not at all, 2 by its own words."""
    if exit.signal is not None:
        return 1 if exit.signal in (SIGABRT, SIGTERM) else 0
    said = [exit.error] if exit.error else [line for line in exit.detail.splitlines() if line.strip()]
    return COMPLAINS if _PEER_IS_GONE.search("\n".join(said[-_LAST_LINES:])) else 0


def by_cause(exits: Iterable[WorkerExit]) -> tuple[WorkerExit, ...]:
    """The failures, the cause first: by what each looks like, then by the clock (each node's own)."""
    return tuple(sorted(exits, key=lambda each: (follows(each), each.at)))


def listed(others: tuple[WorkerExit, ...]) -> tuple[tuple[WorkerExit, ...], int]:
    """What is told of the consequences: the first of them, in a line each; and how many more there are."""
    return tuple(_brief(exit) for exit in others[:_LISTED]), max(0, len(others) - _LISTED)


def _brief(exit: WorkerExit) -> WorkerExit:
    last = next((line.strip() for line in reversed(exit.detail.splitlines()) if line.strip()), "")
    words = exit.error or last
    words = words if len(words) <= _LONGEST_WORDS else f"{words[:_LONGEST_WORDS]} ..."
    return replace(exit, detail="", detail_source="", error=words)


@dataclass(frozen=True, slots=True)
class Inquest:
    """A generation that failed and was replaced. What is heard of it until a certain time belongs to its story."""

    generation: int
    # The first is the one that was decided upon.
    exits: tuple[WorkerExit, ...]
    decision: str
    restarts_left: int
    until: float

    def hear(self, exit: WorkerExit) -> Inquest:
        """Add a failure, unless it is known."""
        known = exit.ok or any(each.rank == exit.rank for each in self.exits)
        return self if known else replace(self, exits=(*self.exits, exit))

    @property
    def brief(self) -> Inquest:
        """As it is written down: however many failed, it has to fit into a record."""
        return replace(self, exits=(self.exits[0], *listed(self.exits[1:])[0]))

    def verdict(self) -> Verdict:
        # Who holds up a generation that hangs was found out by other means.
        first, *rest = self.exits if self.exits[0].hang else by_cause(self.exits)
        others, more = listed(tuple(rest))
        return Verdict(self.generation, first, others, more, self.decision, self.restarts_left)
