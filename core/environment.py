"""The neutral variables that every worker gets, whatever its framework. Pure."""

from __future__ import annotations

from elastic_adapter.core.model import Seat


def neutral_env(seat: Seat) -> dict[str, str]:
    """ELASTIC_*: a worker's place in the world, in no framework's words."""
    assignment = seat.assignment
    env = {
        "ELASTIC_JOB_ID": seat.job_id,
        "ELASTIC_NODE": seat.node,
        "ELASTIC_NODE_RANK": str(assignment.group_rank),
        "ELASTIC_NODES": str(assignment.group_size),
        "ELASTIC_RANK": str(seat.rank),
        "ELASTIC_WORLD_SIZE": str(assignment.world_size),
        "ELASTIC_LOCAL_RANK": str(seat.local_rank),
        "ELASTIC_LOCAL_WORLD_SIZE": str(assignment.slots),
        "ELASTIC_GENERATION": str(assignment.generation),
        "ELASTIC_RESTART_COUNT": str(assignment.restart_count),
        "ELASTIC_MAX_RESTARTS": str(seat.max_restarts),
        "ELASTIC_MASTER_ADDR": assignment.master.host,
        "ELASTIC_MASTER_PORT": str(assignment.master.port),
    }
    if seat.notices:
        env["ELASTIC_NOTICES"] = seat.notices
    if assignment.resume_from is not None:
        env["ELASTIC_RESUME_STEP"] = str(assignment.resume_from.step)
        env["ELASTIC_RESUME_FROM"] = assignment.resume_from.uri
    return env
