"""Whether a failed worker means another generation or the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_adapter.core.model import Level
from elastic_adapter.core.ports import Record
from elastic_adapter.core.restart import (
    Action,
    Backoff,
    Exclusion,
    ExitRule,
    GiveUp,
    History,
    Ignore,
    Restart,
    RestartPolicy,
    decide,
    failure_of,
)
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


def exited(code=1, *, rank=0, node="a", signal=None, age_s=1.0, error="", detail="", step=None, hang=""):
    exit = exit_of(rank, code, signal=signal, node=node)
    return replace(exit, age_s=age_s, error=error, detail=detail, step=step, hang=hang)


def after(policy, *exits):
    """The history of a job in which these failed one after the other, a second apart."""
    history = History()
    for at, exit in enumerate(exits):
        history = history.remember(failure_of(policy, exit, float(at))).charge(float(at))
    return history


def rule(action, *codes, signals=()):
    return ExitRule(range(codes[0], codes[-1] + 1) if codes else range(0), signals, action, "as written")


class TestWindow:
    """Restarts that are long ago no longer count."""

    POLICY = RestartPolicy(2, window_s=60.0)

    @pytest.mark.parametrize(
        ("charged", "now", "kind"),
        [
            ((), 0.0, Restart),
            ((0.0, 10.0), 20.0, GiveUp),
            ((0.0, 10.0), 60.5, Restart),
            ((0.0, 10.0, 65.0), 69.0, GiveUp),
            ((0.0, 10.0, 65.0), 70.5, Restart),
        ],
    )
    def test_decide(self, charged, now, kind):
        """Those within the window are counted, and no others."""
        assert isinstance(decide(TOLERANT, self.POLICY, History(charged), exit_of(0, signal=9), now), kind)

    def test_words(self):
        """What is counted, and within what time, is told."""
        decision = decide(TOLERANT, self.POLICY, History((0.0, 50.0)), exit_of(0, signal=9), 70.0)
        assert decision.reason == "rank 0 on a was killed by SIGKILL; restart 2 of 2 within 60 s"
        gone = decide(TOLERANT, self.POLICY, History((60.0, 65.0)), exit_of(0, signal=9), 70.0)
        assert gone.reason == "rank 0 on a was killed by SIGKILL; all 2 restarts within 60 s are used up"


class TestBackoff:
    """Pauses grow, up to a limit, and differ between jobs."""

    @pytest.mark.parametrize(("before", "delay_s"), [(0, 1.0), (1, 2.0), (2, 4.0), (5, 32.0), (6, 60.0), (99999, 60.0)])
    def test_growth(self, before, delay_s):
        """Doubled each time, and never longer than the longest."""
        assert Backoff(1.0, 60.0).delay_s(before, jitter=0.0) == delay_s

    def test_jitter_takes_up_to_a_half_off(self):
        """The pause is between half of it and the whole."""
        assert [Backoff(4.0, 60.0).delay_s(0, jitter) for jitter in (0.0, 0.5, 1.0)] == [4.0, 3.0, 2.0]

    def test_decide(self):
        """The pause is part of the decision and of its words; who asks to be started again does not wait."""
        policy = RestartPolicy(9, backoff=Backoff(1.0, 60.0), free_codes=(101,))
        decision = decide(TOLERANT, policy, History((0.0,)), exit_of(0, signal=9))
        assert (decision.delay_s, decision.reason[-10:]) == (2.0, ", in 2.0 s")
        assert decide(TOLERANT, policy, History((0.0,)), exit_of(0, 101)).delay_s == 0.0

    @pytest.mark.parametrize(("first", "longest"), [(-1.0, 5.0), (5.0, 1.0)])
    def test_nonsense(self, first, longest):
        """A backoff can't be negative or end before it begins."""
        with pytest.raises(ValueError, match="0 <= FIRST <= LONGEST"):
            Backoff(first, longest)


