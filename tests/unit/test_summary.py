"""What a person reads, and a program, when a generation or a job is over."""

from __future__ import annotations

import json
from dataclasses import replace

from elastic_adapter.core.model import Failed, Succeeded, Verdict
from elastic_adapter.core.summary import as_values, explain, summarize
from elastic_adapter.core.testing import exit_of

CAUSE = replace(
    exit_of(3, 1, node="b"),
    at=1000.25,
    pid=77,
    step=41,
    error="ValueError: the data is bad",
    detail_source="traceback",
    detail='Traceback (most recent call last):\n  File "train.py", line 7\nValueError: the data is bad\n',
)
RESET = replace(exit_of(0, 1, node="a"), at=1000.262, error="RuntimeError: Connection closed by peer")
HANG = replace(exit_of(1, 124, node="b"), hang="no rank made a step for 9 s", stack_file="/logs/1.txt", detail="File x")


def test_a_generation_that_failed():
    """The first failure with all that is known of it, a line for each other one, and what was decided."""
    story = explain(Verdict(2, CAUSE, (RESET,), 3, "rank 3 on b exited with code 1; restart 1 of 3", 2))
    assert story.splitlines() == [
        "generation 2 failed:",
        "  first failure:",
        "    rank        3 (local rank 0, generation 1, pid 77)",
        "    node        b",
        "    time        1970-01-01T00:16:40.250Z",
        "    how         exited with code 1",
        "    exit code   1",
        "    last step   41",
        "    traceback:",
        "      Traceback (most recent call last):",
        '        File "train.py", line 7',
        "      ValueError: the data is bad",
        "  other failures of this generation:",
        "    rank 0 on a, +0.012 s: exited with code 1: RuntimeError: Connection closed by peer",
        "    and 3 more",
        "  decision: restart 1 of 3 (2 restarts left)",
    ]


def test_a_job_that_failed():
    """The same, and its reason first."""
    lines = summarize(Failed("it failed", CAUSE, others=(RESET,), restarts_left=0), 2).splitlines()
    assert lines[0] == "job failed: it failed"
    assert lines[-2].startswith("    rank 0 on a, +0.012 s: ")
    assert lines[-1] == "  decision: it failed (0 restarts left)"


def test_a_hang():
    """The stack in place of a traceback, and where its file is; the others did not fail."""
    story = explain(Verdict(1, replace(HANG, detail_source="stack"), (replace(HANG, rank=0, detail=""),), 0, "why", 1))
    assert "    stacks      /logs/1.txt (on b)" in story
    assert "    stack:\n      File x" in story
    assert "  the others meanwhile:\n    rank 0 on b: hangs: no rank made a step for 9 s (/logs/1.txt)" in story
    assert "time        not known" in story


def test_values():
    """All of it for programs, whatever the end."""
    verdict = Verdict(1, CAUSE, (RESET,), 0, "restart 1 of 3", 2)
    told = json.loads(json.dumps(as_values(Succeeded(), "j", "a", [verdict])))
    assert (told["outcome"], told["exit_code"], told["first_failure"]) == ("succeeded", 0, None)
    (restart,) = told["restarts"]
    assert (restart["generation"], restart["decision"], restart["restarts_left"]) == (1, "restart 1 of 3", 2)
    assert (restart["first_failure"]["rank"], restart["first_failure"]["how"]) == (3, "exited with code 1")
    assert [each["error"] for each in restart["other_failures"]] == ["RuntimeError: Connection closed by peer"]
    told = as_values(Failed("it failed", CAUSE, others=(RESET,), more=9, restarts_left=0), "j", "a")
    assert (told["unlisted_failures"], told["restarts_left"], told["exit_code"]) == (9, 0, 1)
