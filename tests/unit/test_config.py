"""Settings are checked once, when they are made, in relation to each other."""

from __future__ import annotations

import pytest

from elastic_adapter.core.config import STDERR, STDOUT, JobConfig, NodeConfig, OutputConfig, default_level
from elastic_adapter.core.model import Level
from elastic_adapter.core.restart import RestartPolicy


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_nodes": 0}, "nodes must be 1 <= MIN <= MAX, got 0:1"),
        ({"min_nodes": 3, "max_nodes": 2}, "nodes must be 1 <= MIN <= MAX, got 3:2"),
        (
            {"level": Level.OFF, "policy": RestartPolicy(3)},
            r"fault-tolerance level 0 \(off\) contradicts max_restarts=3",
        ),
        ({"quiet_s": -1.0}, "quiet_s must not be negative, got -1.0"),
        ({"drain_s": -0.5}, "drain_s must not be negative, got -0.5"),
        ({"hold_timeout_s": 0.0}, "hold_timeout_s must be above 0 or None, got 0.0"),
    ],
)
def test_job_config_refuses(settings, words):
    """A job whose settings contradict each other can't be made, and the message names the setting."""
    with pytest.raises(ValueError, match=words):
        JobConfig("job", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"min_nodes": 2, "max_nodes": 2},
        {"quiet_s": 0.0, "drain_s": 0.0},
        {"hold_timeout_s": 0.1},
        {"level": Level.OFF},
    ],
)
def test_job_config_allows(settings):
    """The edges of what is allowed are allowed."""
    assert JobConfig("job", **settings).job_id == "job"


@pytest.mark.parametrize(
    ("nodes", "level"), [((1, 1), Level.FAULT_TOLERANT), ((4, 4), Level.FAULT_TOLERANT), ((1, 2), Level.ELASTIC)]
)
def test_default_level(nodes, level):
    """A range of nodes asks for an elastic job."""
    assert default_level(*nodes) == level


def node_config(slots=2, *, entries=2, **settings):
    output = OutputConfig(to_console=(STDOUT,) * entries, to_file=(STDERR,) * entries)
    return NodeConfig(node="a", address="a.example", slots=slots, output=output, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"slots": 0, "entries": 0}, "slots must be 1 or more, got 0"),
        ({"grace_s": -1.0}, "grace_s must not be negative, got -1.0"),
        ({"slots": 3}, "to_console and to_file must have one entry per slot"),
        ({"cpus": (frozenset({0}),)}, "cpus must be empty or have one entry per slot"),
    ],
)
def test_node_config_refuses(settings, words):
    """A node's settings must fit its slots."""
    with pytest.raises(ValueError, match=words):
        node_config(**settings)


def test_node_config_allows():
    """Output and CPUs with one entry per slot fit."""
    assert node_config(cpus=(frozenset({0}), frozenset({1})), grace_s=0.0).slots == 2
