"""A coordinator that leads over TCP: who is silent, who is lost, and what becomes of those who hear of it."""

import asyncio
import contextlib
import logging
import socket

import grpc
import grpc.aio
import pytest

from elastic_adapter.core import coordinator
from elastic_adapter.core.client import Link
from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.coordinator import Coordinator
from elastic_adapter.core.errors import Fenced, LinkBroken, NotLeading, OutOfReach
from elastic_adapter.core.events import MemberJoined, WorkerExited
from elastic_adapter.core.memory import MemoryRegistry
from elastic_adapter.core.model import Endpoint, Hold, Level, Member, Placement, Run, WorkerExit, World
from elastic_adapter.core.ports import Record
from elastic_adapter.core.restart import RestartPolicy
from elastic_adapter.core.server import Server
from elastic_adapter.core.succession import Answer
from elastic_adapter.core.wire import hello_to_wire, is_ping
from elastic_adapter.proto import control_pb2_grpc as rpc

WITHIN_S = 20.0
TOKEN = "4f1d0c"


class Outage(MemoryRegistry):
    """A registry that does not answer while it is down."""

    def __init__(self):
        super().__init__()
        self.down = False
        self.asked = 0
        # What a question takes at least before it is known to be in vain.
        self.takes_s = 0.02

    async def commit(self, epoch, record, *, after):
        self.asked += 1
        if self.down:
            await asyncio.sleep(self.takes_s)
            raise OutOfReach("nobody answers")
        await super().commit(epoch, record, after=after)


