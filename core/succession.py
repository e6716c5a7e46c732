"""What an agent does about the leader, given what it last met. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from elastic_adapter.core.ports import Leader


class Answer(Enum):
    """What a port says to whoever knocks."""

    # The host answers, and nobody listens there: whoever did is gone.
    REFUSED = auto()
    OPEN = auto()
    # No answer in time, or no way to the host: nothing is known.
    SILENT = auto()
    # The name leads nowhere.
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Broken:
    """How the last attempt to follow a leader ended."""

    epoch: int
    # Whether there was a stream: only then may the leader be deposed.
    had_stream: bool
    # Whether somebody answered there, saying that it does not lead.
    steps_down: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """Attach to the leader."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again in a moment."""


@dataclass(frozen=True, slots=True)
class Depose:
    """Take the leader's place, which is dead."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resign:
    """The leader's key is ours, from a time when we led and failed: begin anew, in a later epoch."""


Move: TypeAlias = Ask | Wait | Depose | Resign


def next_move(leader: Leader, me: str, broken: Broken | None, answer: Answer | None) -> Move:
    """``answer`` is what the leader's port said, where it is the one of the broken stream.

    A host that does not answer at all is left to its lease: from here a dead one and a cut one look the same.
    """
    if broken is None or leader.epoch != broken.epoch:
        return Ask()
    if leader.address == me:
        return Resign()
    if not broken.had_stream:
        return Ask() if answer is Answer.OPEN else Wait()
    if answer is Answer.REFUSED:
        return Depose("nobody listens there any more")
    if broken.steps_down:
        return Depose("it says that it does not lead")
    return Ask() if answer is Answer.OPEN else Wait()
