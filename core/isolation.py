"""When an agent that is cut off must end its workers. Pure.

A world whose members are all together may train on while etcd is out of reach, for as long as nobody else can have
replaced it. Whoever has lost the others, too, can only hang, and must be gone before its lease can end elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_adapter.core.state import KILL_S

# What is kept back of a lease, so that workers are dead before it ends.
MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Contact:
    """What an agent knows of its ties. Times are of its own monotonic clock."""

    # Whether its stream to the coordinator stands.
    linked: bool
    # Whether etcd answered when it was last asked.
    etcd_answers: bool
    # When the last keep-alive that was answered had been sent.
    acked_at: float
    lease_s: float
    isolation_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Workers get the signal at ``begin`` and are killed at the latest at ``kill_by``."""

    begin: float
    kill_by: float
    reason: str


def stop(contact: Contact, now: float) -> Stop | None:
    """What is due if nothing changes; None: nothing is."""
    if contact.etcd_answers:
        return None
    lease_end = contact.acked_at + contact.lease_s - MARGIN_S
    if not contact.linked:
        return Stop(now, max(now, lease_end), "the coordinator and etcd are both out of reach")
    if contact.isolation_s <= contact.lease_s - MARGIN_S:
        # Half of what is left is for asking again, the other half for ending in good order.
        begin = contact.acked_at + (contact.lease_s - MARGIN_S) / 2
        allowed = f"--isolation-timeout {contact.isolation_s:g} is no longer than the lease"
        return Stop(begin, lease_end, f"etcd is out of reach, and {allowed}")
    begin = contact.acked_at + contact.isolation_s
    reason = f"etcd has been out of reach for {contact.isolation_s:g} s (--isolation-timeout)"
    return Stop(begin, begin + KILL_S - MARGIN_S, reason)
