"""The control path: coordinator, server and link over a real Unix socket; and the wire's words for every value."""

import asyncio
import contextlib
import shutil
import signal
import tempfile
from dataclasses import replace
from typing import get_args

import grpc
import grpc.aio
import pytest

from elastic_adapter.core.client import Link
from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.coordinator import Coordinator
from elastic_adapter.core.errors import Fenced, LinkBroken
from elastic_adapter.core.events import (
    CheckpointerClosed,
    CheckpointerOpened,
    CheckpointNoted,
    CheckpointPrepared,
    CheckpointPublished,
    CheckpointsFound,
    MemberJoined,
    MemberLeaving,
    MemberReady,
    NodeChecked,
    NodeDrained,
    NodeProgressed,
    NodeStopped,
    PortsOffered,
    RestoreFailed,
    SaveWanted,
    ShardReported,
    StacksDumped,
    StepsReached,
    StopRequested,
    WorkerErred,
    WorkerExited,
)
from elastic_adapter.core.memory import MemoryRegistry
from elastic_adapter.core.model import (
    Assignment,
    Check,
    CheckpointRef,
    Directive,
    Drain,
    Drop,
    Dump,
    Endpoint,
    Explain,
    Failed,
    Halt,
    Hold,
    Level,
    Mark,
    Member,
    Part,
    Pause,
    Peer,
    Prepare,
    Publish,
    Resume,
    Run,
    SaveAt,
    Settle,
    Shard,
    StackReport,
    Stopped,
    Succeeded,
    Verdict,
    Wait,
    WorkerExit,
)
from elastic_adapter.core.ports import Record
from elastic_adapter.core.restart import RestartPolicy
from elastic_adapter.core.server import Server
from elastic_adapter.core.wire import (
    Report,
    directive_from_wire,
    directive_to_wire,
    hello_from_wire,
    hello_to_wire,
    report_from_wire,
    report_to_wire,
)
from elastic_adapter.proto import control_pb2 as pb
from elastic_adapter.proto import control_pb2_grpc as rpc

WITHIN_S = 20.0


def member(node="n0", slots=2, ports=(29500, 29501)):
    return Member(node, "127.0.0.1", slots, order=0, ports=ports)


def failure(generation=1, rank=1, node="n0", **changes):
    values = {"code": 3, "signal": None, "at": 1794801518.25, "pid": 77, "detail_source": "stderr", "detail": "größe"}
    return WorkerExit(node, generation, rank, rank, **{**values, **changes})


class Stream:
    """An agent's stream, one directive at a time."""

    def __init__(self, address):
        self.link = Link(address)
        self._directives = None

    async def attach(self, member, running=None, exits=()):
        await self.link.attach(MemberJoined(member, running, running, exits))
        self._directives = self.link.directives()
        return self

    async def next(self):
        return await asyncio.wait_for(anext(self._directives), WITHIN_S)

    async def ended(self):
        with pytest.raises(StopAsyncIteration):
            await self.next()

    async def close(self):
        await self.link.close()


