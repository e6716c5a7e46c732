"""Who takes part in the next world, and from when on."""

from __future__ import annotations

import pytest

from elastic_adapter.core.membership import Settled, Waiting, settle
from elastic_adapter.core.model import Level
from elastic_adapter.core.testing import job_config, member, members, world_of

TOLERANT, ELASTIC = Level.FAULT_TOLERANT, Level.ELASTIC


def settled(*args):
    """The nodes that are settled on, or the time until which to wait."""
    match settle(*args):
        case Settled(members=chosen, reason=reason):
            assert reason
            return " ".join(each.node for each in chosen)
        case Waiting(until=until, reason=reason):
            assert reason
            return until


@pytest.mark.parametrize(
    ("nodes", "here", "now", "answer"),
    [
        pytest.param((1, 1), "", 99.0, None, id="nobody"),
        pytest.param((2, 4), "a", 99.0, None, id="too few, however long"),
        pytest.param((2, 4), "ab", 10.0, 13.0, id="enough: the quiet time begins"),
        pytest.param((2, 4), "ab", 12.9, 13.0, id="enough: the quiet time goes on"),
        pytest.param((2, 4), "ab", 13.0, "a b", id="enough: the quiet time is over"),
        pytest.param((2, 4), "abcd", 10.0, "a b c d", id="the maximum: at once"),
        pytest.param((2, 2), "ba", 10.0, "b a", id="in the order of joining"),
        pytest.param((1, 2), "abc", 10.0, "a b", id="beyond the maximum: first come, first served"),
    ],
)
def test_first_world(nodes, here, now, answer):
    """The first world waits for the minimum, then for the quiet time, and never for more than the maximum."""
    assert settled(members(*here), job_config(ELASTIC, nodes), None, 10.0, now) == answer


def test_no_quiet_time():
    """Without a quiet time the minimum is enough at once."""
    assert settled(members("a"), job_config(ELASTIC, (1, 4), quiet_s=0.0), None, 10.0, 10.0) == "a"


@pytest.mark.parametrize(
    ("level", "nodes", "here", "answer"),
    [
        pytest.param(TOLERANT, (1, 3), "ab", "a b", id="level 1: all are here"),
        pytest.param(TOLERANT, (1, 3), "a", None, id="level 1: one is missing"),
        pytest.param(TOLERANT, (1, 3), "ac", "a c", id="level 1: a replacement"),
        pytest.param(TOLERANT, (1, 3), "abc", "a b", id="level 1: one more is spare"),
        pytest.param(ELASTIC, (1, 3), "a", "a", id="level 2: fewer, at once"),
        pytest.param(ELASTIC, (1, 3), "abc", "a b c", id="level 2: more, at once"),
        pytest.param(ELASTIC, (2, 3), "a", None, id="level 2: too few"),
        pytest.param(ELASTIC, (1, 3), "cdeb", "b c d", id="level 2: who has a place keeps it"),
    ],
)
def test_later_worlds(level, nodes, here, answer):
    """After the first world nobody waits for the quiet time, and the level says how many are enough."""
    assert settled(members(*here), job_config(level, nodes), world_of("a", "b"), 10.0, 10.0) == answer


@pytest.mark.parametrize(
    ("here", "now", "reason"),
    [
        ("", 0.0, "0 of at least 2 nodes are here"),
        ("ab", 0.0, "2 of 2 to 3 nodes are here; waiting 3 s for more"),
        ("ab", 3.0, "2 nodes are here and none joined for 3 s"),
        ("abc", 0.0, "3 of 3 nodes are here"),
    ],
)
def test_reasons(here, now, reason):
    """The answer says how many are here and how many are needed."""
    assert settle(members(*here), job_config(ELASTIC, (2, 3)), None, 0.0, now).reason == reason


def test_order_counts_not_the_position():
    """First come is by the order of joining, wherever the member stands in the tuple."""
    here = (member("late", order=9), member("early", order=1))
    assert settled(here, job_config(ELASTIC, (1, 1)), None, 0.0, 0.0) == "early"


@pytest.mark.parametrize(
    ("level", "nodes", "here", "excluded", "answer"),
    [
        pytest.param(ELASTIC, (1, 3), "abc", "b", "a c", id="enough others"),
        pytest.param(ELASTIC, (2, 3), "ab", "b", "a b", id="too few others"),
        pytest.param(ELASTIC, (2, 3), "abc", "bc", "a b", id="no more than are needed"),
        pytest.param(ELASTIC, (2, 3), "abd", "a", "b d", id="a newcomer rather"),
        pytest.param(ELASTIC, (3, 3), "ab", "b", None, id="not even with it"),
        pytest.param(TOLERANT, (1, 3), "abc", "a", "b c", id="level 1: a spare takes its place"),
        pytest.param(TOLERANT, (1, 3), "ab", "a", "b a", id="level 1: without a spare it stays"),
    ],
)
def test_who_is_excluded_is_a_last_resort(level, nodes, here, excluded, answer):
    """Whoever is excluded is taken only where there would be too few without it."""
    chosen = settle(
        members(*here), job_config(level, nodes), world_of("a", "b"), 10.0, 10.0, excluded=frozenset(excluded)
    )
    nodes = " ".join(each.node for each in chosen.members) if isinstance(chosen, Settled) else None
    assert nodes == answer
    if set(answer or "") & set(excluded):
        assert "though excluded" in chosen.reason
