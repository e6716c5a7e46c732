"""The composition root: the only place where concrete things are wired together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import resource
import secrets
import shutil
import tempfile
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from elastic_adapter.core.checkpoint.desk import SaveDesk
from elastic_adapter.core.checkpoint.page import SavePages
from elastic_adapter.core.checkpoint.saver_process import SaverProcess
from elastic_adapter.core.checkpoint.shared_folder import make_shared_folder
from elastic_adapter.core.checkpoint.writers import own_token
from elastic_adapter.core.config import ClusterConfig, OutputConfig
from elastic_adapter.core.dump import StackDumper, find_py_spy
from elastic_adapter.core.errors import UserError
from elastic_adapter.core.health import HealthCheck
from elastic_adapter.core.model import Endpoint, Failed, Outcome, Stopped, Succeeded, Verdict, signal_name
from elastic_adapter.core.notices import NoticeBoard
from elastic_adapter.core.output import ConsoleHandler, LineFormatter, Output
from elastic_adapter.core.ports import PythonProgram
from elastic_adapter.core.processes import Guard
from elastic_adapter.core.progress import ProgressPages
from elastic_adapter.core.standby import StandbyPool
from elastic_adapter.core.summary import as_values, summarize
from elastic_adapter.core.waiting import on_signals
from elastic_adapter.core.witness import Witness
from elastic_adapter.core.workers import Starter, worker_log
from elastic_adapter.launchers.plan import LaunchPlan

if TYPE_CHECKING:
    from elastic_adapter.core.cluster import ClusterSession
    from elastic_adapter.core.registry import Ended

log = logging.getLogger("elastic_adapter.launch")

# The path of a Unix socket may have 107 characters.
_LONGEST_PARENT = 70
_CONSOLE_S = 5.0
# A user who waits longer than this is told what for.
_SILENCE_S = 2.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Parts:
    """What both ways of running share."""

    plan: LaunchPlan
    starter: Starter
    pool: StandbyPool | None
    board: NoticeBoard
    scratch: Path
    # Signals that came before there was an agent.
    caught: list[int]
    witness: Witness
    desk: SaveDesk
    # The run's id, filled in when it is known.
    run: list[str]
    health: HealthCheck | None
    # Why the generations that failed did so, filled by the agent.
    verdicts: list[Verdict]


def launch(plan: LaunchPlan) -> int:
    """Carry out the plan on this node; the exit code of the command."""
    scratch = _scratch_folder()
    shared = make_shared_folder(Path(scratch))
    guard = Guard.start(scratch, str(shared))
    _raise_file_limit()
    output = Output()
    _log_to(output, plan)
    outcome: Outcome | None = None
    verdicts: list[Verdict] = []
    try:
        outcome = asyncio.run(_run(plan, guard, output, (Path(scratch), shared), verdicts))
        _write_end(plan, outcome, verdicts)
        return outcome.exit_code
    finally:
        # All is delivered, however slowly it is read; but whoever stopped the job does not want to wait for that.
        output.close(None if isinstance(outcome, Succeeded | Failed) else _CONSOLE_S)
        # The guard has done so, unless it was killed.
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(shared, ignore_errors=True)


def _write_end(plan: LaunchPlan, outcome: Outcome, verdicts: list[Verdict]) -> None:
    """How it ended, for programs: in the file that the user names, and where torch's tools look for it."""
    files: dict[str, str] = {}
    if plan.summary_file is not None:
        values = as_values(outcome, plan.job.job_id, plan.node.node, verdicts)
        files[plan.summary_file] = json.dumps(values, indent=2) + "\n"
    asked = os.environ.get("TORCHELASTIC_ERROR_FILE")
    content = plan.adapter.error_file(outcome) if asked and isinstance(outcome, Failed) else None
    if asked and content is not None:
        files[asked] = content
    for path, text in files.items():
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
        except OSError as error:
            log.warning("%s can't be written: %s", path, error.strerror)


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


