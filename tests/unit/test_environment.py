"""The neutral variables that every worker gets."""

from __future__ import annotations

from dataclasses import replace

from elastic_adapter.core.environment import neutral_env
from elastic_adapter.core.model import CheckpointRef, Seat
from elastic_adapter.core.testing import world_of

ASSIGNMENT = replace(world_of("a", "b", slots=2, generation=3), restart_count=1).assignment("b")
SEAT = Seat(assignment=ASSIGNMENT, local_rank=1, job_id="job", node="b", max_restarts=5)


def test_a_worker_is_told_its_place():
    """All of a worker's place in the world is there, as text."""
    assert neutral_env(SEAT) == {
        "ELASTIC_JOB_ID": "job",
        "ELASTIC_NODE": "b",
        "ELASTIC_NODE_RANK": "1",
        "ELASTIC_NODES": "2",
        "ELASTIC_RANK": "3",
        "ELASTIC_WORLD_SIZE": "4",
        "ELASTIC_LOCAL_RANK": "1",
        "ELASTIC_LOCAL_WORLD_SIZE": "2",
        "ELASTIC_GENERATION": "3",
        "ELASTIC_RESTART_COUNT": "1",
        "ELASTIC_MAX_RESTARTS": "5",
        "ELASTIC_MASTER_ADDR": "a.example",
        "ELASTIC_MASTER_PORT": "29500",
    }


def test_a_worker_is_told_where_to_resume():
    """Only where there is a checkpoint to resume from, a worker is told of it."""
    resume = CheckpointRef(step=40, generation=2, uri="file:///ckpt/40")
    env = neutral_env(replace(SEAT, assignment=replace(ASSIGNMENT, resume_from=resume)))
    assert (env["ELASTIC_RESUME_STEP"], env["ELASTIC_RESUME_FROM"]) == ("40", "file:///ckpt/40")
    assert not any(name.startswith("ELASTIC_RESUME") for name in neutral_env(SEAT))
