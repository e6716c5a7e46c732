"""Whether a generation still gets on, and who holds it up. Pure.

Workers tell of progress in memory pages, agents read those and report what has changed. A generation hangs when none of
its ranks made a step for as long as the user will have it; one that never told of a step can't be judged by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.model import HUNG, Mark, Placement, StackReport, WorkerExit, World

# How often pages are read: so many times within the shortest timeout, within these bounds.
_LOOKS = 20
_OFTEN_S, _SELDOM_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """How a generation gets on, as far as its agents told."""

    # When it began, or when we began to lead it.
    since: float = 0.0
    # When any rank made a step; None: none has told of one.
    moved_at: float | None = None
    # By rank.
    marks: tuple[tuple[int, Mark], ...] = ()

    def with_marks(self, told: Mapping[int, Mark], now: float) -> Pulse:
        known = dict(self.marks)
        # A count that falls is of another process in the worker's place: it gets on, too.
        if all(known.get(rank, Mark()).count == mark.count for rank, mark in told.items()):
            return self
        return replace(self, moved_at=now, marks=tuple(sorted({**known, **told}.items())))


@dataclass(frozen=True, slots=True)
class Hang:
    """A generation that seems to hang: its workers' stacks are being asked for."""

    reason: str
    # No longer than this is waited for them.
    until: float
    # Those who have answered, and what they found.
    answered: frozenset[str] = frozenset()
    stacks: tuple[StackReport, ...] = ()


def look_every_s(config: JobConfig) -> float | None:
    """How often an agent looks whether its workers get on; None: nobody wants to know."""
    limits = [limit for limit in (config.hang_timeout_s, config.start_timeout_s) if limit is not None]
    return min(max(min(limits) / _LOOKS, _OFTEN_S), _SELDOM_S) if limits else None


def due(config: JobConfig, pulse: Pulse) -> float | None:
    """When this generation counts as hung if nothing is told until then; None: never.

    A step is heard of a moment after it was made: one that comes just in time must not come too late.
    """
    limit = config.start_timeout_s if pulse.moved_at is None else config.hang_timeout_s
    if limit is None:
        return None
    since = pulse.since if pulse.moved_at is None else pulse.moved_at
    return since + limit + (look_every_s(config) or 0.0)


def why(config: JobConfig, pulse: Pulse) -> str:
    if pulse.moved_at is None:
        return f"no rank told of a first step within {config.start_timeout_s:g} s (--start-timeout)"
    return f"no rank made a step for {config.hang_timeout_s:g} s (--hang-timeout)"


def convict(
    world: World, pulse: Pulse, hang: Hang, finished: frozenset[int]
) -> tuple[WorkerExit, tuple[WorkerExit, ...]]:
    """The suspect and the others, as failures.

    Who has made the fewest steps holds up the rest; among those, one that does not wait for others.
    """
    marks, stacks = dict(pulse.marks), {each.rank: each for each in hang.stacks}
    ranks = [rank for placement in world.placements for rank in _ranks(placement) if rank not in finished]

    most = max((mark.count for mark in marks.values()), default=0)

    def suspicion(rank: int) -> tuple[int, bool, int]:
        # Who never told of a step, beside others who do, is not known to be behind.
        return marks.get(rank, Mark()).count or most, bool(stacks.get(rank, _UNSEEN).waits), rank

    ranks.sort(key=suspicion)
    first, rest = ranks[0], ranks[1:]
    alike = [rank for rank in rest if suspicion(rank)[:2] == suspicion(first)[:2]]
    behind = [rank for rank in rest if suspicion(rank)[0] > suspicion(first)[0]]
    words = [hang.reason, _progress(marks.get(first), behind=bool(behind))]
    words.append(_doing(stacks.get(first, _UNSEEN)))
    if alike:
        words.append(f"nothing sets it apart from rank{'s' if len(alike) > 1 else ''} {_listed(alike)}")
    exits = {
        rank: _as_exit(world, rank, stacks.get(rank, _UNSEEN), marks.get(rank), hang.reason) for rank in (first, *rest)
    }
    suspect = replace(exits[first], hang="; ".join(words))
    return suspect, tuple(
        replace(exits[rank], hang=f"{_progress(marks.get(rank))}; {_doing(stacks.get(rank, _UNSEEN))}", detail="")
        for rank in rest
    )


_UNSEEN = StackReport(-1)
_LISTED = 8


def _ranks(placement: Placement) -> range:
    return range(placement.rank_offset, placement.rank_offset + placement.slots)


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return ", ".join(map(str, ranks[:_LISTED])) + more


def _progress(mark: Mark | None, *, behind: bool = False) -> str:
    at = "it has told of no step" if mark is None or not mark.count else f"its last step is {mark.step}"
    return f"{at}, fewer than the others" if behind else at


def _doing(stack: StackReport) -> str:
    if stack.waits:
        return f"it waits for others in {stack.waits}, {stack.place}"
    if stack.place:
        return f"it does not wait for others, but is in {stack.place}"
    return stack.text or "its stack is not known"


def _as_exit(world: World, rank: int, stack: StackReport, mark: Mark | None, reason: str) -> WorkerExit:
    placement = next(each for each in world.placements if rank in _ranks(each))
    return WorkerExit(
        node=placement.node,
        generation=world.generation,
        local_rank=rank - placement.rank_offset,
        rank=rank,
        code=HUNG,
        signal=None,
        at=stack.at,
        pid=stack.pid,
        detail_source="stack" if stack.place else "",
        detail=stack.text if stack.place else "",
        step=mark.step if mark is not None and mark.count else None,
        hang=reason,
        stack_file=stack.file,
    )
