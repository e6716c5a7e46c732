"""Who takes part in the next world, and from when on. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.levels import bounds
from elastic_adapter.core.model import Member, World


@dataclass(frozen=True, slots=True)
class Settled:
    """These members form the next world now."""

    members: tuple[Member, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not yet: look again at ``until``, or, if that is None, when a member joins."""

    until: float | None
    reason: str


Settlement: TypeAlias = Settled | Waiting


def settle(
    members: tuple[Member, ...], config: JobConfig, previous: World | None, since: float, now: float
) -> Settlement:
    """Decide whether the members present can form a world. ``since`` is the time of the last join.

    A first world below the maximum waits for the quiet time, so that nodes that start together make
    one world. Survivors of a loss re-form at once: every second they wait is lost training.
    """
    low, high = bounds(config, previous)
    count = len(members)
    if count >= high:
        return Settled(_choose(members, previous, high), f"{high} of {high} nodes are here")
    if count < low:
        return Waiting(None, f"{count} of at least {low} nodes are here")
    if previous is not None:
        return Settled(_choose(members, previous, high), f"{count} nodes are left, at least {low} are needed")
    until = since + config.quiet_s
    if now < until:
        return Waiting(until, f"{count} of {low} to {high} nodes are here; waiting {config.quiet_s:g} s for more")
    return Settled(_choose(members, previous, high), f"{count} nodes are here and none joined for {config.quiet_s:g} s")


def _choose(members: tuple[Member, ...], previous: World | None, most: int) -> tuple[Member, ...]:
    """Those who have a place keep it; then first come, first served."""
    placed = frozenset(previous.nodes) if previous is not None else frozenset()
    return tuple(sorted(members, key=lambda member: (member.node not in placed, member.order)))[:most]
