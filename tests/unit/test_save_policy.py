"""When a checkpoint is due, and what its step is."""

from __future__ import annotations

import re
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_adapter.core.checkpoint.policy import (
    Saved,
    SavePolicy,
    due,
    due_by_minutes,
    due_by_steps,
    steps_done,
    whole,
)
from elastic_adapter.core.errors import UserError

# A busy machine is no failure.
LIMITS = settings(deadline=None, derandomize=True, database=None)

START = Saved(0, 0.0)
BOTH = SavePolicy(every_steps=10, every_minutes=2)


@pytest.mark.parametrize(
    ("policy", "done", "last", "now", "reason"),
    [
        (SavePolicy(), 1000, START, 1e9, None),
        (SavePolicy(every_steps=1), 1, START, 0.0, "1 step done (every_steps=1)"),
        (SavePolicy(every_steps=10), 0, START, 0.0, None),
        (SavePolicy(every_steps=10), 9, START, 1e9, None),
        (SavePolicy(every_steps=10), 10, START, 0.0, "10 steps done (every_steps=10)"),
        (SavePolicy(every_steps=10), 11, START, 0.0, None),
        (SavePolicy(every_minutes=2), 7, START, 119.9, None),
        (SavePolicy(every_minutes=2), 7, START, 120.0, "2.0 minutes since the last save (every_minutes=2)"),
        (
            SavePolicy(every_minutes=0.5),
            7,
            Saved(6, 100.0),
            145.0,
            "0.8 minutes since the last save (every_minutes=0.5)",
        ),
        (SavePolicy(every_minutes=2), 7, Saved(7, 0.0), 1e9, None),
        (BOTH, 10, Saved(9, 1.0), 2.0, "10 steps done (every_steps=10)"),
        (BOTH, 13, Saved(10, 0.0), 119.0, None),
        (BOTH, 13, Saved(10, 0.0), 121.0, "2.0 minutes since the last save (every_minutes=2)"),
    ],
)
def test_due(policy, done, last, now, reason):
    """By steps, by minutes, or by whichever comes first; the reason says which."""
    assert due(policy, done, last, now) == reason


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"every_steps": 0}, "every_steps must be a whole number of at least 1, or None, got 0"),
        ({"every_steps": 1.5}, "every_steps must be a whole number of at least 1, or None, got 1.5"),
        ({"every_steps": True}, "every_steps must be a whole number of at least 1, or None, got True"),
        ({"every_minutes": 0}, "every_minutes must be above 0, or None, got 0"),
        ({"every_minutes": "30"}, "every_minutes must be above 0, or None, got '30'"),
        ({"every_minutes": float("nan")}, "every_minutes must be above 0, or None, got nan"),
        ({"every_minutes": float("inf")}, "every_minutes must be above 0, or None, got inf"),
        ({"keep_last": 0}, "keep_last must be a whole number of at least 1, or None, got 0"),
        ({"keep_last": 3, "keep_every": -1}, "keep_every must be a whole number of at least 1, or None, got -1"),
        ({"keep_every": 100}, "keep_every=100 has no meaning without keep_last: all are kept"),
    ],
)
def test_policy_refuses_nonsense(values, words):
    """In one line, when it is made."""
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        SavePolicy(**values)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("x" * 10**6, "at least 0, got '" + "x" * 49 + "..."),
        ([1] * 10**6, "at least 0, got a value of the type list"),
        (OrderedDict(a=[1]), "at least 0, got a value of the type OrderedDict"),
        (10**400, f"at most 17 digits, got 1{'0' * 49}..."),
        (10**5000, "at most 17 digits, got a number of too many digits to write down"),
    ],
    ids=["text", "list", "dict", "number", "longer number"],
)
def test_a_step_that_is_too_long_to_be_shown(step, words):
    """What is said of it is a line."""
    with pytest.raises(UserError, match=rf"^step must be a (whole )?number of {re.escape(words)}$"):
        whole(step)


@LIMITS
@given(every=st.integers(1, 50), total=st.integers(1, 200), crashes=st.lists(st.integers(0, 200), max_size=5))
def test_no_step_is_lost_or_done_twice(every, total, crashes):
    """Turns of the loop as of the checkpoints, whatever crashes between them: each one once, in order."""
    policy = SavePolicy(every_steps=every)
    # The turns that a checkpoint holds, and its step.
    saved, restored = [], 0
    for crash in (*crashes, total):
        turns = list(saved)
        for step in range(restored, min(crash, total)):
            turns.append(step)
            done = steps_done(step)
            if due_by_steps(policy, done):
                saved, restored = list(turns), done
            assert turns == list(range(done))
    assert restored == total // every * every == len(saved)
    assert turns == list(range(total))


@LIMITS
@given(st.integers(1, 50), st.integers(0, 500), st.integers(0, 500), st.floats(0, 1e9), st.floats(0, 1e9))
def test_ranks_agree_by_steps(every, done, last, at, now):
    """Whatever each of them saved last, and whatever its clock shows."""
    policy = SavePolicy(every_steps=every)
    assert due(policy, done, Saved(last, at), now) == due_by_steps(policy, done)
    assert due_by_minutes(policy, done, Saved(last, at), now) is None
