"""What each fault-tolerance level allows."""

from __future__ import annotations

import pytest

from elastic_adapter.core.levels import admits, bounds, grows, survives_loss
from elastic_adapter.core.model import Level
from elastic_adapter.core.testing import job_config, world_of

OFF, TOLERANT, ELASTIC = Level.OFF, Level.FAULT_TOLERANT, Level.ELASTIC


@pytest.mark.parametrize(
    ("level", "previous", "expected"),
    [
        (OFF, "", (1, 4)),
        (TOLERANT, "", (1, 4)),
        (ELASTIC, "", (1, 4)),
        (OFF, "ab", (2, 2)),
        (TOLERANT, "ab", (2, 2)),
        (ELASTIC, "ab", (1, 4)),
    ],
)
def test_bounds(level, previous, expected):
    """The first world may have any size; after it, only an elastic job changes size."""
    assert bounds(job_config(level, (1, 4)), world_of(*previous) if previous else None) == expected


@pytest.mark.parametrize(
    ("level", "started", "expected"),
    [(OFF, False, True), (OFF, True, False), (TOLERANT, True, True), (ELASTIC, True, True)],
)
def test_admits(level, started, expected):
    """Only at level 0 the door is closed after the start."""
    assert admits(job_config(level), world_of("a") if started else None) is expected


@pytest.mark.parametrize(
    ("level", "size", "expected"),
    [(OFF, 1, False), (TOLERANT, 1, False), (ELASTIC, 1, True), (ELASTIC, 2, False)],
)
def test_grows(level, size, expected):
    """Only an elastic job below its maximum replaces a world that runs well."""
    assert grows(job_config(level, (1, 2)), world_of(*"ab"[:size])) is expected


@pytest.mark.parametrize(("level", "expected"), [(OFF, False), (TOLERANT, True), (ELASTIC, True)])
def test_survives_loss(level, expected):
    """From level 1 on the job goes on after a loss."""
    assert survives_loss(job_config(level)) is expected