class TestExitRules:
    """What the user wants done about codes and signals."""

    @pytest.mark.parametrize(
        ("rules", "exit", "kind"),
        [
            ((rule(Action.FAIL, 3),), exit_of(0, 3), GiveUp),
            ((rule(Action.FAIL, 3),), exit_of(0, 4), Restart),
            ((rule(Action.FAIL, 3, 9),), exit_of(0, 9), GiveUp),
            ((rule(Action.FAIL, 3, 9),), exit_of(0, 10), Restart),
            ((rule(Action.IGNORE, 5),), exit_of(0, 5), Ignore),
            ((rule(Action.FAIL, signals=(11,)),), exit_of(0, signal=11), GiveUp),
            ((rule(Action.FAIL, signals=(11,)),), exit_of(0, 11), Restart),
            ((rule(Action.FAIL, 11),), exit_of(0, signal=11), Restart),
            ((rule(Action.RESTART, 3), rule(Action.FAIL, 1, 99)), exit_of(0, 3), Restart),
            ((rule(Action.RESTART, 3), rule(Action.FAIL, 1, 99)), exit_of(0, 4), GiveUp),
            ((rule(Action.FAIL, 101),), exit_of(0, 101), GiveUp),
        ],
    )
    def test_decide(self, rules, exit, kind):
        """The first rule that matches is followed, before anything that is built in."""
        assert isinstance(decide(TOLERANT, RestartPolicy(9, free_codes=(101,), rules=rules), History(), exit), kind)

    def test_a_rule_overrules_what_is_built_in(self):
        """Who says restart means it: also at the start, and again and again; but the budget holds."""
        policy = RestartPolicy(3, rules=(rule(Action.RESTART, 1, 2),))
        missing = exited(1, error="ModuleNotFoundError: no")
        assert isinstance(decide(TOLERANT, policy, after(policy, missing, missing), missing), Restart)
        assert isinstance(decide(TOLERANT, policy, after(policy, missing, missing, missing), missing), GiveUp)

    def test_words(self):
        """The rule that decided is named as the user wrote it."""
        policy = RestartPolicy(9, rules=(rule(Action.FAIL, 3),))
        assert "--on-exit as written" in decide(TOLERANT, policy, History(), exit_of(0, 3)).reason

    def test_ignoring_works_at_every_level(self):
        """It is no failure, so that it does not end a job of level 0."""
        policy = RestartPolicy(rules=(rule(Action.IGNORE, 5),))
        assert isinstance(decide(OFF, policy, History(), exit_of(0, 5)), Ignore)


USAGE = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lrr"


@pytest.mark.parametrize(
    ("exit", "words"),
    [
        pytest.param(exited(error="ModuleNotFoundError: No module named 'x'"), "No module named 'x'", id="module"),
        pytest.param(exited(error="SyntaxError: invalid syntax"), "invalid syntax", id="syntax"),
        pytest.param(exited(2, detail=USAGE), "unrecognized arguments: --lrr", id="argparse"),
        pytest.param(exited(2, detail="python: can't open file 'a.py': [Errno 2]"), "no such script", id="no script"),
        pytest.param(exited(error="ImportError: x", age_s=31.0), None, id="import error in the middle"),
        pytest.param(exited(error="ValueError: x"), None, id="any other exception"),
        pytest.param(exited(2, detail="what?"), None, id="code 2 without a word"),
        pytest.param(exited(2, detail=USAGE, age_s=31.0), None, id="code 2 later"),
        pytest.param(exited(3, detail=USAGE), None, id="another code"),
        pytest.param(exited(signal=9, detail=USAGE), None, id="killed"),
        pytest.param(exited(error="ImportError: x", age_s=None), None, id="age not known"),
    ],
)
def test_what_starting_again_does_not_mend(exit, words):
    """A program that never started is not started again, and the reason is its own words."""
    decision = decide(TOLERANT, RestartPolicy(9), History(), exit)
    assert isinstance(decision, Restart if words is None else GiveUp)
    assert words is None or words in decision.reason