class Agent:
    """A node as its coordinator sees it: a port, and a stream whose directives are collected, and pings answered."""

    def __init__(self, node, address):
        self.node = node
        self._address = address
        self._port = socket.create_server(("127.0.0.1", 0))
        self.control = f"127.0.0.1:{self._port.getsockname()[1]}"
        self.member = Member(node, "127.0.0.1", 1, order=0, ports=(29500, 29501, 29502), control=self.control)
        self.link = None
        self._directives = asyncio.Queue()
        self._reading = None
        self._raw = []

    async def attach(self, running=None, **options):
        self.link = Link(self._address, options.pop("token", TOKEN), **options)
        await asyncio.wait_for(self.link.attach(MemberJoined(self.member, running, running)), WITHIN_S)
        self._reading = asyncio.create_task(self._read(self.link))
        return self

    async def _read(self, link):
        with contextlib.suppress(LinkBroken):
            async for directive in link.directives():
                self._directives.put_nowait(directive)

    async def attach_mutely(self):
        """A stream on which nothing is ever said after the hello: gRPC answers for its connection, the agent does not."""
        channel = grpc.aio.insecure_channel(self._address)
        call = rpc.CoreStub(channel).Attach(metadata=(("elastic-token", TOKEN),))
        await call.write(hello_to_wire(MemberJoined(self.member)))
        await call.initial_metadata()
        self._raw.append((channel, call))
        return call

    async def next(self):
        return await asyncio.wait_for(self._directives.get(), WITHIN_S)

    @property
    def heard_nothing(self):
        return self._directives.empty()

    async def hang_up(self):
        """End the stream, and go on listening."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self.link is not None:
            await self.link.close()
            self.link = None

    def refuse(self):
        """Nobody listens there any more."""
        self._port.close()

    async def close(self):
        await self.hang_up()
        for channel, call in self._raw:
            call.cancel()
            await channel.close()
        self._port.close()


class Site:
    """A coordinator that leads behind a server, and agents."""

    def __init__(self, record=None, registry_answers=True, **settings):
        self.config = JobConfig("job", **settings)
        self.registry = Outage()
        self.registry_answers = registry_answers
        self._record = record
        self.server = Server("127.0.0.1:0", TOKEN)
        self.address = f"127.0.0.1:{self.server.port}"
        self._agents = []

    async def __aenter__(self):
        await self.server.start()
        leader = await self.registry.campaign("leader", self.address)
        if self._record is not None:
            await self.registry.commit(leader.epoch, self._record, after=0)
        self.coordinator = Coordinator(
            self.config, self.registry, leader.epoch, self._record, lambda: self.registry_answers
        )
        return self

    def lead(self):
        self.server.serve(self.coordinator)
        self.leading = asyncio.create_task(self.coordinator.lead())

    async def __aexit__(self, *_):
        for agent in self._agents:
            await agent.close()
        await self.coordinator.close()
        if (leading := getattr(self, "leading", None)) is not None:
            leading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Fenced, OutOfReach):
                await leading
        await self.server.stop()

    def agent(self, node):
        self._agents.append(Agent(node, self.address))
        return self._agents[-1]

    async def world(self, *nodes):
        """Agents that attach and get the first world."""
        agents = [self.agent(node) for node in nodes]
        for agent in agents:
            await agent.attach()
        for agent in agents:
            assert (await agent.next()).assignment.generation == 1
        return agents

    async def until(self, found):
        async def wait():
            while not found():
                assert not self.leading.done(), self.leading
                await asyncio.sleep(0.01)

        await asyncio.wait_for(wait(), WITHIN_S)

    @property
    def absent(self):
        return self.coordinator.job.absent

    @property
    def members(self):
        return {member.node for member in self.coordinator.job.members}


@pytest.fixture
def told(caplog):
    """What the coordinator told people; it is asked when the story is over, or in it."""
    caplog.set_level(logging.INFO, "elastic_adapter")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


@pytest.fixture
def play():
    """Runs a story at a site of these settings; by default any one node may go."""

    def run(story, *, lead=True, **settings):
        common = {"min_nodes": 1, "max_nodes": 2, "level": Level.ELASTIC, "quiet_s": 30.0, "blame_s": 0.0}

        async def main():
            async with Site(**{**common, **settings}) as site:
                if lead:
                    site.lead()
                return await story(site)

        return asyncio.run(main())

    return run


class TestStreamsThatEnd:
    """A stream that ends proves nothing; a port that refuses does."""

    def test_whoever_listens_is_silent(self, play, told):
        """It may come back, on another stream, and then nothing has happened to anybody."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            await second.hang_up()
            await site.until(lambda: site.absent == {"n1"})
            assert "node n1 is silent: it listens, but its stream ended" in told()
            await second.attach(running=1)
            await site.until(lambda: not site.absent)
            assert site.members == {"n0", "n1"}
            assert first.heard_nothing
            assert second.heard_nothing
            assert site.coordinator.job.world.generation == 1

        play(story)
        assert "is lost" not in told()

    def test_whose_port_refuses_is_lost(self, play, told):
        """The others go on without it at once."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            second.refuse()
            await second.hang_up()
            run = await first.next()
            assert (run.assignment.generation, run.assignment.world_size) == (2, 1)
            return second.control

        control = play(story)
        assert f"node n1 is lost: nobody listens at {control} any more" in told()
        assert "is silent" not in told()

    def test_whoever_is_silent_is_watched(self, play, told):
        """A silent agent that dies after all is lost."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            await second.hang_up()
            await site.until(lambda: site.absent == {"n1"})
            assert first.heard_nothing
            second.refuse()
            assert (await first.next()).assignment.generation == 2

        play(story)

    def test_a_spare_without_a_stream_is_not_waited_for(self, play, told):
        """No workers of it can be running."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            spare = await site.agent("n2").attach()
            await site.until(lambda: "n2" in site.members)
            await spare.hang_up()
            await site.until(lambda: "n2" not in site.members)
            assert not site.absent
            assert first.heard_nothing
            assert second.heard_nothing

        play(story)

    def test_silence_beside_a_silent_registry_stops_the_rest(self, play, told):
        """What is left of the world can only hang, and nothing can be committed: it is held."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            site.registry_answers = False
            await second.hang_up()
            hold = await first.next()
            assert isinstance(hold, Hold)
            assert "etcd is out of reach, and so is n1" in hold.reason

        play(story)

    def test_a_registry_that_goes_silent_later_does_too(self, play, told):
        """A member was silent already when the registry went; with all members there nothing is done."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            site.coordinator.registry_is_silent()
            await second.hang_up()
            await site.until(lambda: site.absent == {"n1"})
            assert first.heard_nothing
            site.coordinator.registry_is_silent()
            hold = await first.next()
            assert isinstance(hold, Hold)
            assert "etcd is out of reach, and so is n1" in hold.reason

        play(story)


class TestLeasesThatEnd:
    """Whoever's lease has ended is asked; whoever answers is here."""

    def test_whoever_answers_is_not_lost(self, play, told):
        """Its stream stands, and its agent answers on it."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            site.coordinator.lease_ended("n1")
            asking = site.coordinator._tasks["n1"]
            await asyncio.wait_for(asking, WITHIN_S)
            assert site.coordinator._answered["n1"].is_set()
            assert site.members == {"n0", "n1"}
            assert first.heard_nothing
            assert second.heard_nothing

        play(story)
        assert "is lost" not in told()

    def test_whoever_does_not_answer_is_lost(self, play, told):
        """Its stream stands, its port is open, and its connection is alive; but nobody is at home."""

        async def story(site):
            first, second = site.agent("n0"), site.agent("n1")
            await first.attach()
            call = await second.attach_mutely()
            assert (await first.next()).assignment.generation == 1
            site.coordinator.lease_ended("n1")
            run = await first.next()
            assert (run.assignment.generation, run.assignment.world_size) == (2, 1)
            # It was asked, and its stream is over.
            received = [message async for message in call]
            assert is_ping(received[-1])
            assert await call.code() == grpc.StatusCode.OK

        play(story)
        assert "node n1 is lost: its lease ended and it did not answer in 1 s" in told()

    def test_without_a_stream_it_is_given_up(self, play, told):
        """It listens, but its lease has ended: that is what was waited for."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            await second.hang_up()
            await site.until(lambda: site.absent == {"n1"})
            assert first.heard_nothing
            site.coordinator.lease_ended("n1")
            assert (await first.next()).assignment.generation == 2
            assert not site.absent

        play(story)
        assert "node n1 is lost: its lease ended and it has no stream" in told()

    def test_a_stream_that_ends_after_its_lease_is_not_waited_for(self, play, told):
        """Whoever answered without a lease has only the stream."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            site.coordinator.lease_ended("n1")
            await asyncio.wait_for(site.coordinator._tasks["n1"], WITHIN_S)
            await second.hang_up()
            assert (await first.next()).assignment.generation == 2

        play(story)
        assert "its lease ended and it has no stream" in told()

    def test_a_new_lease_makes_good(self, play, told):
        """Whoever has a lease again may lose its stream, and be waited for."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            site.coordinator.lease_ended("n1")
            await asyncio.wait_for(site.coordinator._tasks["n1"], WITHIN_S)
            site.coordinator.lease_began("n1")
            await second.hang_up()
            await site.until(lambda: site.absent == {"n1"})
            assert first.heard_nothing

        play(story)
        assert "is lost" not in told()

    def test_whoever_was_given_up_is_told_when_it_comes(self, play, told):
        """Its generation is over: what it still runs must end."""

        async def story(site):
            first, second = await site.world("n0", "n1")
            await second.hang_up()
            await site.until(lambda: site.absent == {"n1"})
            site.coordinator.lease_ended("n1")
            assert (await first.next()).assignment.generation == 2
            await second.attach(running=1)
            hold = await second.next()
            assert isinstance(hold, Hold)
            assert "generation 1 is over" in hold.reason
            assert first.heard_nothing

        play(story)