async def _run(
    plan: LaunchPlan, guard: Guard, output: Output, folders: tuple[Path, Path], verdicts: list[Verdict]
) -> Outcome:
    scratch, shared = folders
    # Signals that come before the agent is there are kept for it.
    caught: list[int] = []
    on_signals(plan.node.signals, caught.append)
    guard.listen()
    logs = _log_folder(plan)
    pages, saves = ProgressPages(scratch), SavePages(scratch)
    environ, folder = dict(os.environ), logs or scratch
    starter = Starter(guard, output, plan.program, plan.adapter, plan.node, environ, folder, pages, saves)
    pool = _pool(plan, starter)
    board = NoticeBoard(f"{scratch}/notices.sock")
    run = [own_token()]
    desk = SaveDesk(SaverProcess(guard, output), saves, shared, job=plan.job.job_id, run=lambda: run[-1])
    board.hear, board.gone = desk.hear, desk.gone
    board.open()
    check = plan.health_check
    health = HealthCheck(guard, output, check.text, check.within_s, plan.node.node) if check is not None else None
    witness = Witness(StackDumper(guard, find_py_spy()), plan.job.job_id, logs or _worker_log_folder(plan))
    parts = _Parts(plan, starter, pool, board, scratch, caught, witness, desk, run, health, verdicts)
    if pool is not None:
        await pool.prepare(importing=plan.cluster is not None)

    # gRPC's own log lines tell a user nothing. The guard has its environment already: workers do not see this.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        if health is not None and (trouble := await _unless_signalled(caught, health.run())):
            return _unfit(plan, trouble)
        if plan.cluster is None:
            return await _run_alone(parts)
        return await _run_among_others(parts, plan.cluster)
    except _Signalled as signalled:
        return Stopped(f"{signal_name(signalled.number)} before this node had joined the job", signalled.number)
    finally:
        board.close()
        await guard.close()


def _unfit(plan: LaunchPlan, trouble: str) -> Outcome:
    outcome = Failed(f"node {plan.node.node} failed its health check: {trouble}", alone=plan.cluster is not None)
    log.error("%s", summarize(outcome, 0))
    return outcome


async def _run_alone(parts: _Parts) -> Outcome:
    """One node: the coordinator is in this process, on a registry in memory."""
    # gRPC's import is the slow part of a start: the guard and the first interpreters come up beside it.
    from elastic_adapter.core.agent import Agent
    from elastic_adapter.core.coordinator import Coordinator
    from elastic_adapter.core.memory import MemoryRegistry
    from elastic_adapter.core.server import Server
    from elastic_adapter.core.session import LocalSession

    plan = parts.plan
    address = f"unix:{parts.scratch}/core.sock"
    registry = MemoryRegistry()
    leader = await registry.campaign(plan.node.node, address)
    coordinator = Coordinator(plan.job, registry, leader.epoch)
    server = Server(address)
    server.serve(coordinator)
    await server.start()
    leading = asyncio.create_task(coordinator.lead())
    session = LocalSession(address)
    try:
        agent = Agent(
            plan.job,
            plan.node,
            starter=parts.starter,
            pool=parts.pool,
            session=session,
            board=parts.board,
            witness=parts.witness,
            desk=parts.desk,
            health=parts.health,
            verdicts=parts.verdicts,
        )
        return await _first(agent.run(parts.caught), leading)
    finally:
        leading.cancel()
        await parts.starter.guard.close()
        await session.close()
        await server.stop()


async def _run_among_others(parts: _Parts, cluster: ClusterConfig) -> Outcome:
    """One of several nodes, which meet in etcd."""
    from elastic_adapter.core.agent import Agent
    from elastic_adapter.core.cluster import GIVE_UP_S, ClusterSession
    from elastic_adapter.core.codec import Card
    from elastic_adapter.core.embedded import EmbeddedEtcd
    from elastic_adapter.core.etcd import Etcd
    from elastic_adapter.core.registry import Ended, EtcdRegistry

    plan, guard = parts.plan, parts.starter.guard
    place = Endpoint.parse(cluster.endpoints[0])
    embedded = EmbeddedEtcd(guard, place.host, place.port, parts.scratch) if cluster.hosts_etcd else None
    clients: list[Etcd] = []
    session: ClusterSession | None = None
    try:
        own_etcd = embedded is not None and await embedded.start(cluster.connect_s)
        if embedded is not None:
            said = "this node runs the job's etcd, at %s" if own_etcd else "an etcd is at %s already, and is used"
            log.info(said, cluster.endpoints[0])
        await _unless_signalled(parts.caught, _reach(cluster))
        clients = [Etcd(cluster.endpoints, cluster.credentials, timeout_s) for timeout_s in (2.0, plan.job.lease_s / 5)]
        me = Card(plan.node.node, "", uuid.uuid4().hex)
        # When the last agent that was cut off has given up, and as long again as the keys of a run that ended stay.
        abandoned_s = plan.job.isolation_s + GIVE_UP_S + cluster.retention_s
        registry = EtcdRegistry(
            clients[0],
            plan.job.job_id,
            me,
            finished_grace_s=cluster.finished_grace_s,
            retention_s=cluster.retention_s,
            abandoned_s=abandoned_s,
        )
        session = ClusterSession(
            plan.job, registry, clients[1], address=plan.node.address, listen=cluster.listen, embedded=cluster.embedded
        )
        ended = await _unless_signalled(parts.caught, _join(session, cluster))
        if isinstance(ended, Ended):
            return _told(ended)
        parts.run.append(registry.run_id)
        node = replace(plan.node, node=session.node)
        agent = Agent(
            plan.job,
            node,
            starter=parts.starter,
            pool=parts.pool,
            session=session,
            board=parts.board,
            witness=parts.witness,
            desk=parts.desk,
            health=parts.health,
            verdicts=parts.verdicts,
            leaving_ends_the_job=own_etcd,
        )
        return await agent.run(parts.caught)
    finally:
        if parts.pool is not None:
            parts.pool.close()
        if session is not None:
            await session.close()
        for client in clients:
            await client.close()
        if embedded is not None:
            await embedded.close()


