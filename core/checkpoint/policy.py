"""When a checkpoint is due, and why. Pure.

One number says where a training is: the steps **done**. ``ckpt.step(step)`` is called at the end of the loop's turn
``step``, counted from 0, when ``step + 1`` steps are done. That is the checkpoint's step, and it is the step to go on
from, because turns 0 to ``step`` are over:

    for step in range(start, total):    # start = 1000: 0 to 999 are done
        ...
        ckpt.step(step)                 # step = 1999: the checkpoint's step is 2000, and restore() returns 2000
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_adapter.core.errors import UserError

_SECONDS = 60.0
# Folders are named by steps, and have room for one more.
_DIGITS = 17
# So many characters of what was given as a step are shown.
_LONGEST = 50


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When to save and what to keep. Without ``every_...`` a save has to be asked for."""

    every_steps: int | None = None
    every_minutes: float | None = None
    # The newest so many are kept; None: all are.
    keep_last: int | None = None
    # Beyond those, the ones whose step is a multiple of this are kept for ever.
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, or None, got {value!r}")
        minutes = self.every_minutes
        if minutes is not None and not (isinstance(minutes, int | float) and 0 < minutes < float("inf")):
            raise ValueError(f"every_minutes must be above 0, or None, got {minutes!r}")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(f"keep_every={self.keep_every} has no meaning without keep_last: all are kept")


@dataclass(frozen=True, slots=True)
class Saved:
    """The last save, or where this process began, if it has not saved yet."""

    # Steps done as of then.
    step: int
    # By the clock that ``now`` is read from.
    at: float


def steps_done(step: object) -> int:
    """How many steps are done at the end of the loop's turn ``step``: the step of a checkpoint that is taken there."""
    return whole(step) + 1


def whole(step: Any) -> int:
    """A step as a number, whatever it was counted with. Raises UserError for what is none."""
    try:
        number = int(step)
        fine = number == step and number >= 0 and not isinstance(step, bool)
    except (TypeError, ValueError, OverflowError, RuntimeError, AssertionError):
        fine = False
    if not fine:
        raise UserError(f"step must be a whole number of at least 0, got {shown(step)}")
    if number >= 10**_DIGITS:
        raise UserError(f"step must be a number of at most {_DIGITS} digits, got {shown(step)}")
    return number


def shown(step: object) -> str:
    """What was given as a step, as part of a line: whatever it is, and however large."""
    # To write one down may take far longer than to read it, where a list is in it twice that has another one twice.
    if isinstance(step, list | tuple | set | frozenset | Mapping):
        return f"a value of the type {type(step).__name__}"
    try:
        words = " ".join(repr(step).split())
    except ValueError:
        return "a number of too many digits to write down"
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."


def due(policy: SavePolicy, done: int, last: Saved, now: float) -> str | None:
    """Why a save is due now that so many steps are done; None: it isn't.

    What it says by steps is the same on every rank. What it says by minutes is a matter of one clock: ask on one rank,
    and tell the others.
    """
    return due_by_steps(policy, done) or due_by_minutes(policy, done, last, now)


def due_by_steps(policy: SavePolicy, done: int) -> str | None:
    """Of nothing but the number of steps, so that all ranks agree without a word."""
    if policy.every_steps is None or done < 1 or done % policy.every_steps:
        return None
    return f"{done} step{'s' if done > 1 else ''} done (every_steps={policy.every_steps})"


def due_by_minutes(policy: SavePolicy, done: int, last: Saved, now: float) -> str | None:
    """By the time since the last save, if there was a step since."""
    if policy.every_minutes is None or done == last.step:
        return None
    minutes = (now - last.at) / _SECONDS
    if minutes < policy.every_minutes:
        return None
    return f"{minutes:.1f} minutes since the last save (every_minutes={policy.every_minutes:g})"