def failure(node="n0", generation=1, rank=0):
    return WorkerExited(WorkerExit(node, generation, 0, rank, code=None, signal=9, at=0.0))


class TestRegistryOutage:
    """A world is committed before it is sent; while that can't be done, all hold."""

    def test_members_hold_and_then_go_on(self, play, told):
        """They are told once, and get the world when it is committed."""

        async def story(site):
            agents = await site.world("n0", "n1")
            site.registry.down = True
            await agents[0].link.report(failure())
            for agent in agents:
                hold = await agent.next()
                assert isinstance(hold, Hold)
                assert "etcd is out of reach: the next world can't be committed" in hold.reason
            asked = site.registry.asked
            await site.until(lambda: site.registry.asked > asked)
            assert (await site.registry.load()).world.generation == 1
            site.registry.down = False
            for agent in agents:
                run = await agent.next()
                assert (run.assignment.generation, run.assignment.restart_count) == (2, 1)
            assert (await site.registry.load()).world.generation == 2
            assert site.coordinator.record == await site.registry.load()

        play(story, policy=RestartPolicy(3), lease_s=15)
        assert told().count("what comes next can't be committed") == 1

    def test_it_ends_with_the_lease(self, play):
        """By then somebody else may lead: this one ends, and has sent no world."""

        async def story(site):
            agents = await site.world("n0", "n1")
            site.registry.down = True
            await agents[0].link.report(failure())
            with pytest.raises(OutOfReach):
                await asyncio.wait_for(site.leading, WITHIN_S)
            for agent in agents:
                assert isinstance(await agent.next(), Hold)
                assert agent.heard_nothing
            assert (await site.registry.load()).world.generation == 1

        play(story, policy=RestartPolicy(3), lease_s=2)

    def test_a_registry_that_refuses_at_once_is_not_flooded(self, play):
        """An etcd without a leader, without space or without rights answers at once: that is no reason to hurry."""

        async def story(site):
            agents = await site.world("n0", "n1")
            site.registry.down = True
            site.registry.takes_s = 0.0
            asked = site.registry.asked
            await agents[0].link.report(failure())
            with pytest.raises(OutOfReach):
                await asyncio.wait_for(site.leading, WITHIN_S)
            assert site.registry.asked - asked < 1000

        play(story, policy=RestartPolicy(3), lease_s=2)


