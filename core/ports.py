"""The outside as the core sees it: what a registry, an adapter and a program must offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from elastic_adapter.core.blame import Inquest
from elastic_adapter.core.model import CheckpointRef, Failed, Outcome, Seat, World
from elastic_adapter.core.restart import History


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads the job and where it listens. A later leader has a higher epoch."""

    node: str
    address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Record:
    """What is committed of a job: all that a new leader needs in order to go on."""

    world: World | None = None
    history: History = field(default_factory=History)
    outcome: Outcome | None = None
    # The ranks of the world that have ended with code 0, for nodes all of whose workers have.
    finished: frozenset[int] = frozenset()
    # When the run ended: wall clock, for people.
    ended_at: float | None = None
    # What to add to the writer's clock for the wall clock: the next leader's clock begins elsewhere.
    clock: float | None = None
    # Why the generation before failed, as long as that is still to be told.
    inquest: Inquest | None = None
    # The ledger: the checkpoints of this run that exist, the newest first.
    checkpoints: tuple[CheckpointRef, ...] = ()

    @property
    def generation(self) -> int:
        """That of the world; 0: there is none yet."""
        return self.world.generation if self.world is not None else 0

    def on_clock(self, clock: float) -> Record:
        """The same, with times by another clock, of which this is what to add to it for the wall clock."""
        if self.clock is None:
            return self
        return replace(self, history=self.history.shifted(self.clock - clock), clock=clock)


def missed(known: int, current: int) -> str:
    """Why a commit is refused to who leads."""
    return f"generation {current} is committed, and this leader knows of generation {known}"


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened, for people."""

    epoch: int
    # Counts the notes of one leader.
    number: int
    # Wall clock.
    at: float
    kind: str
    text: str


class Registry(Protocol):
    """Where the truth of one job is kept."""

    async def campaign(self, node: str, address: str) -> Leader:
        """Become the leader if there is none; either way, say who leads. Safe to repeat."""
        ...

    async def load(self) -> Record:
        """The last record committed; an empty one before the first."""
        ...

    async def commit(self, epoch: int, record: Record, *, after: int) -> None:
        """Replace the record, if ``epoch`` still leads and ``after`` is the generation that was committed last.

        Else raise ``Fenced`` and change nothing; but a record that is there already counts as committed. Raises
        ``OutOfReach`` when no answer is to be had: then it may be tried again. What was tried in vain and was only long
        on its way never undoes what was committed meanwhile.
        """
        ...

    async def note(self, epoch: int, notes: tuple[Note, ...]) -> None:
        """Write these down, if ``epoch`` still leads; raises as ``commit`` does. Written twice they are the same."""
        ...

    async def notes(self) -> tuple[Note, ...]:
        """All that was written down, in order."""
        ...


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """A Python program, run through the bootstrap. ``mode`` is script, module or path."""

    mode: str
    target: str
    args: tuple[str, ...]
    python: str

    def command(self) -> tuple[str, ...]:
        """The command that a person would type for the same effect."""
        flags = ("-u", "-m") if self.mode == "module" else ("-u",)
        return (self.python, *flags, self.target, *self.args)


@dataclass(frozen=True, slots=True)
class NativeProgram:
    """Any other program, executed as it is."""

    argv: tuple[str, ...]

    def command(self) -> tuple[str, ...]:
        return self.argv


Program: TypeAlias = PythonProgram | NativeProgram


@dataclass(frozen=True, slots=True)
class FailureDetail:
    """A failure in the words of the framework's own error file."""

    message: str
    traceback: str


class Adapter(Protocol):
    """The launch side of a framework: it turns a seat in a world into what the framework reads.

    It must import, and all of it must work, where the framework is not installed.
    """

    @property
    def name(self) -> str: ...

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules that a standby imports while it waits; the framework's own comes first."""
        ...

    @property
    def hook(self) -> str | None:
        """A file of plain Python, run in a worker when it has imported the framework; None: none is needed."""
        ...

    @property
    def head_start_s(self) -> float:
        """How much earlier the first node starts than the others, so that rank 0 listens when they connect."""
        ...

    def slot_env(self, local_rank: int, slots: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables known before the world is: they are set before the framework is imported."""
        ...

    def worker_env(self, seat: Seat) -> dict[str, str]:
        """Variables that tell a worker its place in the world."""
        ...

    def error_file(self, outcome: Failed) -> str | None:
        """What whoever started the launcher wants to find in its error file; None: this framework has none."""
        ...

    def read_error_file(self, content: str) -> FailureDetail | None:
        """What a worker of this framework wrote of its own failure, if it can be read."""
        ...
