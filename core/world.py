"""Who gets which ranks. Pure."""

from __future__ import annotations

from elastic_adapter.core.model import CheckpointRef, Endpoint, Member, Placement, World


def seating(members: tuple[Member, ...], previous: World | None) -> tuple[Member, ...]:
    """The members in the order of their ranks.

    Survivors keep their order; newcomers take the places of those who are gone, in the order in which
    they came, and the rest follow behind.
    """
    by_node = {member.node: member for member in members}
    places = previous.nodes if previous is not None else ()
    newcomers = iter(
        sorted((member for member in members if member.node not in places), key=lambda member: member.order)
    )
    seated = [by_node[node] if node in by_node else next(newcomers, None) for node in places]
    return (*(member for member in seated if member is not None), *newcomers)


def plan(
    seated: tuple[Member, ...],
    previous: World | None,
    *,
    restart_count: int,
    reason: str,
    resume_from: CheckpointRef | None = None,
    start_delay_s: float = 0.0,
) -> World:
    """The next world of these members, seated in this order. The first one offers the master's port."""
    placements: list[Placement] = []
    offset = 0
    for member in seated:
        placements.append(Placement(member.node, member.address, member.slots, offset, member.control))
        offset += member.slots
    return World(
        generation=previous.generation + 1 if previous is not None else 1,
        restart_count=restart_count,
        placements=tuple(placements),
        master=Endpoint(seated[0].address, seated[0].ports[0]),
        reason=reason,
        resume_from=resume_from,
        start_delay_s=start_delay_s,
    )
