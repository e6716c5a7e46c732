"""Whether a failed worker means another generation or the end, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from elastic_adapter.core.model import Level, WorkerExit


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The budget of the whole job, not of each node."""

    max_restarts: int = 0
    # Exit codes by which a worker asks to be started again: nobody is to blame, and nothing is charged.
    free_codes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be 0 or more, got {self.max_restarts}")


@dataclass(frozen=True, slots=True)
class History:
    """The restarts charged so far: the times (coordinator's clock) at which they were decided."""

    charged: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        return len(self.charged)

    def charge(self, now: float) -> History:
        return replace(self, charged=(*self.charged, now))


@dataclass(frozen=True, slots=True)
class Restart:
    reason: str
    delay_s: float = 0.0
    # Whether it is one of those that the budget counts.
    charged: bool = True


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


Decision: TypeAlias = Restart | GiveUp


def decide(level: Level, policy: RestartPolicy, history: History, exit: WorkerExit) -> Decision:
    """What a failure means, given what was spent before."""
    what = f"rank {exit.rank} on {exit.node} {exit.how}"
    if level == Level.OFF:
        return GiveUp(f"{what}; fault tolerance is off (level 0)")
    if exit.code in policy.free_codes:
        return Restart(f"{what}, by which it asks to be started again; not charged", charged=False)
    if policy.max_restarts == 0:
        return GiveUp(f"{what}; no restarts are allowed (--max-restarts 0)")
    if history.count >= policy.max_restarts:
        return GiveUp(f"{what}; all {policy.max_restarts} restarts are used up")
    return Restart(f"{what}; restart {history.count + 1} of {policy.max_restarts}")
