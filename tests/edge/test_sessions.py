"""An agent's tie to its coordinator: what happens while it attaches is told, after Hello. Real etcd, real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from elastic_adapter.core.client import Link
from elastic_adapter.core.cluster import ClusterSession
from elastic_adapter.core.codec import Card
from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.coordinator import Coordinator
from elastic_adapter.core.errors import LinkBroken
from elastic_adapter.core.etcd import Etcd
from elastic_adapter.core.events import CheckpointsFound, MemberJoined, MemberReady, NodeDrained, StopRequested
from elastic_adapter.core.memory import MemoryRegistry
from elastic_adapter.core.model import Halt, Member
from elastic_adapter.core.registry import EtcdRegistry
from elastic_adapter.core.server import Server
from elastic_adapter.core.session import LocalSession
from elastic_adapter.core.wire import report_from_wire
from elastic_adapter.proto import control_pb2_grpc as rpc
from helpers.etcd_servers import cluster

WITHIN_S = 20.0


def member():
    return Member("n0", "127.0.0.1", 1, order=0, ports=(29500, 29501))


@pytest.fixture
def folder():
    # Not tmp_path: the path of a Unix socket has to be short.
    path = tempfile.mkdtemp(prefix="elastic-test-")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("etcd"), 1) as (one,):
        yield one


@asynccontextmanager
async def alone(folder):
    """A session with the coordinator in this process."""
    address = f"unix:{folder}/core.sock"
    registry = MemoryRegistry()
    leader = await registry.campaign("n0", address)
    coordinator = Coordinator(JobConfig("job"), registry, leader.epoch)
    server = Server(address)
    server.serve(coordinator)
    await server.start()
    leading = asyncio.create_task(coordinator.lead())
    session = LocalSession(address)
    try:
        yield session
    finally:
        await session.close()
        leading.cancel()
        await server.stop()


@asynccontextmanager
async def among_others(endpoint, job):
    """A session of a job in etcd, whose leader it is to be itself."""
    etcd = Etcd([endpoint])
    registry = EtcdRegistry(etcd, job, Card("n0", "", "first"))
    session = ClusterSession(JobConfig(job), registry, etcd, address="127.0.0.1", listen="127.0.0.1")
    try:
        await session.join({}, "token", guessed=False)
        yield session
    finally:
        await session.close()
        await etcd.close()


class Busy:
    """An agent to which something happens right after it was asked for its state."""

    def __init__(self, session, report):
        self._session, self._report = session, report
        self._notices = asyncio.Queue()

    def state(self):
        report, self._report = self._report, None
        if report is not None:
            asyncio.get_running_loop().call_soon(lambda: asyncio.create_task(self._session.report(report)))
        return MemberJoined(member())

    def request(self):
        return None

    def notice(self, notice):
        self._notices.put_nowait(notice)

    async def halted(self):
        while not isinstance(notice := await self._notices.get(), Halt):
            continue
        return notice.outcome


@pytest.mark.parametrize("kind", ["alone", "among others"])
def test_what_happens_while_it_attaches_is_told(kind, folder, request):
    """It is in no Hello: were it not told afterwards, nobody would ever hear of it."""
    endpoint = request.getfixturevalue("etcd_server").endpoint if kind == "among others" else ""
    made = among_others(endpoint, f"job-{os.getpid()}") if endpoint else alone(folder)

    async def main():
        async with made as session:
            node = Busy(session, StopRequested("n0", signal.SIGINT))
            attending = asyncio.create_task(session.attend(node))
            try:
                return await asyncio.wait_for(node.halted(), WITHIN_S)
            finally:
                attending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await attending

    assert asyncio.run(main()).signal == signal.SIGINT


class Slow(rpc.CoreServicer):
    """A server that takes an agent in when it is told to, and writes down what it hears."""

    def __init__(self):
        self.heard = []
        self.may_answer = asyncio.Event()

    async def Attach(self, requests, context):  # noqa: N802 (the name is the protocol's)
        self.heard.append((await anext(requests)).WhichOneof("kind"))
        await self.may_answer.wait()
        await context.send_initial_metadata((("elastic-epoch", "1"),))
        async for report in requests:
            self.heard.append(report_from_wire(report, "n0"))
        return
        yield


@pytest.fixture
def slow(folder):
    """Runs a story with such a server and a link to it."""

    def run(story):
        async def main():
            server, servicer = grpc.aio.server(), Slow()
            rpc.add_CoreServicer_to_server(servicer, server)
            server.add_insecure_port(f"unix:{folder}/core.sock")
            await server.start()
            link = Link(f"unix:{folder}/core.sock")
            try:
                return await asyncio.wait_for(story(servicer, link), WITHIN_S)
            finally:
                await link.close()
                await server.stop(None)

        return asyncio.run(main())

    return run


REPORTS = [CheckpointsFound("n0", 1, ()), *(NodeDrained("n0", number) for number in range(20)), MemberReady("n0")]


def test_reports_follow_hello_in_order(slow):
    """Nobody who reports waits for the answer, and what is reported after it comes last."""

    async def story(servicer, link):
        attaching = asyncio.create_task(link.attach(MemberJoined(member())))
        while not servicer.heard:
            await asyncio.sleep(0.01)
        for report in REPORTS[:-1]:
            await link.report(report)
        assert servicer.heard == ["hello"]
        servicer.may_answer.set()
        await attaching
        await link.report(REPORTS[-1])
        while len(servicer.heard) <= len(REPORTS):
            await asyncio.sleep(0.01)
        return servicer.heard

    assert slow(story) == ["hello", *REPORTS]


def test_an_attempt_that_fails_keeps_nothing(slow):
    """The next Hello tells all of it; before the first there is nothing that it would not tell."""

    async def story(servicer, link):
        await link.report(REPORTS[0])
        attaching = asyncio.create_task(link.attach(MemberJoined(member()), 0.2))
        while not servicer.heard:
            await asyncio.sleep(0.01)
        await link.report(REPORTS[1])
        with pytest.raises(LinkBroken, match=r"no answer in 0\.2 s"):
            await attaching
        await link.report(REPORTS[2])
        servicer.may_answer.set()
        await asyncio.sleep(0.1)
        return servicer.heard

    assert slow(story) == ["hello"]
