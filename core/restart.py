"""Whether a failed worker means another generation or the end, whom it is charged to, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from elastic_adapter.core.model import Level, WorkerExit

# Failures that no later decision looks back at are forgotten.
_REMEMBERED = 64
# What starting again does not mend, if it happens at the start.
_HOPELESS = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")
_USAGE_ERROR = 2


class Action(Enum):
    """What the user wants done about an exit."""

    RESTART = "restart"
    FAIL = "fail"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class ExitRule:
    """Exit codes and signals, and what is done about them; ``text`` is what the user wrote."""

    codes: range
    signals: tuple[int, ...]
    action: Action
    text: str

    def matches(self, exit: WorkerExit) -> bool:
        return exit.signal in self.signals if exit.signal is not None else exit.code in self.codes


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause before a restart: doubled with each in a row, from the first to the longest."""

    first_s: float
    longest_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.longest_s:
            raise ValueError(f"a backoff must be 0 <= FIRST <= LONGEST, got {self.first_s:g}:{self.longest_s:g}")

    def delay_s(self, before: int, jitter: float) -> float:
        """After this many restarts before; ``jitter`` from 0 to 1 takes up to a half off, so that jobs differ."""
        whole = min(self.first_s * 2.0 ** min(before, 62), self.longest_s)
        return whole * (1.0 - jitter / 2.0)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The budget of the whole job, not of each node."""

    max_restarts: int = 0
    # Restarts older than this no longer count; None: all count.
    window_s: float | None = None
    # None: at once.
    backoff: Backoff | None = None
    # Exit codes by which a worker asks to be started again: nobody is to blame, and nothing is charged.
    free_codes: tuple[int, ...] = ()
    # The first that matches counts.
    rules: tuple[ExitRule, ...] = ()
    # The same failure so often in a row at the start ends the job; 0: never.
    startup_failures: int = 2
    # For how long after its spawn a worker that reports no progress is at its start.
    startup_s: float = 30.0
    # One rank failing so often in a row ends the job; 0: never.
    crash_loop: int = 0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be 0 or more, got {self.max_restarts}")
        for name in ("startup_failures", "startup_s", "crash_loop"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.window_s is not None and self.window_s <= 0:
            raise ValueError(f"window_s must be above 0 or None, got {self.window_s}")

    def rule(self, exit: WorkerExit) -> ExitRule | None:
        return next((rule for rule in self.rules if rule.matches(exit)), None)

    def at_start(self, exit: WorkerExit) -> bool:
        """Whether a worker failed by itself before it got anywhere. Whoever kills workers does not count."""
        young = exit.age_s is not None and exit.age_s <= self.startup_s
        return young and exit.signal is None and exit.step is None


@dataclass(frozen=True, slots=True)
class Failure:
    """What is remembered of a failure."""

    rank: int
    node: str
    # The exception, or the code or signal: the same words mean the same failure.
    what: str
    at_start: bool


@dataclass(frozen=True, slots=True)
class History:
    """The restarts charged so far: the times (coordinator's clock) at which they were decided; and the failures."""

    charged: tuple[float, ...] = ()
    failures: tuple[Failure, ...] = ()

    @property
    def count(self) -> int:
        return len(self.charged)

    def spent(self, policy: RestartPolicy, now: float) -> int:
        """How many restarts count against the budget now."""
        if policy.window_s is None:
            return self.count
        return sum(at > now - policy.window_s for at in self.charged)

    def charge(self, now: float) -> History:
        return replace(self, charged=(*self.charged, now))

    def shifted(self, seconds: float) -> History:
        """By a clock that shows so much more."""
        return replace(self, charged=tuple(at + seconds for at in self.charged))

    def remember(self, failure: Failure) -> History:
        return replace(self, failures=(*self.failures, failure)[-_REMEMBERED:])


@dataclass(frozen=True, slots=True)
class Restart:
    reason: str
    delay_s: float = 0.0
    # Whether it is one of those that the budget counts.
    charged: bool = True


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


@dataclass(frozen=True, slots=True)
class Ignore:
    """It counts as a good end."""

    reason: str


Decision: TypeAlias = Restart | GiveUp | Ignore


def failure_of(policy: RestartPolicy, exit: WorkerExit) -> Failure:
    return Failure(exit.rank, exit.node, exit.error or exit.how, policy.at_start(exit))


def decide(
    level: Level, policy: RestartPolicy, history: History, exit: WorkerExit, now: float = 0.0, *, jitter: float = 0.0
) -> Decision:
    """What a failure means, given what was spent and what failed before."""
    what = f"rank {exit.rank} on {exit.node} {exit.how}"
    rule = policy.rule(exit)
    if rule is not None and rule.action is Action.IGNORE:
        return Ignore(f"{what}; ignored (--on-exit {rule.text})")
    if level == Level.OFF:
        return GiveUp(f"{what}; fault tolerance is off (level 0)")
    if rule is not None and rule.action is Action.FAIL:
        return GiveUp(f"{what}; not started again (--on-exit {rule.text})")
    if rule is None:
        if exit.code in policy.free_codes:
            return Restart(f"{what}, by which it asks to be started again; not charged", charged=False)
        hopeless = _hopeless(policy, exit) or _again_and_again(policy, history, exit)
        if hopeless is not None:
            return GiveUp(f"{what}; {hopeless}")
    return _within_budget(policy, history, what, now, jitter)


def _hopeless(policy: RestartPolicy, exit: WorkerExit) -> str | None:
    """Why a worker would fail in the same way again, as far as one exit tells."""
    if not policy.at_start(exit):
        return None
    kind = exit.error.partition(":")[0]
    if kind in _HOPELESS:
        return f"{exit.error}: starting it again would not help"
    if exit.code == _USAGE_ERROR and not exit.error:
        said = next((line for line in reversed(exit.detail.splitlines()) if "error:" in line), "")
        if said:
            return f"{said.strip()}: starting it again would not help"
        if "can't open file" in exit.detail:
            return "there is no such script: starting it again would not help"
    return None


def _again_and_again(policy: RestartPolicy, history: History, exit: WorkerExit) -> str | None:
    """Why a row of failures is not worth another one."""
    this = failure_of(policy, exit)
    earlier = policy.startup_failures - 1
    if this.at_start and policy.startup_failures and len(history.failures) >= earlier:
        last = history.failures[len(history.failures) - earlier :]
        if all(each.at_start and each.what == this.what for each in last):
            times = f"{policy.startup_failures} times in a row" if earlier else "at the start"
            return f"the same failure {times} at the start, before any progress (--startup-failures)"
    earlier = policy.crash_loop - 1
    if policy.crash_loop and len(history.failures) >= earlier:
        last = history.failures[len(history.failures) - earlier :]
        if all(each.rank == this.rank for each in last):
            places = ", ".join(dict.fromkeys((*(each.node for each in last), this.node)))
            return f"rank {this.rank} failed {policy.crash_loop} times in a row, on {places} (--crash-loop)"
    return None


def _within_budget(policy: RestartPolicy, history: History, what: str, now: float, jitter: float) -> Decision:
    if policy.max_restarts == 0:
        return GiveUp(f"{what}; no restarts are allowed (--max-restarts 0)")
    spent = history.spent(policy, now)
    within = "" if policy.window_s is None else f" within {policy.window_s:g} s"
    if spent >= policy.max_restarts:
        return GiveUp(f"{what}; all {policy.max_restarts} restarts{within} are used up")
    delay_s = policy.backoff.delay_s(spent, jitter) if policy.backoff is not None else 0.0
    pause = f", in {delay_s:.1f} s" if delay_s else ""
    return Restart(f"{what}; restart {spent + 1} of {policy.max_restarts}{within}{pause}", delay_s)
