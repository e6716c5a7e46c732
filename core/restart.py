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
    EXCLUDE = "exclude-node"


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
    # One rank, or one step, failing so often in a row ends the job; 0: never.
    crash_loop: int = 0
    # Whether the node is kept out instead, where it was the same each time.
    crash_loop_excludes: bool = False
    # A node on which so many workers failed is kept out of the next worlds, if enough others are there; 0: never.
    exclude_after: int = 0
    # Whether nodes can be checked: then each is after so many failures on it.
    check_after: int = 0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be 0 or more, got {self.max_restarts}")
        for name in ("startup_failures", "startup_s", "crash_loop", "exclude_after", "check_after"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.window_s is not None and self.window_s <= 0:
            raise ValueError(f"window_s must be above 0 or None, got {self.window_s}")

    def rule(self, exit: WorkerExit) -> ExitRule | None:
        return next((rule for rule in self.rules if rule.matches(exit)), None)

    def at_start(self, exit: WorkerExit) -> bool:
        """Whether a worker failed by itself before it got anywhere. Whoever kills workers does not count."""
        young = exit.age_s is not None and exit.age_s <= self.startup_s
        return young and exit.signal is None and exit.step is None and not exit.hang


@dataclass(frozen=True, slots=True)
class Failure:
    """What is remembered of a failure."""

    rank: int
    node: str
    # The exception, or the code or signal: the same words mean the same failure.
    what: str
    at_start: bool
    # When it was decided upon: coordinator's clock.
    at: float = 0.0
    # The last step that the worker had told of.
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A node that is taken only if there are too few others, until somebody clears it."""

    node: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.node} is excluded while there are enough others: {self.reason}"


@dataclass(frozen=True, slots=True)
class History:
    """The restarts charged so far: the times (coordinator's clock) at which they were decided; and the failures."""

    charged: tuple[float, ...] = ()
    failures: tuple[Failure, ...] = ()
    excluded: tuple[Exclusion, ...] = ()

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
        return replace(
            self,
            charged=tuple(at + seconds for at in self.charged),
            failures=tuple(replace(each, at=each.at + seconds) for each in self.failures),
        )

    def remember(self, failure: Failure) -> History:
        return replace(self, failures=(*self.failures, failure)[-_REMEMBERED:])

    def corrected(self, failure: Failure) -> History:
        """What was remembered last was only a consequence of this one."""
        return replace(self, failures=(*self.failures[:-1], failure))

    def failed_on(self, node: str, policy: RestartPolicy, now: float) -> int:
        """How many failures of this node's workers count now."""
        since = None if policy.window_s is None else now - policy.window_s
        return sum(each.node == node and (since is None or each.at > since) for each in self.failures)

    @property
    def kept_out(self) -> frozenset[str]:
        return frozenset(each.node for each in self.excluded)

    def exclude(self, exclusion: Exclusion) -> History:
        return replace(self, excluded=(*self.cleared_of(exclusion.node), exclusion))

    def cleared_of(self, node: str) -> tuple[Exclusion, ...]:
        return tuple(each for each in self.excluded if each.node != node)

    def clear(self, node: str) -> History:
        """Nothing is held against this node any more."""
        failures = tuple(each for each in self.failures if each.node != node)
        return replace(self, failures=failures, excluded=self.cleared_of(node))


@dataclass(frozen=True, slots=True)
class Restart:
    reason: str
    delay_s: float = 0.0
    # Whether it is one of those that the budget counts.
    charged: bool = True
    # The node that is to be kept out from now on.
    exclusion: Exclusion | None = None
    # Whether the failing worker's node is to be checked before it takes part again.
    check: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


@dataclass(frozen=True, slots=True)
class Ignore:
    """It counts as a good end."""

    reason: str


Decision: TypeAlias = Restart | GiveUp | Ignore


def failure_of(policy: RestartPolicy, exit: WorkerExit, now: float = 0.0) -> Failure:
    what = "hang" if exit.hang else exit.error or exit.how
    return Failure(exit.rank, exit.node, what, policy.at_start(exit), now, exit.step)


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
    if rule is None and exit.code in policy.free_codes:
        return Restart(f"{what}, by which it asks to be started again; not charged", charged=False)
    this = failure_of(policy, exit, now)
    row = _row(policy, history, this) if rule is None else None
    if rule is None:
        hopeless = _hopeless(policy, exit) or _never_starts(policy, history, this)
        if hopeless is None and row is not None and not _is_this_nodes(policy, row.failures):
            hopeless = row.words
        if hopeless is not None:
            return GiveUp(f"{what}; {hopeless}")
    decision = _within_budget(policy, history, what, now, jitter)
    if not isinstance(decision, Restart):
        return decision
    return _with_blame(decision, policy, history, this, rule=rule, row=row)


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


def _never_starts(policy: RestartPolicy, history: History, this: Failure) -> str | None:
    """Why a row of failures at the start is not worth another one."""
    earlier = policy.startup_failures - 1
    if not this.at_start or not policy.startup_failures or len(history.failures) < earlier:
        return None
    last = history.failures[len(history.failures) - earlier :]
    if not all(each.at_start and each.what == this.what for each in last):
        return None
    times = f"{policy.startup_failures} times in a row" if earlier else "at the start"
    return f"the same failure {times} at the start, before any progress (--startup-failures)"


@dataclass(frozen=True, slots=True)
class _Row:
    """Failures in a row that have something in common."""

    failures: tuple[Failure, ...]
    words: str


def _row(policy: RestartPolicy, history: History, this: Failure) -> _Row | None:
    """What is the same in a row of failures that is as long as the user will have it."""
    # What failed on a node that was excluded for it is dealt with.
    known = (each for each in history.failures if each.node not in history.kept_out)
    row = (*known, this)[-policy.crash_loop :]
    if not policy.crash_loop or len(row) < policy.crash_loop:
        return None
    places = ", ".join(dict.fromkeys(each.node for each in row))
    if all(each.rank == this.rank for each in row):
        return _Row(row, f"rank {this.rank} failed {policy.crash_loop} times in a row, on {places} (--crash-loop)")
    if this.step is not None and all(each.step == this.step for each in row):
        words = f"{policy.crash_loop} failures in a row came after step {this.step}, on {places} (--crash-loop)"
        return _Row(row, words)
    return None


def _is_this_nodes(policy: RestartPolicy, row: tuple[Failure, ...]) -> bool:
    """Whether a row of failures is a matter of one node, which the user will rather do without."""
    return policy.crash_loop_excludes and len({each.node for each in row}) == 1


def _with_blame(
    restart: Restart, policy: RestartPolicy, history: History, this: Failure, *, rule: ExitRule | None, row: _Row | None
) -> Restart:
    """The restart, with what becomes of the node on which the worker failed."""
    count = history.failed_on(this.node, policy, this.at) + 1
    why: str | None = None
    if rule is not None and rule.action is Action.EXCLUDE:
        why = f"--on-exit {rule.text}"
    elif row is not None:
        why = row.words
    elif policy.exclude_after and count >= policy.exclude_after:
        why = f"{count} failure{'s' if count > 1 else ''} on it (--exclude-node-after {policy.exclude_after})"
    exclusion = None if why is None or this.node in history.kept_out else Exclusion(this.node, why)
    reason = restart.reason if exclusion is None else f"{restart.reason}; {exclusion}"
    check = bool(policy.check_after) and count % policy.check_after == 0
    return replace(restart, reason=reason, exclusion=exclusion, check=check)


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
