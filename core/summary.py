"""What a person reads when a job is over. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.model import Failed, Outcome, Stopped, Succeeded, Verdict, WorkerExit


def summarize(outcome: Outcome, restarts: int) -> str:
    """One line for a good end; for a failure, who failed first, when, how, and in which words."""
    match outcome:
        case Succeeded(reason=reason):
            return f"job succeeded: {reason}{_after(restarts)}"
        case Stopped(reason=reason, alone=True):
            return f"this node has left the job: {reason}{_after(restarts)}"
        case Failed(reason=reason, alone=True):
            return f"this node is out of the job: {reason}{_after(restarts)}"
        case Stopped(reason=reason):
            return f"job stopped: {reason}{_after(restarts)}"
        case Failed(reason=reason, first=None):
            return f"job failed: {reason}{_after(restarts)}"
        case Failed(reason=reason, first=first) if first is not None:
            told = [f"job failed: {reason}", *_failure(first), *_consequences(first, outcome.others, outcome.more)]
            return "\n".join([*told, _decision(first, reason, outcome.restarts_left)])
        case _:
            assert_never(outcome)  # type: ignore[arg-type]


def explain(verdict: Verdict) -> str:
    """Why a generation failed, and what is done about it."""
    return "\n".join(
        [
            f"generation {verdict.generation} failed:",
            *_failure(verdict.first),
            *_consequences(verdict.first, verdict.others, verdict.more),
            _decision(verdict.first, verdict.decision, verdict.restarts_left),
        ]
    )


def as_values(outcome: Outcome, job_id: str, node: str, verdicts: Sequence[Verdict] = ()) -> dict[str, object]:
    """The same for programs: what can be written as JSON."""
    failed = outcome if isinstance(outcome, Failed) else None
    return {
        "job": job_id,
        "node": node,
        "outcome": type(outcome).__name__.lower(),
        "reason": outcome.reason,
        "exit_code": outcome.exit_code,
        "first_failure": None if failed is None or failed.first is None else _values(failed.first),
        "other_failures": [] if failed is None else [_values(exit) for exit in failed.others],
        "unlisted_failures": 0 if failed is None else failed.more,
        "restarts_left": None if failed is None else failed.restarts_left,
        "restarts": [
            {
                "generation": verdict.generation,
                "first_failure": _values(verdict.first),
                "other_failures": [_values(exit) for exit in verdict.others],
                "unlisted_failures": verdict.more,
                "decision": verdict.decision,
                "restarts_left": verdict.restarts_left,
            }
            for verdict in verdicts
        ],
    }


def _values(exit: WorkerExit) -> dict[str, object]:
    return {**asdict(exit), "how": exit.how, "exit_code": exit.status}


def _after(restarts: int) -> str:
    return f" (after {restarts} restart{'s' if restarts != 1 else ''})" if restarts else ""


def _decision(first: WorkerExit, reason: str, restarts: int | None) -> str:
    """What was decided, without repeating what it was decided upon."""
    words = reason.removeprefix(f"rank {first.rank} on {first.node} {first.how}; ")
    left = "" if restarts is None else f" ({restarts} restart{'s' if restarts != 1 else ''} left)"
    return f"  decision: {words}{left}"


def _time(at: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d}Z"


def _failure(exit: WorkerExit) -> list[str]:
    facts = [
        "  first failure:",
        f"    rank        {exit.rank} (local rank {exit.local_rank}, generation {exit.generation}, pid {exit.pid})",
        f"    node        {exit.node}",
        f"    time        {_time(exit.at) if exit.at else 'not known'}",
        f"    how         {exit.how}",
        f"    exit code   {exit.status}",
    ]
    if exit.step is not None:
        facts.append(f"    last step   {exit.step}")
    if exit.stack_file:
        facts.append(f"    stacks      {exit.stack_file} (on {exit.node})")
    if exit.detail:
        heading = {"stderr": "last lines of stderr", "stack": "stack"}.get(exit.detail_source, "traceback")
        facts.append(f"    {heading}:")
        facts.extend(f"      {line}" for line in exit.detail.rstrip().splitlines())
    elif not exit.hang:
        facts.append("    it left no traceback and wrote nothing to stderr")
    return facts


def _consequences(first: WorkerExit, others: tuple[WorkerExit, ...], more: int) -> list[str]:
    if not others:
        return []
    lines = ["  the others meanwhile:" if first.hang else "  other failures of this generation:"]
    for exit in others:
        after = f", {exit.at - first.at:+.3f} s" if exit.at and first.at and not exit.hang else ""
        words = f": {exit.error}" if exit.error else ""
        lines.append(f"    rank {exit.rank} on {exit.node}{after}: {exit.how}{words}")
        if exit.stack_file:
            lines[-1] += f" ({exit.stack_file})"
    return [*lines, f"    and {more} more"] if more else lines
