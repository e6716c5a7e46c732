"""What the fault-tolerance level allows. Pure; one small question per function."""

from __future__ import annotations

from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.model import Level, World


def bounds(config: JobConfig, previous: World | None) -> tuple[int, int]:
    """The smallest and the largest number of nodes that the next world may have.

    The first world may have any size that the job allows. After it, only an elastic job changes size:
    the others keep the one they started with.
    """
    if previous is None or config.level >= Level.ELASTIC:
        return config.min_nodes, config.max_nodes
    size = len(previous.placements)
    return size, size


def admits(config: JobConfig, previous: World | None) -> bool:
    """Whether a node that was not there at the start may come in at all."""
    return previous is None or config.level != Level.OFF


def grows(config: JobConfig, previous: World) -> bool:
    """Whether a newcomer is a reason to replace a world that runs well."""
    return config.level >= Level.ELASTIC and len(previous.placements) < config.max_nodes


def survives_loss(config: JobConfig) -> bool:
    """Whether the job goes on after a node with unfinished workers is gone."""
    return config.level != Level.OFF
