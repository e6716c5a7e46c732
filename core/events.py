"""What can happen to a job (past tense) and what the job's machine asks for in return (imperative)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic_adapter.core.model import Directive, Member, Outcome, WorkerExit, World
from elastic_adapter.core.restart import History


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """An agent attached, for the first time or again. ``running`` is the generation that it runs."""

    member: Member
    running: int | None = None


@dataclass(frozen=True, slots=True)
class MemberLost:
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemberLeaving:
    """The node was asked to go (a signal to its agent) and waits for leave to do so."""

    node: str
    signal: int


@dataclass(frozen=True, slots=True)
class PortsOffered:
    """The agent holds these ports reserved now; they replace those it offered before."""

    node: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerExited:
    exit: WorkerExit


@dataclass(frozen=True, slots=True)
class NodeDrained:
    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A user wants the whole job to end."""

    node: str
    signal: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened; a deadline named by ``job.deadline`` may be over."""


Event: TypeAlias = (
    MemberJoined | MemberLost | MemberLeaving | PortsOffered | WorkerExited | NodeDrained | StopRequested | TimePassed
)


@dataclass(frozen=True, slots=True)
class Commit:
    """Make this world and the budget spent for it the truth, in one transaction, before anything is sent."""

    world: World
    history: History


@dataclass(frozen=True, slots=True)
class Conclude:
    """Make the outcome the truth."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Send:
    node: str
    directive: Directive


@dataclass(frozen=True, slots=True)
class Tell:
    """One line for the log, for a person."""

    reason: str


Command: TypeAlias = Commit | Conclude | Send | Tell
