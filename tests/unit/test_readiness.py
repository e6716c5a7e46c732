"""When a generation is past its start, from what can be seen of it."""

import pytest

from elastic_adapter.core.readiness import idle_cpus, past_the_start


@pytest.mark.parametrize(
    ("running_s", "resting_s", "joined_s", "past"),
    [
        (0.5, 0.0, None, False),
        (1.9, 1.9, None, False),
        (2.5, 0.5, None, False),
        (2.5, 1.0, None, True),
        (14.9, 0.0, None, False),
        (15.0, 0.0, None, True),
        (3.0, 0.0, 0.0, False),
        (3.0, 0.25, 0.0, True),
        (5.0, 0.0, 2.9, False),
        (5.0, 0.0, 3.0, True),
    ],
)
def test_past_the_start(running_s, resting_s, joined_s, past):
    """A group that has formed counts at the first rest or after 3 s; without a group, a longer rest or 15 s."""
    assert past_the_start(running_s, resting_s, joined_s) is past


def test_idle_cpus(monkeypatch):
    """Half the ticks of two CPUs idle is one idle CPU; no ticks is none."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert idle_cpus((100, 200), (150, 300)) == 1.0
    assert idle_cpus((100, 200), (100, 200)) == 0.0
