"""Whether a failed worker means another generation or the end."""

from __future__ import annotations

import pytest

from elastic_adapter.core.model import Level
from elastic_adapter.core.restart import GiveUp, History, Restart, RestartPolicy, decide
from elastic_adapter.core.testing import exit_of

OFF, TOLERANT, ELASTIC = Level.OFF, Level.FAULT_TOLERANT, Level.ELASTIC


@pytest.mark.parametrize(
    ("level", "allowed", "spent", "decision"),
    [
        (OFF, 0, 0, GiveUp("rank 2 on b exited with code 7; fault tolerance is off (level 0)")),
        (TOLERANT, 0, 0, GiveUp("rank 2 on b exited with code 7; no restarts are allowed (--max-restarts 0)")),
        (TOLERANT, 2, 0, Restart("rank 2 on b exited with code 7; restart 1 of 2")),
        (TOLERANT, 2, 1, Restart("rank 2 on b exited with code 7; restart 2 of 2")),
        (TOLERANT, 2, 2, GiveUp("rank 2 on b exited with code 7; all 2 restarts are used up")),
        (TOLERANT, 2, 3, GiveUp("rank 2 on b exited with code 7; all 2 restarts are used up")),
        (ELASTIC, 1, 0, Restart("rank 2 on b exited with code 7; restart 1 of 1")),
        (ELASTIC, 1, 1, GiveUp("rank 2 on b exited with code 7; all 1 restarts are used up")),
    ],
)
def test_decide(level, allowed, spent, decision):
    """A failure is worth a restart while the level allows it and the budget lasts; the reason says which."""
    history = History(charged=(0.0,) * spent)
    assert decide(level, RestartPolicy(allowed), history, exit_of(2, 7, node="b")) == decision


def test_decide_names_the_signal():
    """A worker that was killed is not said to have exited."""
    decision = decide(TOLERANT, RestartPolicy(1), History(), exit_of(0, signal=9))
    assert decision.reason == "rank 0 on a was killed by SIGKILL; restart 1 of 1"


@pytest.mark.parametrize(
    ("level", "allowed", "code", "kind", "charged"),
    [
        (TOLERANT, 0, 101, Restart, False),
        (ELASTIC, 3, 102, Restart, False),
        (ELASTIC, 3, 100, Restart, True),
        (TOLERANT, 0, 100, GiveUp, None),
        (OFF, 0, 101, GiveUp, None),
    ],
)
def test_codes_that_ask_for_a_restart(level, allowed, code, kind, charged):
    """They are granted whatever is left of the budget, and not charged; but where nothing restarts, nor do they."""
    decision = decide(level, RestartPolicy(allowed, free_codes=(101, 102)), History(), exit_of(0, code))
    assert isinstance(decision, kind)
    assert getattr(decision, "charged", None) == charged


def test_history_remembers_when():
    """A charge adds its time behind the earlier ones and leaves the old history as it was."""
    old = History((1.0,))
    assert (old.charge(5.0), old.charge(5.0).count, old.count) == (History((1.0, 5.0)), 2, 1)


def test_policy_refuses_a_negative_budget():
    """There is no word for unlimited: a negative number is a mistake."""
    with pytest.raises(ValueError, match="max_restarts must be 0 or more, got -1"):
        RestartPolicy(-1)