class Control:
    """A coordinator that leads behind a real server."""

    def __init__(self, folder, config):
        self.registry = MemoryRegistry()
        self._config = config
        self._address = f"unix:{folder}/core.sock"
        self._server = Server(self._address)
        self._streams = []

    async def __aenter__(self):
        await self._server.start()
        leader = await self.registry.campaign("n0", self._address)
        self.coordinator = Coordinator(self._config, self.registry, leader.epoch)
        self._server.serve(self.coordinator)
        self.leading = asyncio.create_task(self.coordinator.lead())
        return self

    async def __aexit__(self, *_):
        for stream in self._streams:
            await stream.close()
        self.leading.cancel()
        with contextlib.suppress(asyncio.CancelledError, Fenced):
            await self.leading
        await self._server.stop()

    async def stop(self):
        await self._server.stop()

    async def attach(self, member, running=None, exits=()):
        self._streams.append(Stream(self._address))
        return await self._streams[-1].attach(member, running, exits)

    async def status(self):
        async with grpc.aio.insecure_channel(self._address) as channel:
            return await rpc.CoreStub(channel).Status(pb.StatusRequest(), timeout=WITHIN_S)

    async def raw(self, *reports):
        """The answer to a stream of these very reports."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            call = rpc.CoreStub(channel).Attach(timeout=WITHIN_S)
            for report in reports:
                await call.write(report)
            await call.done_writing()
            with contextlib.suppress(grpc.aio.AioRpcError):
                _ = [directive async for directive in call]
            return await call.code(), await call.details()


@pytest.fixture
def folder():
    # Not tmp_path: the path of a Unix socket has to be short.
    path = tempfile.mkdtemp(prefix="elastic-test-")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def control(folder):
    """Runs a story with a coordinator of these settings, and gives what the story gives."""

    def run(story, **settings):
        async def main():
            async with Control(folder, JobConfig("job", **settings)) as control:
                return await story(control)

        return asyncio.run(main())

    return run


def test_join_is_answered_by_the_world(control):
    """A node that joins alone gets its part of the first world, with the port that it offered for the master."""

    async def story(control):
        stream = await control.attach(member())
        return await stream.next(), await control.registry.load()

    run, record = control(story)
    assert run == Run(
        Assignment(
            generation=1,
            restart_count=0,
            group_rank=0,
            group_size=1,
            rank_offset=0,
            slots=2,
            world_size=2,
            master=Endpoint("127.0.0.1", 29500),
            reason=run.assignment.reason,
            peers=(Peer("127.0.0.1", 2),),
        )
    )
    assert record.world.generation == 1


def test_failure_is_answered_by_the_next_generation(control):
    """A reported failure brings the next generation, on the next port, and the restart is charged and committed."""

    async def story(control):
        stream = await control.attach(member())
        await stream.next()
        await stream.link.report(WorkerExited(failure()))
        return (await stream.next()).assignment, await control.registry.load()

    assignment, record = control(story, policy=RestartPolicy(3))
    assert (assignment.generation, assignment.restart_count, assignment.master.port) == (2, 1, 29501)
    assert (record.world.generation, record.history.count) == (2, 1)


def test_failure_beyond_the_budget_halts_with_it(control):
    """When the budget is spent, the agent is told to halt, with the failure in all its words."""

    async def story(control):
        stream = await control.attach(member())
        await stream.next()
        await stream.link.report(WorkerExited(failure()))
        return await stream.next(), await control.registry.load()

    halt, record = control(story, policy=RestartPolicy(0))
    assert isinstance(halt.outcome, Failed)
    assert halt.outcome.first == failure()
    assert record.outcome == halt.outcome


def test_success_of_all_ranks_halts_the_job(control):
    """When all workers have ended with code 0, the outcome is committed and sent."""

    async def story(control):
        stream = await control.attach(member())
        await stream.next()
        for rank in range(2):
            await stream.link.report(WorkerExited(failure(rank=rank, code=0)))
        return await stream.next(), await control.registry.load()

    halt, record = control(story)
    assert halt == Halt(Succeeded())
    assert record.outcome == Succeeded()


@pytest.mark.parametrize("report", [StopRequested("n0", signal.SIGINT), MemberLeaving("n0", signal.SIGTERM)])
def test_signal_of_the_only_node_halts_it(control, report):
    """A signal to the only node ends the job with that signal."""

    async def story(control):
        stream = await control.attach(member())
        await stream.next()
        await stream.link.report(report)
        return await stream.next()

    halt = control(story)
    assert (type(halt.outcome), halt.outcome.signal) == (Stopped, report.signal)


def test_end_of_a_stream_is_the_loss_of_the_member(control):
    """When an agent's stream ends, however, its node is lost and the others hold until it is replaced."""

    async def story(control):
        streams = [await control.attach(member(node)) for node in ("n0", "n1")]
        for stream in streams:
            await stream.next()
        await streams[1].close()
        hold = await streams[0].next()
        back = await control.attach(member("n1"))
        await streams[0].link.report(PortsOffered("n0", (29600,)))
        return hold, (await streams[0].next()).assignment, (await back.next()).assignment

    hold, first, second = control(story, min_nodes=2, max_nodes=2)
    assert isinstance(hold, Hold)
    assert "n1" in hold.reason
    assert (first.generation, second.generation, first.group_size) == (2, 2, 2)
    assert {first.group_rank, second.group_rank} == {0, 1}


