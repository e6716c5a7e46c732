"""Who gets which ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_adapter.core.model import CheckpointRef, Endpoint
from elastic_adapter.core.testing import member, members, world_of
from elastic_adapter.core.world import plan, seating


@pytest.mark.parametrize(
    ("previous", "here", "seats"),
    [
        pytest.param("", "bca", "bca", id="the first world: in the order of joining"),
        pytest.param("ab", "ab", "ab", id="the same nodes"),
        pytest.param("ba", "ab", "ba", id="places count more than the order of joining"),
        pytest.param("abc", "ac", "ac", id="survivors move up"),
        pytest.param("abc", "acd", "adc", id="a replacement takes the lost one's place"),
        pytest.param("abc", "bcd", "dbc", id="a replacement takes the first place"),
        pytest.param("abcd", "bdef", "ebfd", id="replacements in the order of joining"),
        pytest.param("abcd", "bde", "ebd", id="fewer replacements than places"),
        pytest.param("ab", "abdc", "abdc", id="newcomers follow behind"),
        pytest.param("abc", "acde", "adce", id="one replaces, one follows"),
        pytest.param("ab", "cd", "cd", id="nobody is left"),
    ],
)
def test_seating(previous, here, seats):
    """Survivors keep their order, newcomers fill the gaps and then follow behind."""
    before = world_of(*previous) if previous else None
    assert "".join(each.node for each in seating(members(*here), before)) == seats


NODES = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1)


@settings(derandomize=True, deadline=None, database=None, max_examples=100)
@given(previous=NODES, here=NODES)
def test_seating_keeps_everybody(previous, here):
    """Everybody present has one seat, and survivors are in the same order as before."""
    seats = [each.node for each in seating(members(*here), world_of(*previous))]
    assert sorted(seats) == sorted(here)
    assert [node for node in seats if node in previous] == [node for node in previous if node in here]


def test_plan_of_the_first_world():
    """The first world is generation 1; ranks follow the slots; the first node offers the master's port."""
    seated = (member("a", slots=2, ports=(7, 8)), member("b", slots=1, ports=(9,)))
    world = plan(seated, None, restart_count=0, reason="all are here")
    assert (world.generation, world.master, world.reason) == (1, Endpoint("a.example", 7), "all are here")
    assert [(each.node, each.slots, each.rank_offset) for each in world.placements] == [("a", 2, 0), ("b", 1, 2)]


def test_plan_of_the_next_world():
    """The next world has the next number and goes on from the same checkpoint."""
    resume = CheckpointRef(step=40, generation=3, uri="file:///ckpt/40")
    previous = replace(world_of("a", "b", generation=3), resume_from=resume)
    world = plan(
        members("b", ports=(5,)), previous, restart_count=2, reason="a is lost", resume_from=resume, start_delay_s=1.5
    )
    assert (world.generation, world.restart_count, world.start_delay_s) == (4, 2, 1.5)
    assert (world.resume_from, world.nodes) == (resume, ("b",))
