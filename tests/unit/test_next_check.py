"""When ranks of another launcher agree on whether it is time to save: every two seconds or so, at a step that all know."""

import pytest

from elastic_adapter.core.checkpoint.own_link import next_check


@pytest.mark.parametrize(
    ("done", "now", "last", "expected"),
    [
        (1, 5.0, None, 2),
        # A tenth of a second for each step.
        (11, 6.0, (1, 5.0), 31),
        # Ten seconds for each step.
        (2, 15.0, (1, 5.0), 3),
        # A millionth of a second: some bound is needed, the next steps may be slow.
        (1001, 5.001, (1, 5.0), 1001 + 10_000),
        (11, 5.0, (1, 5.0), 11 + 10_000),
        # The loop began anew.
        (1, 6.0, (500, 5.0), 2),
    ],
)
def test_next_check(done, now, last, expected):
    """By how fast the steps went since the last time; always after this one."""
    assert next_check(done, now, last) == expected