class TestStartUpFailures:
    """The same failure twice in a row at the start is one too many."""

    @pytest.mark.parametrize(
        ("policy", "before", "exit", "ends"),
        [
            pytest.param(RestartPolicy(9), (), exited(7), False, id="the first one"),
            pytest.param(RestartPolicy(9), (exited(7),), exited(7), True, id="the same again"),
            pytest.param(RestartPolicy(9), (exited(7),), exited(7, rank=3, node="b"), True, id="by another rank"),
            pytest.param(RestartPolicy(9), (exited(7),), exited(8), False, id="another code"),
            pytest.param(RestartPolicy(9), (exited(error="E: a"),), exited(error="E: a"), True, id="same exception"),
            pytest.param(RestartPolicy(9), (exited(error="E: a"),), exited(error="E: b"), False, id="other words"),
            pytest.param(RestartPolicy(9), (exited(7), exited(8)), exited(7), False, id="not in a row"),
            pytest.param(RestartPolicy(9), (exited(7, age_s=40.0),), exited(7), False, id="the first was later"),
            pytest.param(RestartPolicy(9), (exited(7),), exited(7, age_s=40.0), False, id="this one is later"),
            pytest.param(RestartPolicy(9), (exited(signal=9),), exited(signal=9), False, id="killed on purpose"),
            pytest.param(RestartPolicy(9), (exited(7),), replace(exited(7), step=3), False, id="it had got on"),
            pytest.param(RestartPolicy(9, startup_failures=0), (exited(7),) * 5, exited(7), False, id="off"),
            pytest.param(RestartPolicy(9, startup_failures=1), (), exited(7), True, id="once is enough"),
            pytest.param(RestartPolicy(9, startup_failures=3), (exited(7),), exited(7), False, id="twice of three"),
            pytest.param(RestartPolicy(9, startup_failures=3), (exited(7),) * 2, exited(7), True, id="three of three"),
            pytest.param(RestartPolicy(9, startup_s=0.5), (exited(7),), exited(7), False, id="a shorter window"),
        ],
    )
    def test_decide(self, policy, before, exit, ends):
        """It counts only what failed by itself, in the same words, within the window, in a row."""
        assert isinstance(decide(TOLERANT, policy, after(policy, *before), exit), GiveUp if ends else Restart)

    def test_words(self):
        """How often, and which setting says so."""
        policy = RestartPolicy(9)
        decision = decide(TOLERANT, policy, after(policy, exited(7)), exited(7))
        assert "the same failure 2 times in a row at the start" in decision.reason
        assert "--startup-failures" in decision.reason


class TestCrashLoop:
    """One rank that fails again and again ends the job, where the user wants that."""

    @pytest.mark.parametrize(
        ("limit", "ranks", "rank", "ends"),
        [
            (3, (1, 1), 1, True),
            (3, (1, 2), 1, False),
            (3, (1,), 1, False),
            (3, (2, 1, 1), 1, True),
            (0, (1, 1, 1, 1), 1, False),
        ],
    )
    def test_decide(self, limit, ranks, rank, ends):
        """The same rank so many times in a row, whatever it failed of."""
        policy = RestartPolicy(99, crash_loop=limit)
        history = after(policy, *(exited(signal=9, rank=each, age_s=99.0) for each in ranks))
        decision = decide(TOLERANT, policy, history, exited(signal=11, rank=rank, node="b", age_s=99.0))
        assert isinstance(decision, GiveUp if ends else Restart)
        assert not ends or "rank 1 failed 3 times in a row, on a, b (--crash-loop)" in decision.reason

    @pytest.mark.parametrize(
        ("steps", "step", "ends"),
        [((41, 41), 41, True), ((41, 40), 41, False), ((None, None), None, False), ((40, 41, 41), 41, True)],
    )
    def test_the_same_step(self, steps, step, ends):
        """Whichever rank: what fails after the same step each time will do so again."""
        policy = RestartPolicy(99, crash_loop=3)
        failures = (exited(signal=9, rank=rank, step=each) for rank, each in enumerate(steps))
        decision = decide(TOLERANT, policy, after(policy, *failures), exited(signal=9, rank=7, node="b", step=step))
        assert isinstance(decision, GiveUp if ends else Restart)
        assert not ends or "3 failures in a row came after step 41, on a, b (--crash-loop)" in decision.reason

    def test_the_node_is_excluded_instead(self):
        """Where the user would rather do without it, and it was the same each time. Then the row is over."""
        policy = RestartPolicy(99, crash_loop=2, crash_loop_excludes=True)
        history = after(policy, exited(signal=9, node="b"))
        decision = decide(ELASTIC, policy, history, exited(signal=9, node="b"))
        assert decision.exclusion == Exclusion("b", "rank 0 failed 2 times in a row, on b (--crash-loop)")
        assert "restart 2 of 99; node b is excluded while there are enough others: rank 0" in decision.reason
        after_that = history.remember(failure_of(policy, exited(signal=9, node="b"))).exclude(decision.exclusion)
        for node in "bc":
            decision = decide(ELASTIC, policy, after_that, exited(signal=9, node=node))
            assert (type(decision), decision.exclusion) == (Restart, None)

    def test_not_where_it_was_another_node(self):
        """Then it is the program's fault, and no node is to blame."""
        policy = RestartPolicy(99, crash_loop=2, crash_loop_excludes=True)
        decision = decide(ELASTIC, policy, after(policy, exited(signal=9, node="a")), exited(signal=9, node="b"))
        assert isinstance(decision, GiveUp)


