"""Whether a generation still gets on, and who holds it up."""

from __future__ import annotations

import pytest

from elastic_adapter.core.hang import Hang, Pulse, convict, due, look_every_s, why
from elastic_adapter.core.model import HUNG, Mark, StackReport
from elastic_adapter.core.testing import job_config, world_of


def marks(*counts):
    return {rank: Mark(count, count * 10) for rank, count in enumerate(counts)}


@pytest.mark.parametrize(
    ("hang", "start", "told", "at"),
    [
        pytest.param(None, None, (1, 1), None, id="nobody wants to know"),
        pytest.param(20.0, None, (), None, id="nothing was ever told"),
        pytest.param(20.0, None, (1, 0), 51.0, id="since the last step"),
        pytest.param(None, 40.0, (), 41.0, id="since the start"),
        pytest.param(None, 40.0, (1, 0), None, id="the start is over"),
        pytest.param(20.0, 40.0, (), 41.0, id="both: at the start"),
        pytest.param(20.0, 40.0, (0, 1), 51.0, id="both: later"),
        pytest.param(0.2, None, (1,), 30.25, id="a step that is heard of late came in time"),
    ],
)
def test_due(hang, start, told, at):
    """The limit after the last step, or after the start, and the time by which a step may be heard of late."""
    pulse = Pulse(0.0).with_marks(marks(*told), 30.0)
    assert due(job_config(hang_timeout_s=hang, start_timeout_s=start), pulse) == at


def test_looks():
    """Often enough for the shorter of the limits, but neither all the time nor hardly ever."""
    looks = [look_every_s(job_config(hang_timeout_s=limit)) for limit in (None, 0.1, 4.0, 600.0)]
    assert looks == [None, 0.05, 0.2, 1.0]
    assert look_every_s(job_config(hang_timeout_s=600.0, start_timeout_s=2.0)) == 0.1


def test_any_rank_that_gets_on_is_a_sign_of_life():
    """One rank further is enough, or one that begins anew; the same again is nothing."""
    pulse = Pulse(0.0).with_marks(marks(1, 1), 1.0)
    assert pulse.with_marks(marks(1, 2), 2.0).moved_at == 2.0
    assert pulse.with_marks(marks(1, 1), 2.0) == pulse
    assert pulse.with_marks({0: Mark(0)}, 2.0).moved_at == 2.0
    assert dict(pulse.with_marks({1: Mark(5, 50)}, 2.0).marks) == {0: Mark(1, 10), 1: Mark(5, 50)}


def test_why():
    """Which of the two limits it was."""
    config = job_config(hang_timeout_s=20.0, start_timeout_s=40.0)
    assert why(config, Pulse(0.0)) == "no rank told of a first step within 40 s (--start-timeout)"
    assert why(config, Pulse(0.0, 1.0)) == "no rank made a step for 20 s (--hang-timeout)"


def stacks(*doing):
    """``w``: waits for others; ``-``: no stack was to be had; else: is there."""
    reports = []
    for rank, what in enumerate(doing):
        if what == "w":
            reports.append(
                StackReport(rank, "train.py:9 in train", "all_reduce", "File ...", f"{rank}.txt", 70 + rank, 5.0)
            )
        elif what == "-":
            reports.append(StackReport(rank, text="it is stopped (state T)"))
        else:
            reports.append(StackReport(rank, f"{what}.py:3 in load", "", "File ...", f"{rank}.txt", 70 + rank, 5.0))
    return tuple(reports)


@pytest.mark.parametrize(
    ("counts", "doing", "suspect", "words"),
    [
        pytest.param((5, 4, 5), "www", 1, "its last step is 40, fewer than the others", id="behind"),
        pytest.param((5, 5, 5), "wdw", 1, "it does not wait for others, but is in d.py:3 in load", id="elsewhere"),
        pytest.param((5, 4, 5), "xww", 1, "fewer than the others; it waits for others in all_reduce", id="count first"),
        pytest.param((5, 5, 5), "ww-", 2, "it is stopped (state T)", id="no stack, and no excuse"),
        pytest.param((5, 5, 5), "www", 0, "nothing sets it apart from ranks 1, 2", id="nobody stands out"),
        pytest.param((5, 0, 0), "xww", 0, "but is in x.py:3 in load", id="only rank 0 tells"),
        pytest.param((), "wxw", 1, "it has told of no step; it does not wait", id="before the first step"),
        pytest.param((5, 5, 5), "", 0, "its stack is not known", id="no stacks at all"),
    ],
)
def test_convict(counts, doing, suspect, words):
    """Who made the fewest steps, then who does not wait for others."""
    world = world_of("a", "b", "c")
    pulse = Pulse(0.0).with_marks(marks(*counts), 1.0)
    hang = Hang("no rank made a step for 9 s", 20.0, stacks=stacks(*doing))
    first, others = convict(world, pulse, hang, frozenset())
    assert (first.rank, first.node, first.code, first.generation) == (suspect, "abc"[suspect], HUNG, 1)
    assert first.how.startswith("hangs: no rank made a step for 9 s; ")
    assert words in first.how
    assert sorted(each.rank for each in (first, *others)) == [0, 1, 2]


def test_whoever_has_finished_is_no_suspect():
    """A rank that ended well made no step for long, either."""
    pulse = Pulse(0.0).with_marks(marks(1, 9), 1.0)
    first, others = convict(world_of("a", "b"), pulse, Hang("why", 20.0), frozenset({0}))
    assert (first.rank, others) == (1, ())


def test_the_evidence_goes_with_it():
    """The stack and its file, the pid and the step are told of the suspect; of the others all but the stack."""
    hang = Hang("why", 20.0, stacks=stacks("w", "x"))
    first, (other,) = convict(world_of("a", "b"), Pulse(0.0).with_marks(marks(5, 5), 1.0), hang, frozenset())
    assert (first.rank, first.stack_file, first.detail, first.pid, first.step) == (1, "1.txt", "File ...", 71, 50)
    assert (other.stack_file, other.detail) == ("0.txt", "")
    assert other.how == "hangs: its last step is 50; it waits for others in all_reduce, train.py:9 in train"
