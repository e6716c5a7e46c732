"""What is known of the checkpoints that a world makes: who has written what, and where all ranks save next. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from elastic_adapter.core.model import CheckpointRef, Part, Shard

# How many checkpoints the ledger knows.
ENTRIES_KEPT = 64
# How many steps that are done with are remembered: news of one comes a moment later, if at all.
_SETTLED_KEPT = 16


class Stage(IntEnum):
    """How far a checkpoint is."""

    # Ranks write their parts.
    WRITING = 0
    # Rank 0's node puts it together and reads it back.
    PREPARING = 1
    # The ledger is asked to take it.
    ENTERING = 2
    # It exists; rank 0's node gives it its name.
    PUBLISHING = 3


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint that is being made."""

    step: int
    staged: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    stage: Stage = Stage.WRITING
    uri: str = ""
    # Until when all ranks have to have staged their parts; None: they have.
    staged_by: float | None = None
    # When the ledger is asked again, after it could not be reached, or is taking another one.
    enter_at: float | None = None

    @property
    def is_entering(self) -> bool:
        """Whether the ledger has been asked to take it, and has not answered."""
        return self.stage is Stage.ENTERING and self.enter_at is None

    def with_shard(self, shard: Shard) -> Save:
        written = self.written | {shard.rank} if shard.part is Part.WRITTEN else self.written
        return replace(self, staged=self.staged | {shard.rank}, written=written)


@dataclass(frozen=True, slots=True)
class Ask:
    """All ranks are to save at one step, and it is found out at which."""

    number: int
    reason: str
    # Whether they do no further step after that one.
    hold: bool
    # For how long nodes may take to answer.
    until: float
    # Who has answered: up to which step its workers may have got.
    bounds: tuple[tuple[str, int], ...] = ()
    # Where they save, once that is known: each at the first step that is not before this one. Whoever counts in larger
    # steps than one may never have done exactly so many.
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Saves:
    """All of this of one world."""

    # The ranks that can be asked to save: those that look after their steps whether they are.
    savers: frozenset[int] = frozenset()
    under_way: tuple[Save, ...] = ()
    ask: Ask | None = None
    # How often ranks were asked.
    asked: int = 0
    # Whether it is known what this world goes on from, if it did not say so itself; and what that is.
    resumed: bool = False
    resume_from: CheckpointRef | None = None
    # Steps that are done with, the last of them, and why nothing came of each; empty: something did. What is told of
    # them now is nothing new.
    settled: tuple[tuple[int, str], ...] = ()

    def find(self, step: int) -> Save | None:
        return next((each for each in self.under_way if each.step == step), None)

    def with_save(self, save: Save) -> Saves:
        """With this one in the place of what was known of its step."""
        others = (each for each in self.under_way if each.step != save.step)
        return replace(self, under_way=tuple(sorted((*others, save), key=lambda each: each.step)))

    def without(self, *steps: int, why: str = "") -> Saves:
        """Without what is over, one way or the other."""
        under_way = tuple(each for each in self.under_way if each.step not in steps)
        others = (each for each in self.settled if each[0] not in steps)
        settled = (*others, *((step, why) for step in steps))[-_SETTLED_KEPT:]
        return replace(self, under_way=under_way, settled=settled)

    def end_of(self, step: int) -> str | None:
        """Why nothing came of a step, or that something did; None: it is not done with, as far as is remembered."""
        return dict(self.settled).get(step)

    def is_asked_for(self, step: int) -> bool:
        """Whether this is the checkpoint that ranks were asked for: the first one from that step on."""
        asked = self.ask.step if self.ask is not None else None
        return asked is not None and asked <= step and not any(asked <= each.step < step for each in self.under_way)