def test_new_stream_of_the_same_node_replaces_the_old(control):
    """An agent that opens another stream keeps its place: the old stream is ended and nothing is lost."""

    async def story(control):
        old = await control.attach(member())
        generation = (await old.next()).assignment.generation
        new = await control.attach(member(), running=generation)
        await old.ended()
        await new.link.report(WorkerExited(failure()))
        return (await new.next()).assignment.generation

    assert control(story, policy=RestartPolicy(3)) == 2


def test_exit_in_hello_counts(control):
    """An exit whose report was lost with a stream is taken from the Hello of the next one."""

    async def story(control):
        old = await control.attach(member())
        await old.next()
        new = await control.attach(member(), running=1, exits=(failure(),))
        return (await new.next()).assignment

    assignment = control(story, policy=RestartPolicy(3))
    assert (assignment.generation, assignment.restart_count) == (2, 1)


@pytest.mark.parametrize("reports", [(pb.Report(leaving=pb.Leaving(signal=15)),), (pb.Report(),), ()], ids=len)
def test_stream_must_begin_with_hello(control, reports):
    """A stream that begins with anything else is refused, and nobody has joined."""

    async def story(control):
        return await control.raw(*reports), await control.status()

    (code, details), status = control(story)
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "the first report on a stream must be Hello")
    assert (status.phase, len(status.members)) == ("gathering", 0)


def test_coordinator_that_is_not_there_is_a_broken_link(folder):
    """A link to an address where nobody listens is broken, with the reason."""

    async def main():
        stream = Stream(f"unix:{folder}/core.sock")
        try:
            with pytest.raises(LinkBroken, match="the connection ended"):
                await asyncio.wait_for(stream.attach(member()), WITHIN_S)
        finally:
            await stream.close()

    asyncio.run(main())


def test_coordinator_that_goes_is_a_broken_link(control):
    """A link whose server ends without a word is broken; what is reported afterwards is dropped, not raised."""

    async def story(control):
        stream = await control.attach(member())
        await stream.next()
        await control.stop()
        with pytest.raises(LinkBroken):
            await stream.next()
        await stream.link.report(NodeDrained("n0", 1))

    control(story)


def test_unknown_report_is_passed_over(control):
    """A report of a kind that this version does not know does not end the stream."""

    async def story(control):
        code, _ = await control.raw(hello_to_wire(MemberJoined(member())), pb.Report())
        return code

    assert control(story) == grpc.StatusCode.OK


def test_status_of_a_running_job(control):
    """The status says phase, generation, budget and who has which place; a spare has none."""

    async def story(control):
        before = await control.status()
        stream = await control.attach(member())
        await stream.next()
        await stream.link.report(WorkerExited(failure()))
        await stream.next()
        spare = await control.attach(member("n1"))
        status = await control.status()
        while len(status.members) < 2:
            status = await control.status()
        await spare.close()
        return before, status

    before, status = control(story, policy=RestartPolicy(3), level=Level.FAULT_TOLERANT)
    assert (before.phase, before.generation, before.world_size) == ("gathering", 0, 0)
    assert (status.job_id, status.phase, status.generation, status.world_size) == ("job", "running", 2, 2)
    assert (status.restarts_used, status.max_restarts, status.level) == (1, 3, 1)
    assert status.reason
    places = [(each.node, each.slots, each.HasField("group_rank")) for each in status.members]
    assert places == [("n0", 2, True), ("n1", 2, False)]
    assert status.members[0].group_rank == 0


def test_coordinator_stops_leading_when_it_is_fenced(control):
    """A coordinator whose commit is refused sends no world and ends with Fenced."""

    async def story(control):
        control.leading.cancel()
        control.coordinator.epoch = 7
        stale = asyncio.create_task(control.coordinator.lead())
        stream = await control.attach(member())
        with pytest.raises(Fenced):
            await asyncio.wait_for(stale, WITHIN_S)
        await stream.close()
        return await control.registry.load()

    assert control(story) == Record()


class Scripted(rpc.CoreServicer):
    """A server that sends these directives, whoever attaches, and then ends the stream."""

    def __init__(self, directives):
        self._directives = directives

    async def Attach(self, requests, context):  # noqa: N802 (the name is the protocol's)
        await anext(requests)
        await context.send_initial_metadata((("elastic-epoch", "1"),))
        for directive in self._directives:
            yield directive