class TestBlame:
    """A node on which workers fail again and again is kept out."""

    def decided(self, policy, *before, exit=None, now=10.0):
        return decide(ELASTIC, policy, after(policy, *before), exit or exited(9, node="b", age_s=99), now)

    @pytest.mark.parametrize(
        ("before", "limit", "excluded"),
        [("b", 3, False), ("bb", 3, True), ("ab", 3, False), ("bab", 3, True), ("bb", 0, False), ("", 1, True)],
    )
    def test_after_so_many_failures(self, before, limit, excluded):
        """Those of other nodes do not count, and need not be in a row."""
        policy = RestartPolicy(99, exclude_after=limit)
        decision = self.decided(policy, *(exited(9, node=node, age_s=99.0) for node in before))
        assert isinstance(decision, Restart)
        assert (decision.exclusion is not None) == excluded
        if excluded:
            assert f"(--exclude-node-after {limit})" in decision.exclusion.reason
            assert str(decision.exclusion) in decision.reason

    def test_what_is_long_ago_does_not_count(self):
        """By the same window as restarts."""
        policy = RestartPolicy(99, window_s=10.0, exclude_after=3)
        failures = [exited(9, node="b", age_s=99.0)] * 2
        assert self.decided(policy, *failures, now=9.9).exclusion is not None
        assert self.decided(policy, *failures, now=10.5).exclusion is None

    def test_by_an_exit(self):
        """A rule may say so at once; who is excluded already is not excluded again."""
        policy = RestartPolicy(9, rules=(rule(Action.EXCLUDE, 7),))
        decision = self.decided(policy, exit=exited(7, node="b"))
        assert decision.exclusion == Exclusion("b", "--on-exit as written")
        history = History().exclude(decision.exclusion)
        assert decide(ELASTIC, policy, history, exited(7, node="b")).exclusion is None

    def test_a_check_after_every_second_failure(self):
        """Where there is one."""
        failure = exited(9, node="b", age_s=99.0)
        policy = RestartPolicy(99, check_after=2)
        assert [self.decided(policy, *[failure] * count).check for count in range(4)] == [False, True, False, True]
        assert not self.decided(RestartPolicy(99), failure).check

    def test_cleared(self):
        """Nothing is held against it any more."""
        policy = RestartPolicy(99, exclude_after=2)
        history = after(policy, exited(9, node="b"), exited(9, node="a")).exclude(Exclusion("b", "it failed"))
        cleared = history.clear("b")
        assert cleared.kept_out == frozenset()
        assert [each.node for each in cleared.failures] == ["a"]
        assert cleared.charged == history.charged


def test_a_hang_is_no_failure_at_the_start():
    """Twice in a row it still is worth a restart: only what ended by itself is hopeless."""
    policy = RestartPolicy(9)
    hang = exited(124, hang="no rank told of a first step within 5 s", age_s=5.0)
    decision = decide(TOLERANT, policy, after(policy, hang), hang)
    assert decision == Restart("rank 0 on a hangs: no rank told of a first step within 5 s; restart 2 of 9")


def test_only_the_last_failures_are_remembered():
    """A job that restarts for months does not fill etcd."""
    policy = RestartPolicy(9999)
    history = after(policy, *(exited(rank=rank) for rank in range(100)))
    assert [each.rank for each in history.failures] == list(range(36, 100))


@pytest.mark.parametrize(
    "values", [{"startup_failures": -1}, {"startup_s": -0.1}, {"crash_loop": -1}, {"window_s": 0.0}]
)
def test_policy_refuses_nonsense(values):
    """Each setting has its limits."""
    with pytest.raises(ValueError, match=next(iter(values))):
        RestartPolicy(1, **values)


def test_the_next_leader_s_clock_begins_elsewhere():
    """A restart that was charged five minutes ago is five minutes ago by any leader's clock."""
    written = Record(history=History((10.0, 40.0)), clock=1000.0)
    assert written.on_clock(700.0).history.charged == (310.0, 340.0)
    failed = History().remember(failure_of(RestartPolicy(), exit_of(), 10.0))
    assert Record(history=failed, clock=1000.0).on_clock(700.0).history.failures[0].at == 310.0
    assert written.on_clock(1000.0).history.charged == (10.0, 40.0)
    assert Record(history=History((10.0,))).on_clock(5.0).history.charged == (10.0,)