class _Signalled(Exception):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


async def _unless_signalled(caught: list[int], coroutine: Coroutine[None, None, T]) -> T:
    """Wait for it, but not longer than the user."""
    task = asyncio.create_task(coroutine)
    while not task.done():
        await asyncio.wait({task}, timeout=0.1)
        if caught and not task.done():
            task.cancel()
            raise _Signalled(caught[0])
    return await task


async def _reach(cluster: ClusterConfig) -> None:
    """Wait until an endpoint listens. A mistake in the address is told in one line."""
    from elastic_adapter.core.probe import check_files, probe
    from elastic_adapter.core.succession import Answer

    if (wrong := check_files(cluster.credentials)) is not None:
        raise UserError(wrong)
    words = {
        Answer.REFUSED: "refuses the connection: nothing listens there",
        Answer.SILENT: "does not answer",
        Answer.UNKNOWN: "is a name that can't be resolved",
    }
    begin = time.monotonic()
    told = False
    while True:
        answers = await asyncio.gather(*(probe(endpoint) for endpoint in cluster.endpoints))
        if Answer.OPEN in answers:
            return
        found = "; ".join(f"{place} {words[each]}" for place, each in zip(cluster.endpoints, answers, strict=True))
        passed = time.monotonic() - begin
        if passed >= cluster.connect_s:
            break
        if passed >= _SILENCE_S and not told:
            told = True
            log.info("waiting up to %g s: %s", cluster.connect_s, found)
        await asyncio.sleep(0.2)
    whose = f"the etcd of this job (on the node that {cluster.named_by} names)" if cluster.embedded else "etcd"
    raise UserError(f"{cluster.named_by}: {whose} was not reached within {cluster.connect_s:g} s: {found}")


async def _join(session: ClusterSession, cluster: ClusterConfig) -> Ended | None:
    """Enter the job's run. An endpoint that is no etcd, or does not let us in, is told in one line."""
    from elastic_adapter.core.errors import OutOfReach
    from elastic_adapter.core.etcd import EtcdRefused
    from elastic_adapter.core.probe import tls_trouble

    places = ", ".join(cluster.endpoints)
    end = time.monotonic() + cluster.connect_s
    while True:
        try:
            return await session.join(dict(cluster.common), secrets.token_hex(16), guessed=cluster.node_is_guessed)
        except EtcdRefused as error:
            hint = " (--etcd-user and the variable ELASTIC_ETCD_PASSWORD say who we are)" if error.about_us else ""
            raise UserError(f"{cluster.named_by} {places}: {error}{hint}") from error
        except OutOfReach as error:
            if time.monotonic() >= end:
                said = [await asyncio.to_thread(tls_trouble, place, cluster.credentials) for place in cluster.endpoints]
                why = next((each for each in said if each), str(error))
                raise UserError(
                    f"{cluster.named_by} {places}: something listens there, but it did not answer as an etcd "
                    f"(v3 API) within {cluster.connect_s:g} s: {why}"
                ) from error


def _told(ended: Ended) -> Outcome:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ended.at))
    result = summarize(ended.outcome, 0).splitlines()[0]
    log.info("run %d of this job ended at %s: %s", ended.run, at, result)
    return ended.outcome


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
    if output.worker_logs:
        _prepare_worker_logs(output, plan.node.slots)
        return None
    wanted = output.log_dir is not None or any(output.to_file) or output.stdout_filters or output.stderr_filters
    if not wanted:
        return None
    if output.log_dir is not None:
        os.makedirs(output.log_dir, exist_ok=True)
    name = re.sub(r"[^\w.-]", "_", plan.job.job_id)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=output.log_dir))
    log.info("logs are written to %s", folder)
    return folder


def _worker_log_folder(plan: LaunchPlan) -> Path | None:
    output = plan.node.output
    return Path(output.log_dir) if output.worker_logs and output.log_dir is not None else None


def _prepare_worker_logs(output: OutputConfig, slots: int) -> None:
    assert output.log_dir is not None
    os.makedirs(output.log_dir, exist_ok=True)
    log.info("logs are written to %s/workerlog.N", output.log_dir)
    for local_rank in range(slots) if output.overwrite else ():
        path = worker_log(output, local_rank)
        if path is not None:
            path.write_bytes(b"")