def test_directives_of_an_older_leader_are_refused(folder):
    """The link passes over what comes with a lower epoch than it has seen, and kinds that it does not know."""
    sent = [(2, Hold("a")), (1, Hold("stale")), (2, Hold("b")), (3, Hold("c")), (2, Hold("stale too")), (3, Hold("d"))]
    messages = [directive_to_wire(epoch, directive) for epoch, directive in sent]

    async def main():
        server = grpc.aio.server()
        rpc.add_CoreServicer_to_server(Scripted([*messages, pb.Directive(epoch=3)]), server)
        server.add_insecure_port(f"unix:{folder}/core.sock")
        await server.start()
        link = Link(f"unix:{folder}/core.sock")
        try:
            await link.attach(MemberJoined(member()))
            return [directive.reason async for directive in link.directives()]
        finally:
            await link.close()
            await server.stop(None)

    assert asyncio.run(main()) == ["a", "b", "c", "d"]


EXITS = [
    failure(),
    failure(code=0, detail_source="", detail=""),
    failure(code=255, generation=2**40, rank=100_000),
    failure(code=None, signal=9, pid=0),
    failure(code=None, signal=64, detail="a\0b\n" + "x" * 100_000),
]
ASSIGNMENT = Assignment(
    generation=3,
    restart_count=2,
    group_rank=1,
    group_size=4,
    rank_offset=8,
    slots=8,
    world_size=32,
    master=Endpoint("fe80::1", 65535),
    reason="größe",
)
RESUMED = Assignment(
    **{
        **{name: getattr(ASSIGNMENT, name) for name in Assignment.__slots__},
        "resume_from": CheckpointRef(0, 2, "s3://bucket/0"),
        "start_delay_s": 1.25,
        "peers": (Peer("fe80::1", 8), Peer("b.example", 4)),
    }
)


CHECKPOINTS = (CheckpointRef(2**40, 3, "s3://bucket/größe"), CheckpointRef(0, 0, ""))
SHARDS = tuple(Shard(rank, 2**40, part, "the disk is full") for rank, part in enumerate(Part))
REPORTS = [
    PortsOffered("n0", ()),
    PortsOffered("n0", (1, 65535), 2**40),
    MemberReady("n0"),
    NodeStopped("n0", 3, "etcd is out of reach"),
    NodeDrained("n0", 0),
    NodeDrained("n0", 2**40),
    MemberLeaving("n0", 15),
    StopRequested("n0", 2),
    NodeProgressed("n0", 3, (Mark(), Mark(2**40, -1))),
    StacksDumped("n0", 3, (StackReport(7, "train.py:3 in load", "all_reduce", "File ...", "/logs/7", 70, 1.5),)),
    StacksDumped("n0", 3, ()),
    NodeChecked("n0"),
    NodeChecked("n0", "its disk is full"),
    *(WorkerExited(exit) for exit in EXITS),
    WorkerErred(EXITS[0]),
    CheckpointerOpened("n0", 2**40, 100_000),
    CheckpointerClosed("n0", 2**40, 100_000),
    CheckpointNoted("n0", 3, 7, "größe"),
    SaveWanted("n0", 3, "every 10 minutes"),
    StepsReached("n0", 3, 7, 2**40),
    *(ShardReported("n0", 3, shard) for shard in SHARDS),
    CheckpointPrepared("n0", 3, 2**40, "s3://bucket/größe"),
    CheckpointPrepared("n0", 3, 0, trouble="a checksum is wrong"),
    CheckpointPublished("n0", 3, 2**40),
    CheckpointPublished("n0", 3, 0, "no permission", ("step-1", "step-2")),
    CheckpointsFound("n0", 3, ()),
    CheckpointsFound("n0", 3, CHECKPOINTS),
    RestoreFailed("n0", 3, 7, "step-40", "a checksum is wrong"),
]


@pytest.mark.parametrize("report", REPORTS)
def test_reports_arrive_as_they_were(report):
    """Every report means the same event on the other side of the wire."""
    sent = pb.Report.FromString(report_to_wire(report).SerializeToString())
    assert report_from_wire(sent, "n0") == report


