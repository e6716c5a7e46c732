"""The composition root: the only place where concrete things are wired together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import tempfile
from collections.abc import Coroutine
from pathlib import Path

from elastic_adapter.core.model import Failed, Outcome, Succeeded
from elastic_adapter.core.output import ConsoleHandler, LineFormatter, Output
from elastic_adapter.core.ports import PythonProgram
from elastic_adapter.core.processes import Guard
from elastic_adapter.core.standby import StandbyPool
from elastic_adapter.core.waiting import on_signals
from elastic_adapter.core.workers import Starter
from elastic_adapter.launchers.plan import LaunchPlan

# The path of a Unix socket may have 107 characters.
_LONGEST_PARENT = 70
_CONSOLE_S = 5.0


def launch(plan: LaunchPlan) -> int:
    """Carry out the plan on this node; the exit code of the command."""
    scratch = _scratch_folder()
    guard = Guard.start(scratch)
    _raise_file_limit()
    output = Output()
    _log_to(output, plan)
    outcome: Outcome | None = None
    try:
        outcome = asyncio.run(_run(plan, guard, output, Path(scratch)))
        return outcome.exit_code
    finally:
        # All is delivered, however slowly it is read; but whoever stopped the job does not want to wait for that.
        output.close(None if isinstance(outcome, Succeeded | Failed) else _CONSOLE_S)


def _raise_file_limit() -> None:
    """Pipes and logs of many workers need more open files than the usual limit; the workers keep theirs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _scratch_folder() -> str:
    """A private folder for this run, removed at its end, whose path is short enough for a Unix socket in it."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="elastic-launch-", dir=parent if len(parent) <= _LONGEST_PARENT else "/tmp")  # noqa: S108


def _log_to(output: Output, plan: LaunchPlan) -> None:
    handler = ConsoleHandler(output)
    handler.setFormatter(LineFormatter(plan.node.node, plan.job.job_id))
    logger = logging.getLogger("elastic_adapter")
    logger.addHandler(handler)
    logger.setLevel(plan.log_level)
    logger.propagate = False
    for note in plan.notes:
        logger.getChild("launch").info("%s", note)


async def _run(plan: LaunchPlan, guard: Guard, output: Output, scratch: Path) -> Outcome:
    # Signals that come before the agent is there are kept for it.
    caught: list[int] = []
    on_signals(plan.node.signals, caught.append)
    guard.listen()
    folder = _log_folder(plan) or scratch
    starter = Starter(guard, output, plan.program, plan.adapter, plan.node, dict(os.environ), folder)
    pool = _pool(plan, starter)
    if pool is not None:
        await pool.prepare()

    # gRPC's own log lines tell a user nothing. The guard has its environment already: workers do not see this.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # gRPC's import is the slow part of a start: the guard and the first interpreters come up beside it.
    from elastic_adapter.core.agent import Agent
    from elastic_adapter.core.client import Link
    from elastic_adapter.core.coordinator import Coordinator
    from elastic_adapter.core.memory import MemoryRegistry
    from elastic_adapter.core.server import Server

    coordinator = Coordinator(plan.job, registry := MemoryRegistry())
    server = Server(coordinator, f"unix:{scratch}/core.sock")
    await server.start()
    leader = await registry.campaign(plan.node.node, server.address)
    leading = asyncio.create_task(coordinator.lead(leader.epoch))
    link = Link(leader.address)
    try:
        agent = Agent(plan.job, plan.node, starter=starter, pool=pool, link=link)
        return await _first(agent.run(caught), leading)
    finally:
        leading.cancel()
        await guard.close()
        await link.close()
        await server.stop()


async def _first(agent: Coroutine[None, None, Outcome], leading: asyncio.Task[None]) -> Outcome:
    """The agent's outcome; a coordinator that fails ends the agent, too, with its error."""
    running = asyncio.create_task(agent)
    await asyncio.wait({running, leading}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        running.cancel()
        await leading
    return await running


def _pool(plan: LaunchPlan, starter: Starter) -> StandbyPool | None:
    """Only a Python program can wait for its world."""
    if not isinstance(plan.program, PythonProgram):
        return None
    preload = (*plan.adapter.preload, *plan.node.preload) if plan.node.standby else ()
    return StandbyPool(starter, preload, plan.node.slots)


def _log_folder(plan: LaunchPlan) -> Path | None:
    """A folder of this run's own, where the user asked for files; kept when the run is over."""
    output = plan.node.output
    wanted = output.log_dir is not None or any(output.to_file) or output.stdout_filters or output.stderr_filters
    if not wanted:
        return None
    if output.log_dir is not None:
        os.makedirs(output.log_dir, exist_ok=True)
    name = re.sub(r"[^\w.-]", "_", plan.job.job_id)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=output.log_dir))
    logging.getLogger("elastic_adapter.launch").info("logs are written to %s", folder)
    return folder