def committed(*agents, generation=3):
    """A record with a world of these agents."""
    placements = tuple(
        Placement(agent.node, "127.0.0.1", 1, number, agent.control) for number, agent in enumerate(agents)
    )
    return Record(World(generation, 0, placements, Endpoint("127.0.0.1", 29000), "a test made it"))


class TestSuccession:
    """A new leader goes on with what was committed."""

    def resumed(self, story, **settings):
        async def main():
            ports = [Agent(node, "") for node in ("n0", "n1")]
            common = {"min_nodes": 1, "max_nodes": 2, "level": Level.ELASTIC, "policy": RestartPolicy(3)}
            async with Site(committed(*ports), **{**common, **settings}) as site:
                for agent in ports:
                    agent._address = site.address
                try:
                    site.lead()
                    await story(site, *ports)
                finally:
                    for agent in ports:
                        await agent.close()

        asyncio.run(main())

    def test_those_who_run_its_world_get_nothing(self, told):
        """Their workers are not disturbed; what they hear first is about what happens next."""

        async def story(site, first, second):
            assert site.absent == {"n0", "n1"}
            for agent in (first, second):
                await agent.attach(running=3)
            await site.until(lambda: not site.absent)
            assert site.members == {"n0", "n1"}
            await second.link.report(failure("n1", 3, 1))
            for agent in (first, second):
                assert (await agent.next()).assignment.generation == 4

        self.resumed(story)
        assert "is lost" not in told()

    def test_who_has_not_seen_its_world_gets_it(self):
        """The leader before died between the commit and the message."""

        async def story(site, first, second):
            await first.attach(running=3)
            await second.attach(running=2)
            run = await second.next()
            assert isinstance(run, Run)
            assert (run.assignment.generation, run.assignment.group_rank) == (3, 1)
            assert first.heard_nothing

        self.resumed(story)

    def test_who_does_not_come_and_refuses_is_lost(self, told):
        """A member that died with the leader before: its port tells."""

        async def story(site, first, second):
            second.refuse()
            await first.attach(running=3)
            run = await first.next()
            assert (run.assignment.generation, run.assignment.world_size) == (4, 1)

        self.resumed(story)
        assert "node n1 is lost: nobody listens at" in told()

    def test_who_does_not_come_but_listens_is_waited_for(self):
        """It may be on its way; the world is not replaced before its lease has ended."""

        async def story(site, first, second):
            await first.attach(running=3)
            await site.until(lambda: site.absent == {"n1"})
            for _ in range(20):
                await asyncio.sleep(0.05)
                assert first.heard_nothing
            site.coordinator.lease_ended("n1")
            assert (await first.next()).assignment.generation == 4

        self.resumed(story)

    def test_who_came_while_it_was_looked_for_is_here(self, monkeypatch, told):
        """asyncio.wait_for gives an answer that is just there to whoever was cancelled: the cancellation is lost."""
        looks = []

        async def answers_all_the_same(control):
            looks.append(control)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(WITHIN_S if len(looks) <= 2 else 0)
            return Answer.OPEN

        monkeypatch.setattr(coordinator, "probe", answers_all_the_same)

        async def story(site, first, second):
            await site.until(lambda: len(looks) == 2)
            before = site.coordinator._tasks.copy()
            assert before.keys() == {"n0", "n1"}
            for agent in (first, second):
                await agent.attach(running=3)
            # The looks that are over, or that say more than once what they saw, have said it by then.
            await site.until(lambda: all(task.done() for task in before.values()) or len(looks) > 12)
            assert site.members == {"n0", "n1"}
            assert not site.absent

        self.resumed(story)
        assert "is silent" not in told()