@pytest.mark.parametrize("running", [None, 0, 7])
@pytest.mark.parametrize("exits", [(), tuple(EXITS)], ids=len)
def test_hello_arrives_as_it_was(running, exits):
    """The state that an agent begins with arrives whole."""
    whole = replace(member(), order=3, control="10.0.0.1:7", warm=False)
    state = MemberJoined(whole, running, 9, exits, checking=running is None)
    wire = pb.Report.FromString(hello_to_wire(state).SerializeToString())
    assert hello_from_wire(wire, order=5) == state


@pytest.mark.parametrize("found", [None, (), CHECKPOINTS], ids=["not asked", "nothing", "some"])
@pytest.mark.parametrize(("savers", "shards"), [((), ()), ((0, 100_000), SHARDS)], ids=["no savers", "savers"])
def test_hello_tells_of_checkpoints(savers, shards, found):
    """That rank 0 found nothing is another thing than that it has not looked."""
    state = MemberJoined(replace(member(), order=3), 7, 7, savers=savers, shards=shards, found=found)
    wire = pb.Report.FromString(hello_to_wire(state).SerializeToString())
    assert hello_from_wire(wire, order=5) == state


def test_who_has_no_order_gets_one():
    """An agent that does not know its place in the queue is given the next one."""
    assert hello_from_wire(hello_to_wire(MemberJoined(member())), order=5).member.order == 5


DIRECTIVES = [
    Run(ASSIGNMENT),
    Run(RESUMED),
    Drain(3, 30.0, "n2 joined"),
    Drain(3, 0.0, ""),
    Hold("too few nodes"),
    Wait("generation 3 runs on 2 nodes"),
    Halt(Succeeded()),
    Halt(Succeeded("another reason")),
    Halt(Failed("no node came")),
    *(Halt(Failed("a worker failed", exit)) for exit in EXITS),
    Halt(Stopped("SIGINT on n0", 2)),
    Halt(Failed("a worker failed", EXITS[0], others=tuple(EXITS[1:]), more=7, restarts_left=0)),
    Dump(3, "no rank made a step"),
    Check("it failed twice"),
    Explain(Verdict(3, EXITS[0], tuple(EXITS[1:]), 7, "restart 1 of 3", 2)),
    Pause(2**40, 7, "n2 joins"),
    SaveAt(3, 7, 2**40, hold=True, reason="n2 joins"),
    SaveAt(3, 7, 0, hold=False, reason=""),
    SaveAt(3, 8, None, hold=False, reason="the change is called off"),
    Prepare(3, 2**40),
    Publish(2**40, 0),
    Settle(3, 2**40),
    Settle(3, 0, "it could not be given its name"),
    Drop(3, 2**40, "rank 1 on n1: größe"),
    Resume(3, CHECKPOINTS[0]),
    Resume(3, None),
]


@pytest.mark.parametrize("directive", DIRECTIVES)
def test_directives_and_outcomes_arrive_as_they_were(directive):
    """Every directive, and every outcome in it, is the same on the other side of the wire, with the leader's epoch."""
    sent = pb.Directive.FromString(directive_to_wire(9, directive).SerializeToString())
    assert sent.epoch == 9
    assert directive_from_wire(sent) == directive


@pytest.mark.parametrize(
    ("tried", "union"), [(REPORTS, Report), (DIRECTIVES, Directive)], ids=["reports", "directives"]
)
def test_no_kind_of_message_is_forgotten_here(tried, union):
    """Each that there is was sent above."""
    assert {type(each) for each in tried} == set(get_args(union))


def test_words_that_are_no_text_can_be_sent():
    """A traceback that names a file with undecodable bytes arrives, with these bytes shown in some other way."""
    exit = failure(detail="No such file: '\udcff'")
    sent = pb.Report.FromString(report_to_wire(WorkerExited(exit)).SerializeToString())
    heard = report_from_wire(sent, "n0").exit.detail
    assert heard.startswith("No such file: '")
    heard.encode()


def test_unknown_kinds_are_no_events():
    """What a later version may send means nothing to this one."""
    assert report_from_wire(pb.Report(), "n0") is None
    assert directive_from_wire(pb.Directive(epoch=1)) is None
