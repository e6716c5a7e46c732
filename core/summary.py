"""What a person reads when a job is over. Pure."""

from __future__ import annotations

import time
from dataclasses import asdict

from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.model import Failed, Outcome, Stopped, Succeeded, WorkerExit


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
            return f"job failed: {reason}\n{_failure(first)}"
        case _:
            assert_never(outcome)  # type: ignore[arg-type]


def as_values(outcome: Outcome, job_id: str, node: str) -> dict[str, object]:
    """The same for programs: what can be written as JSON."""
    first = outcome.first if isinstance(outcome, Failed) else None
    return {
        "job": job_id,
        "node": node,
        "outcome": type(outcome).__name__.lower(),
        "reason": outcome.reason,
        "exit_code": outcome.exit_code,
        "first_failure": None if first is None else {**asdict(first), "how": first.how, "exit_code": first.status},
    }


def _after(restarts: int) -> str:
    return f" (after {restarts} restart{'s' if restarts != 1 else ''})" if restarts else ""


def _failure(exit: WorkerExit) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(exit.at))
    facts = [
        "  first failure:",
        f"    rank        {exit.rank} (local rank {exit.local_rank}, generation {exit.generation}, pid {exit.pid})",
        f"    node        {exit.node}",
        f"    time        {at}.{int(exit.at % 1 * 1000):03d}Z",
        f"    how         {exit.how}",
        f"    exit code   {exit.status}",
    ]
    if exit.step is not None:
        facts.append(f"    last step   {exit.step}")
    if exit.detail:
        heading = {"stderr": "last lines of stderr"}.get(exit.detail_source, "traceback")
        facts.append(f"    {heading}:")
        facts.extend(f"      {line}" for line in exit.detail.rstrip().splitlines())
    else:
        facts.append("    it left no traceback and wrote nothing to stderr")
    return "\n".join(facts)