class TestAdmission:
    """Only agents of this run get in, and only where somebody leads."""

    @pytest.mark.parametrize("token", ["", "another token"])
    def test_a_wrong_token_is_refused(self, play, told, token):
        """With its own words: it is no reason to look for another leader."""

        async def story(site):
            agent = site.agent("n0")
            with pytest.raises(LinkBroken, match="UNAUTHENTICATED") as caught:
                await agent.attach(token=token)
            assert not isinstance(caught.value, NotLeading)
            assert not site.members
            assert token == "" or token not in told()

        play(story)
        assert "it did not show the token of this run" in told()
        assert TOKEN not in told()

    def test_a_server_that_does_not_lead_says_so(self, play):
        """Before it leads, and after it has."""

        async def story(site):
            with pytest.raises(NotLeading, match="does not lead"):
                await site.agent("n0").attach()
            site.lead()
            first = await site.agent("n1").attach()
            site.server.serve(None)
            await first.hang_up()
            with pytest.raises(NotLeading):
                await first.attach()

        play(story, lead=False)

    def test_a_token_is_asked_for_first(self, play):
        """A stranger is not even told whether somebody leads here."""

        async def story(site):
            with pytest.raises(LinkBroken, match="UNAUTHENTICATED"):
                await site.agent("n0").attach(token="x")

        play(story, lead=False)

    def test_an_earlier_leader_is_refused(self, play):
        """Whoever has heard of a later epoch does not follow one before it; the same epoch and a later one will do."""

        async def story(site):
            site.coordinator.epoch = 4
            with pytest.raises(NotLeading, match="epoch 4, which is over"):
                await site.agent("n0").attach(epoch=5)
            for number, epoch in enumerate((4, 3), 1):
                agent = await site.agent(f"n{number}").attach(epoch=epoch)
                assert agent.link.epoch == 4

        play(story)
