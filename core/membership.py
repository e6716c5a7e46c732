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
    members: tuple[Member, ...],
    config: JobConfig,
    previous: World | None,
    since: float,
    now: float,
    *,
    excluded: frozenset[str] = frozenset(),
) -> Settlement:
    """Decide whether the members present can form a world. ``since`` is the time of the last join.

    A first world below the maximum waits for the quiet time, so that nodes that start together make
    one world. Survivors of a loss re-form at once: every second they wait is lost training.
    Those who are excluded are taken as a last resort: only as many as are needed.
    """
    low, high = bounds(config, previous)
    welcome = tuple(member for member in members if member.node not in excluded)
    count = len(welcome)
    if len(members) < low:
        return Waiting(None, f"{len(members)} of at least {low} nodes are here")
    if count < low:
        last_resort = _choose(tuple(each for each in members if each.node in excluded), previous, low - count)
        names = ", ".join(each.node for each in last_resort)
        return Settled((*welcome, *last_resort), f"{low} nodes are needed: {names}, though excluded, is taken as well")
    if count >= high:
        return Settled(_choose(welcome, previous, high), f"{high} of {high} nodes are here")
    if previous is not None:
        return Settled(welcome, f"{count} nodes are left, at least {low} are needed")
    until = since + config.quiet_s
    if now < until:
        return Waiting(until, f"{count} of {low} to {high} nodes are here; waiting {config.quiet_s:g} s for more")
    return Settled(welcome, f"{count} nodes are here and none joined for {config.quiet_s:g} s")


def _choose(members: tuple[Member, ...], previous: World | None, most: int) -> tuple[Member, ...]:
    """Those who have a place keep it; then first come, first served."""
    placed = frozenset(previous.nodes) if previous is not None else frozenset()
    return tuple(sorted(members, key=lambda member: (member.node not in placed, member.order)))[:most]
