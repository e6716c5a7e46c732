"""The values everything else is made of."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from elastic_adapter.core.model import (
    Assignment,
    CheckpointRef,
    Endpoint,
    Failed,
    Peer,
    Seat,
    Stopped,
    Succeeded,
    exit_status,
    signal_name,
)
from elastic_adapter.core.testing import exit_of, world_of


@pytest.mark.parametrize(
    ("code", "signal", "status"),
    [(0, None, 0), (7, None, 7), (255, None, 255), (None, 9, 137), (None, 15, 143)],
)
def test_exit_status(code, signal, status):
    """A status is the code itself, or 128 + the signal's number."""
    assert exit_status(code, signal) == status
    assert exit_of(0, code, signal=signal).status == status


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (15, "SIGTERM"), (50, "signal 50"), (99, "signal 99")])
def test_signal_name(number, name):
    """A signal without a name of its own is called by its number."""
    assert signal_name(number) == name


@pytest.mark.parametrize(
    ("code", "signal", "ok", "how"),
    [
        (0, None, True, "exited with code 0"),
        (3, None, False, "exited with code 3"),
        (None, 9, False, "was killed by SIGKILL"),
        (None, 42, False, "was killed by signal 42"),
    ],
)
def test_worker_exit(code, signal, ok, how):
    """Only code 0 is well, and the end is told in words."""
    exit = exit_of(0, code, signal=signal)
    assert (exit.ok, exit.how) == (ok, how)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Succeeded(), 0),
        (Failed("a node is lost"), 1),
        (Failed("a worker failed", exit_of(0, 7)), 7),
        (Failed("a worker was killed", exit_of(0, signal=9)), 137),
        (Stopped("interrupted", 2), 130),
        (Stopped("terminated", 15), 143),
    ],
)
def test_outcome_exit_code(outcome, code):
    """The launcher's code is that of the worker that decided, or 128 + the signal that it was stopped with."""
    assert outcome.exit_code == code


def test_world_knows_its_ranks():
    """Each node has its slots' worth of ranks; a stranger has none."""
    world = world_of("a", "b", slots=2)
    assert (world.world_size, world.nodes) == (4, ("a", "b"))
    assert [world.ranks(node) for node in "abx"] == [{0, 1}, {2, 3}, frozenset()]


def test_assignment_is_all_a_node_needs():
    """An assignment has the world's facts and one node's place; of the others where they are."""
    resume = CheckpointRef(step=4, generation=2, uri="file:///4")
    world = replace(world_of("a", "b", slots=2, generation=3), restart_count=1, resume_from=resume, start_delay_s=2.0)
    assert world.assignment("b") == Assignment(
        generation=3,
        restart_count=1,
        group_rank=1,
        group_size=2,
        rank_offset=2,
        slots=2,
        world_size=4,
        master=Endpoint("a.example", 29500),
        reason="a test made it",
        resume_from=resume,
        start_delay_s=2.0,
        peers=(Peer("a.example", 2), Peer("b.example", 2)),
    )


def test_assignment_of_a_stranger():
    """A node without a place has no assignment."""
    with pytest.raises(ValueError, match="not in tuple"):
        world_of("a").assignment("b")


def test_seat_has_a_rank():
    """A worker's rank is its node's first rank and its place on the node."""
    seat = Seat(world_of("a", "b", slots=3).assignment("b"), local_rank=2, job_id="job", node="b", max_restarts=0)
    assert seat.rank == 5


def test_values_do_not_change():
    """A world that was sent can't be changed behind anybody's back."""
    with pytest.raises(FrozenInstanceError):
        world_of("a").generation = 2
