"""When an agent that is cut off must end its workers."""

import pytest

from elastic_adapter.core.isolation import Contact, stop
from elastic_adapter.core.state import KILL_S

LEASE_S = 5.0


def contact(*, linked=True, etcd=False, acked_at=100.0, isolation_s=600.0):
    return Contact(linked, etcd, acked_at, LEASE_S, isolation_s)


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("isolation_s", [0.0, 600.0])
def test_whoever_reaches_etcd_goes_on(linked, isolation_s):
    """Without a stream it waits for another leader; its lease speaks for it."""
    assert stop(contact(linked=linked, etcd=True, isolation_s=isolation_s), 9999.0) is None


@pytest.mark.parametrize("isolation_s", [0.0, 600.0])
def test_whoever_lost_both_stops_at_once(isolation_s):
    """The signal now; the kill a second before the lease can end elsewhere."""
    due = stop(contact(linked=False, isolation_s=isolation_s), 101.5)
    assert (due.begin, due.kill_by) == (101.5, 104.0)


def test_who_notices_late_kills_at_once():
    """There is no grace left when the lease may be over."""
    due = stop(contact(linked=False), 130.0)
    assert (due.begin, due.kill_by) == (130.0, 130.0)


def test_a_world_that_is_whole_trains_on_for_the_isolation_timeout():
    """And is dead before a new leader's patience with it is over: that begins when the lease ends."""
    due = stop(contact(), 101.0)
    assert due.begin == 700.0
    assert due.begin < due.kill_by < 100.0 + LEASE_S + 600.0 + KILL_S
    assert "600 s" in due.reason


@pytest.mark.parametrize("isolation_s", [0.0, 3.0, LEASE_S - 1])
def test_without_isolation_nobody_outlives_its_lease(isolation_s):
    """Strict: the workers are dead before the lease can end, although the stream stands."""
    due = stop(contact(isolation_s=isolation_s), 101.0)
    assert 100.0 < due.begin < due.kill_by <= 100.0 + LEASE_S - 1


@pytest.mark.parametrize("isolation_s", [0.0, 4.0, 4.1, 6.0, 600.0])
@pytest.mark.parametrize("linked", [True, False])
def test_nobody_outlives_the_patience_of_a_new_leader(linked, isolation_s):
    """A new leader waits for the isolation timeout and the time to kill, from the end of the lease on."""
    now = 101.0
    due = stop(contact(linked=linked, isolation_s=isolation_s), now)
    assert due.kill_by < 100.0 + LEASE_S + isolation_s + KILL_S
