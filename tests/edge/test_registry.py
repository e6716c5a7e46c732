"""What every registry promises: one leader at a time, and a record that only the leader changes."""

import asyncio
import os
import signal
import subprocess
from dataclasses import replace

import pytest

from elastic_adapter.core.blame import Inquest
from elastic_adapter.core.codec import Card
from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.coordinator import Coordinator
from elastic_adapter.core.errors import Fenced, OutOfReach, RunOver, UserError
from elastic_adapter.core.etcd import AnswerLost, Etcd, created_at, delete_prefix, put
from elastic_adapter.core.events import CheckpointPrepared, MemberJoined, ShardReported
from elastic_adapter.core.memory import MemoryRegistry
from elastic_adapter.core.model import (
    CheckpointRef,
    Endpoint,
    Failed,
    Member,
    Part,
    Placement,
    Shard,
    Succeeded,
    WorkerExit,
    World,
)
from elastic_adapter.core.ports import Note, Record
from elastic_adapter.core.registry import Abandoned, Ended, Entered, EtcdRegistry, NodeTaken
from elastic_adapter.core.restart import Exclusion, Failure, History
from helpers.etcd_servers import binary, cluster

WORLD = World(
    generation=2,
    restart_count=1,
    placements=(Placement("n0", "10.0.0.1", 2, 0), Placement("n1", "10.0.0.2", 2, 2)),
    master=Endpoint("10.0.0.1", 29500),
    reason="rank 3 failed",
    resume_from=CheckpointRef(100, 1, "file:///ckpt/100"),
    start_delay_s=1.5,
)


def of_generation(number):
    return replace(WORLD, generation=number)


EXIT = WorkerExit("n1", 2, 1, 3, None, signal.SIGKILL, at=1794801518.5, pid=77, detail_source="stderr", detail="größe")
RECORDS = {
    "empty": Record(),
    "world": Record(WORLD, History().charge(12.5)),
    "success": Record(WORLD, History(), Succeeded()),
    "finished": Record(WORLD, History(), finished=frozenset({2, 3})),
    "failure": Record(WORLD, History().charge(1.0).charge(2.0), Failed("too many", EXIT)),
    "story": Record(WORLD, History(), Failed("too many", EXIT, others=(EXIT, EXIT), more=3, restarts_left=0)),
    "blame": Record(
        WORLD,
        History((1.0,), (Failure(3, "n1", "exited with code 7", True, 1.0, 41),), (Exclusion("n1", "it failed"),)),
        clock=12.5,
        inquest=Inquest(1, (EXIT, EXIT), "restart 1 of 3", 2, 77.5),
    ),
    "ledger": Record(
        WORLD,
        checkpoints=(CheckpointRef(2**40, 2, "file:///größe/step-2"), CheckpointRef(100, 1, "file:///ckpt/100")),
    ),
}


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("etcd"), 1) as (one,):
        yield one


class InEtcd:
    """A registry in a real etcd. Every call has a client of its own, as each comes from an event loop of its own."""

    def __init__(self, endpoint, job):
        self._endpoint, self._job = endpoint, job
        self._lease = None

    def __getattr__(self, name):
        async def call(*args, **options):
            etcd = Etcd([self._endpoint])
            registry = EtcdRegistry(etcd, self._job, Card("n0", "127.0.0.1:1", "first"))
            try:
                self._lease = self._lease or await etcd.grant(60)
                await registry.enter({}, "token")
                await registry.register(self._lease)
                return await getattr(registry, name)(*args, **options)
            finally:
                await etcd.close()

        return call


# Each gives a registry of a new job.
@pytest.fixture(params=["memory", "etcd"])
def registry(request):
    if request.param == "memory":
        return MemoryRegistry()
    endpoint = request.getfixturevalue("etcd_server").endpoint
    return InEtcd(endpoint, f"{request.node.name}-{os.getpid()}")


class TestRegistry:
    """The contract."""

    def test_first_to_campaign_leads(self, registry):
        """Whoever comes first leads; whoever comes later is told who does."""

        async def main():
            return await registry.campaign("n0", "unix:/a"), await registry.campaign("n1", "unix:/b")

        first, second = asyncio.run(main())
        assert first == second
        assert (first.node, first.address) == ("n0", "unix:/a")
        assert first.epoch > 0

    def test_campaign_can_be_repeated(self, registry):
        """A leader that asks again still leads, in the same epoch."""

        async def main():
            return [await registry.campaign("n0", "unix:/a") for _ in range(3)]

        first, *others = asyncio.run(main())
        assert others == [first, first]

    def test_nothing_is_committed_at_first(self, registry):
        """Before the first commit the record is empty."""
        assert asyncio.run(registry.load()) == Record()

    def test_notes_are_kept_in_order(self, registry):
        """What is written down is read back in order; twice is once; whoever does not lead may not write."""
        notes = tuple(Note(0, number, 1.5 * number, "exit", f"größe {number}") for number in (1, 2, 10))

        async def main():
            leader = await registry.campaign("n0", "unix:/a")
            mine = tuple(replace(each, epoch=leader.epoch) for each in notes)
            await registry.note(leader.epoch, mine[2:])
            await registry.note(leader.epoch, mine)
            with pytest.raises(Fenced):
                await registry.note(leader.epoch - 1, mine)
            return mine, await registry.notes()

        mine, found = asyncio.run(main())
        assert found == mine

    @pytest.mark.parametrize("name", RECORDS)
    def test_commit_of_the_leader_is_loaded_back(self, registry, name):
        """What the leader commits is what everybody loads, all of its values."""

        async def main():
            leader = await registry.campaign("n0", "unix:/a")
            await registry.commit(leader.epoch, RECORDS[name], after=0)
            return await registry.load()

        assert asyncio.run(main()) == RECORDS[name]

    def test_later_commit_replaces_the_earlier(self, registry):
        """A commit replaces the whole record."""

        async def main():
            leader = await registry.campaign("n0", "unix:/a")
            before = Record()
            for record in RECORDS.values():
                await registry.commit(leader.epoch, record, after=before.generation)
                before = await registry.load()
                assert before == record

        asyncio.run(main())

    @pytest.mark.parametrize("step", [-1, 1])
    def test_commit_of_another_epoch_is_fenced(self, registry, step):
        """A commit of an epoch that does not lead raises Fenced with both epochs and changes nothing."""

        async def main():
            leader = await registry.campaign("n0", "unix:/a")
            await registry.commit(leader.epoch, RECORDS["world"], after=0)
            with pytest.raises(Fenced) as caught:
                await registry.commit(leader.epoch + step, RECORDS["failure"], after=2)
            return leader.epoch, caught.value, await registry.load()

        epoch, error, record = asyncio.run(main())
        assert (error.epoch, error.current) == (epoch + step, epoch)
        assert record == RECORDS["world"]

    def test_commit_without_a_leader_is_fenced(self, registry):
        """Nobody commits before somebody leads."""

        async def main():
            with pytest.raises(Fenced):
                await registry.commit(1, RECORDS["world"], after=0)
            return await registry.load()

        assert asyncio.run(main()) == Record()

    @pytest.mark.parametrize("after", [0, 1, 3])
    def test_commit_of_who_missed_a_generation_is_fenced(self, registry, after):
        """Whoever leads and does not know what is committed changes nothing, and is told what it missed."""

        async def main():
            leader = await registry.campaign("n0", "unix:/a")
            await registry.commit(leader.epoch, RECORDS["world"], after=0)
            with pytest.raises(Fenced, match=f"generation 2 is committed, .* knows of generation {after}"):
                await registry.commit(leader.epoch, replace(RECORDS["ledger"], world=of_generation(after)), after=after)
            return await registry.load()

        assert asyncio.run(main()) == RECORDS["world"]

    @pytest.mark.parametrize("name", ["world", "success", "ledger"])
    def test_what_is_there_already_counts_as_committed(self, registry, name):
        """An answer that was lost is no reason to step down; but another world of the same number is."""

        async def main():
            leader = await registry.campaign("n0", "unix:/a")
            for _ in range(2):
                await registry.commit(leader.epoch, RECORDS[name], after=0)
            with pytest.raises(Fenced):
                await registry.commit(leader.epoch, RECORDS["blame"], after=0)
            return await registry.load()

        assert asyncio.run(main()) == RECORDS[name]

    def test_an_end_before_the_first_world_is_committed(self, registry):
        """It may be repeated as well."""
        end = Record(outcome=Succeeded(), ended_at=5.0)

        async def main():
            leader = await registry.campaign("n0", "unix:/a")
            for _ in range(2):
                await registry.commit(leader.epoch, end, after=0)
            return await registry.load()

        assert asyncio.run(main()) == end


SETTINGS = {"nnodes": "2:4", "framework": "torch"}


@pytest.fixture
def nodes(etcd_server, request):
    """Run a story of several agents of one job: ``agent(node)`` is a registered one."""

    def run(story, **options):
        async def main():
            etcd = Etcd([etcd_server.endpoint])

            def visitor(node, incarnation="1", through=etcd):
                card = Card(node, f"{node}:1", incarnation)
                return EtcdRegistry(through, f"{request.node.name}/{os.getpid()}", card, **options)

            async def agent(node, *how):
                registry = visitor(node, *how)
                entered = await registry.enter(SETTINGS, f"token of {node}")
                registry.lease = await etcd.grant(60)
                registry.order = await registry.register(registry.lease)
                registry.entered = entered
                return registry

            story.etcd, story.visitor = etcd, visitor
            try:
                return await story(agent)
            finally:
                await etcd.close()

        return asyncio.run(main())

    return run


class TestRuns:
    """Which run a start belongs to."""

    def test_all_agents_enter_one_run(self, nodes):
        """Those who come later get the run, and the token, of the first."""

        async def story(agent):
            return [(await agent(node)).entered for node in ("a", "b")]

        first, second = nodes(story)
        assert isinstance(first, Entered)
        assert first == second
        assert first.token == "token of a"

    def test_other_settings_are_refused_in_one_line(self, nodes):
        """A node whose settings differ is told what, whose, expected and got."""

        async def story(agent):
            await agent("a")
            with pytest.raises(UserError) as caught:
                await story.visitor("b").enter({**SETTINGS, "nnodes": "2:3"}, "t")
            return str(caught.value)

        words = nodes(story)
        assert "node b has --nnodes 2:3, but this job was started by node a with --nnodes 2:4: start" in words

    def test_all_that_differs_is_named(self, nodes):
        """One start tells everything that has to be changed."""

        async def story(agent):
            await agent("a")
            with pytest.raises(UserError) as caught:
                await story.visitor("b").enter({**SETTINGS, "nnodes": "2:3", "level": "9"}, "t")
            return str(caught.value)

        words = nodes(story)
        assert "has --nnodes 2:3, --level 9, but" in words
        assert "with --nnodes 2:4, --level not set: " in words

    def test_an_etcd_that_lost_the_run_fences_nobody(self, nodes):
        """Nobody else leads in it: it counts as out of reach, and what was begun with it goes on."""

        async def story(agent):
            a = await agent("a")
            leader = await a.campaign("a", "a:1")
            await a.commit(leader.epoch, Record(WORLD), after=0)
            await story.etcd.transact([], [delete_prefix(a.key("").split("/runs/")[0])])
            with pytest.raises(OutOfReach, match="lost its data"):
                await a.commit(leader.epoch, Record(WORLD, outcome=Succeeded()), after=2)
            with pytest.raises(RunOver, match="lost its data") as caught:
                await a.check_run()
            return caught.value.replaced

        assert nodes(story) is False

    def test_a_run_that_nobody_joined_does_not_bind(self, nodes):
        """A start that died before it took part leaves nothing that a later one could trip over."""

        async def story(agent):
            first = await story.visitor("a").enter({"nnodes": "9"}, "t")
            second = await story.visitor("b").enter(SETTINGS, "t")
            return first.run, second.run

        first, second = nodes(story)
        assert second > first

    def test_an_end_is_told_within_the_grace(self, nodes):
        """A start soon after the end gets the result; its time is that of the end."""

        async def story(agent):
            a = await agent("a")
            leader = await a.campaign("a", "a:1")
            await a.commit(leader.epoch, Record(WORLD, outcome=Succeeded(), ended_at=5.0), after=0)
            return a.run, await story.visitor("a", "2").enter(SETTINGS, "t")

        run, ended = nodes(story)
        assert ended == Ended(run, Succeeded(), 5.0)

    def test_a_start_after_the_grace_is_a_new_run(self, nodes):
        """Later starts meet nothing of the old run, whatever its settings were."""

        async def story(agent):
            a = await agent("a")
            leader = await a.campaign("a", "a:1")
            await a.commit(leader.epoch, Record(WORLD, outcome=Succeeded(), ended_at=5.0), after=0)
            await story.etcd.revoke(a.lease.id)
            b = story.visitor("b", "2")
            entered = await b.enter({"nnodes": "1"}, "t")
            return a.run, entered.run, await b.load(), await b.head()

        old, new, record, head = nodes(story, finished_grace_s=0)
        assert new > old
        assert record == Record()
        assert (head.leader, head.generation) == (None, 0)

    def test_keys_of_an_ended_run_are_under_a_lease(self, nodes):
        """All that is left of a run goes away by itself after the retention time."""

        async def story(agent):
            a = await agent("a")
            leader = await a.campaign("a", "a:1")
            await a.commit(leader.epoch, Record(WORLD), after=0)
            await a.commit(leader.epoch, Record(WORLD, outcome=Succeeded(), ended_at=5.0), after=2)
            base = a.key("").split("/runs/")[0]
            return (await story.etcd.get_prefix(base)).items

        items = nodes(story)
        assert len(items) == 6
        assert all(item.lease for item in items)

    def test_keys_of_a_run_whose_nodes_all_died_go_by_themselves(self, nodes):
        """They stay while an agent says that it is there, for longer than their lease, and go when none does."""

        async def story(agent):
            a = await agent("a")
            leader = await a.campaign("a", "a:1")
            await a.commit(leader.epoch, Record(WORLD), after=0)
            base = a.key("").split("/runs/")[0]
            (lease,) = {item.lease for item in (await story.etcd.get_prefix(base)).items} - {a.lease.id}
            there = asyncio.create_task(a.keep_run())
            await asyncio.sleep(3 * await story.etcd.keep_alive(lease))
            before = await story.etcd.get_prefix(base)
            there.cancel()
            await story.etcd.revoke(a.lease.id)
            gone = set()
            async for changes in story.etcd.watch(base, before.revision):
                gone |= {change.item.key for change in changes if change.deleted}
                if gone == {item.key for item in before.items}:
                    return len(gone)

        assert nodes(story, abandoned_s=1) == 5

    def test_a_run_without_members_and_without_an_end_is_abandoned(self, nodes):
        """Its last world's agents are named, so that somebody can look whether they live; then it can be discarded."""

        async def story(agent):
            a = await agent("a")
            leader = await a.campaign("a", "a:1")
            await a.commit(leader.epoch, Record(WORLD), after=0)
            await story.etcd.revoke(a.lease.id)
            visitor = story.visitor("b", "2")
            left = await visitor.enter({"nnodes": "1"}, "t")
            await visitor.discard()
            return left, await visitor.enter({"nnodes": "1"}, "t")

        left, entered = nodes(story)
        assert isinstance(left, Abandoned)
        assert left.agents == {"n0": "", "n1": ""}
        assert isinstance(entered, Entered)
        assert entered.run > left.run

    def test_a_run_that_somebody_leads_is_not_discarded(self, nodes):
        """Between looking and discarding somebody may have come."""

        async def story(agent):
            a = await agent("a")
            await a.campaign("a", "a:1")
            await story.visitor("b").discard()
            await a.discard()
            await a.check_run()

        nodes(story)

    def test_lost_data_and_a_newer_run_are_told_apart(self, nodes):
        """An agent whose run is gone knows whether another took its place."""

        async def story(agent):
            a = await agent("a")
            await a.discard()
            with pytest.raises(RunOver) as missing:
                await a.register(a.lease)
            await agent("b")
            with pytest.raises(RunOver) as newer:
                await a.campaign("a", "a:1")
            return missing.value.replaced, newer.value.replaced

        assert nodes(story) == (False, True)


class TestMembers:
    """Who takes part."""

    def test_members_are_numbered_as_they_come(self, nodes):
        """The order grows; the same agent keeps its own when it asks again."""

        async def story(agent):
            a, b = await agent("a"), await agent("b")
            return a.order, b.order, await a.register(a.lease), (await b.members())[0]

        first, second, again, members = nodes(story)
        assert first < second
        assert first == again
        assert members == {"a", "b"}

    def test_a_name_is_taken_once(self, nodes):
        """A second agent with a node's name learns where the first one listens, and can take over if that is dead."""

        async def story(agent):
            await agent("a")
            second = await agent("a", "2")
            taken = second.order
            assert await second.take_over(taken.revision)
            return taken, await second.register(second.lease)

        taken, order = nodes(story)
        assert isinstance(taken, NodeTaken)
        assert taken.card == Card("a", "a:1", "1")
        assert isinstance(order, int)

    def test_an_agent_registers_again_under_a_new_lease(self, nodes):
        """An agent that lost its lease is a member again under another one, before or after the key is gone."""

        async def story(agent):
            a = await agent("a")
            lease = await story.etcd.grant(60)
            before = await a.register(lease)
            await story.etcd.revoke(a.lease.id)
            assert (await a.members())[0] == {"a"}
            await story.etcd.revoke(lease.id)
            after = await a.register(await story.etcd.grant(60))
            return before, after, (await a.members())[0]

        before, after, members = nodes(story)
        assert before < after
        assert members == {"a"}

    def test_leases_that_end_and_begin_are_seen(self, nodes):
        """The end of a lease is seen as the departure of its node; names may hold any characters."""

        async def story(agent):
            a, b = await agent("a"), await agent("b/ü 1")
            presence = a.presence(*await a.members())
            await story.etcd.revoke(b.lease.id)
            gone = await asyncio.wait_for(anext(presence), 10)
            await b.register(await story.etcd.grant(60))
            return gone, await asyncio.wait_for(anext(presence), 10)

        assert nodes(story) == (("b/ü 1", False), ("b/ü 1", True))


class TestSuccession:
    """Who leads."""

    def test_a_dead_leader_is_deposed_with_its_membership(self, nodes):
        """One transaction: the successor leads in a later epoch, and the dead one's member key is gone."""

        async def story(agent):
            a, b = await agent("a"), await agent("b")
            old = await a.campaign("a", "a:1")
            new = await b.depose(old, "b:1")
            with pytest.raises(Fenced) as fenced:
                await a.commit(old.epoch, Record(WORLD), after=0)
            await b.commit(new.epoch, Record(WORLD), after=0)
            return old, new, fenced.value, (await b.members())[0]

        old, new, fenced, members = nodes(story)
        assert (new.node, new.address) == ("b", "b:1")
        assert new.epoch > old.epoch
        assert (fenced.epoch, fenced.current) == (old.epoch, new.epoch)
        assert members == {"b"}

    def test_control_of_fencing(self, nodes, monkeypatch):
        """Without the comparison the deposed leader's commit would go through, and undo its successor's."""

        async def story(agent):
            a, b = await agent("a"), await agent("b")
            old = await a.campaign("a", "a:1")
            new = await b.depose(old, "b:1")
            await b.commit(new.epoch, Record(of_generation(3)), after=0)
            monkeypatch.setattr("elastic_adapter.core.registry.modified_at", lambda key, _: created_at(key + "-", 0))
            await a.commit(old.epoch, Record(WORLD), after=3)
            return await b.load()

        assert nodes(story).world.generation == 2

    def test_only_one_deposes_a_leader(self, nodes):
        """Whoever is second learns who leads."""

        async def story(agent):
            a, *others = [await agent(node) for node in "abcd"]
            old = await a.campaign("a", "a:1")
            return await asyncio.gather(*(each.depose(old, f"{each.me.node}:1") for each in others))

        first, *rest = nodes(story)
        assert all(each == first for each in rest)

    def test_a_restarted_agent_of_the_dead_leader_stays_a_member(self, nodes):
        """Its node's new agent took over the name before the dead leader was deposed: that card is not removed."""

        async def story(agent):
            a, b = await agent("a"), await agent("b")
            old = await a.campaign("a", "a:1")
            fresh = story.visitor("a", "2")
            fresh.me = Card("a", "a:2", "2")
            await fresh.enter(SETTINGS, "t")
            taken = await fresh.register(await story.etcd.grant(60))
            await fresh.take_over(taken.revision)
            await b.depose(old, "b:1")
            return (await b.members())[0]

        assert nodes(story) == {"a", "b"}

    def test_a_leader_resigns(self, nodes):
        """After that the next to campaign leads at once, in a later epoch."""

        async def story(agent):
            a, b = await agent("a"), await agent("b")
            old = await a.campaign("a", "a:1")
            await a.resign(old.epoch)
            return old, await b.campaign("b", "b:1")

        old, new = nodes(story)
        assert new.node == "b"
        assert new.epoch > old.epoch


class Detained:
    """An etcd whose answers to transactions are lost, one way or the other."""

    def __init__(self, etcd):
        self._etcd = etcd
        self._held = []
        # What becomes of the next one: it is "held" back on its way, or its "answer" is.
        self.loses = ""

    def __getattr__(self, name):
        return getattr(self._etcd, name)

    async def transact(self, *request):
        loses, self.loses = self.loses, ""
        if loses == "held":
            self._held.append(request)
            raise AnswerLost("it is on its way")
        answer = await self._etcd.transact(*request)
        if loses == "answer":
            raise AnswerLost("its answer was lost")
        return answer

    async def release(self):
        """Let what is on its way arrive; whether it was done."""
        held, self._held = self._held, []
        return [(await self._etcd.transact(*request)).succeeded for request in held]


LEDGERS = [(CheckpointRef(100 * number, 2, f"/ckpt/{number}"),) for number in (1, 2)]
FIRST, SECOND = (Record(WORLD, checkpoints=each) for each in LEDGERS)
END = Record(WORLD, outcome=Succeeded(), ended_at=5.0)


class TestLateWrites:
    """A write whose answer was lost may be done much later, or may have been done."""

    def leads(self, nodes, story):
        """A leader that has committed a world, on an etcd that loses answers."""

        async def play(agent):
            etcd = Detained(play.etcd)
            a = await agent("a", "1", etcd)
            leader = await a.campaign("a", "a:1")
            await a.commit(leader.epoch, Record(WORLD), after=0)
            return await story(a, leader.epoch, etcd)

        return nodes(play)

    @pytest.mark.parametrize(
        ("late", "next"),
        [
            pytest.param(FIRST, Record(of_generation(3), checkpoints=LEDGERS[1]), id="a checkpoint after a world"),
            pytest.param(Record(of_generation(3)), Record(of_generation(3), checkpoints=LEDGERS[1]), id="a world"),
            pytest.param(FIRST, SECOND, id="a checkpoint after another"),
            pytest.param(FIRST, END, id="a checkpoint after the end"),
        ],
    )
    def test_what_comes_late_changes_nothing(self, nodes, late, next):
        """The leader went on without it: what was committed since stays, and the generation that all agents watch."""

        async def story(a, epoch, etcd):
            etcd.loses = "held"
            with pytest.raises(AnswerLost):
                await a.commit(epoch, late, after=2)
            await a.commit(epoch, next, after=2)
            done = await etcd.release()
            return done, await a.load(), (await a.head()).generation

        assert self.leads(nodes, story) == ([False], next, next.generation)

    @pytest.mark.parametrize(
        "first",
        [
            pytest.param(FIRST, id="a checkpoint"),
            pytest.param(Record(of_generation(3)), id="a world"),
            pytest.param(END, id="an end"),
        ],
    )
    def test_what_was_done_without_an_answer_can_be_repeated(self, nodes, first):
        """The leader goes on from there."""

        async def story(a, epoch, etcd):
            etcd.loses = "answer"
            with pytest.raises(AnswerLost):
                await a.commit(epoch, first, after=2)
            await a.commit(epoch, first, after=2)
            found = await a.load()
            following = replace(first, checkpoints=LEDGERS[1])
            await a.commit(epoch, following, after=first.generation)
            return found, await a.load() == following

        assert self.leads(nodes, story) == (first, True)

    def test_what_was_done_without_an_answer_need_not_be(self, nodes):
        """A checkpoint that was entered, without a word, does not keep the next world from being committed."""

        async def story(a, epoch, etcd):
            etcd.loses = "answer"
            with pytest.raises(AnswerLost):
                await a.commit(epoch, FIRST, after=2)
            await a.commit(epoch, Record(of_generation(3)), after=2)
            return await a.load()

        assert self.leads(nodes, story) == Record(of_generation(3))

    def test_a_checkpoint_of_a_deposed_leader_is_fenced(self, nodes):
        """It had all parts, and asks the ledger; but somebody else leads the same world meanwhile."""

        async def story(agent):
            a, b = await agent("a"), await agent("b")
            old = await a.campaign("a", "a:1")
            record = Record(replace(WORLD, placements=WORLD.placements[:1]))
            await a.commit(old.epoch, record, after=0)
            deposed = Coordinator(JobConfig("job"), a, old.epoch, record)
            new = await b.depose(old, "b:1")
            deposed.post(MemberJoined(Member("n0", "10.0.0.1", 2, order=1), 2, 2, savers=(0, 1)))
            for rank in (0, 1):
                deposed.post(ShardReported("n0", 2, Shard(rank, 200, Part.WRITTEN)))
            deposed.post(CheckpointPrepared("n0", 2, 200, "/ckpt/200"))
            with pytest.raises(Fenced) as fenced:
                await asyncio.wait_for(deposed.lead(), 10)
            await deposed.close()
            return old, new, fenced.value, await b.load() == record

        old, new, fenced, untouched = nodes(story)
        assert (fenced.epoch, fenced.current) == (old.epoch, new.epoch)
        assert untouched


class TestHead:
    """What all agents watch."""

    def test_changes_are_followed(self, nodes):
        """A new leader and a new generation are seen by everybody, in order."""

        async def story(agent):
            a, b = await agent("a"), await agent("b")
            heads = b.heads(await b.head())
            leader = await a.campaign("a", "a:1")
            seen = [await asyncio.wait_for(anext(heads), 10)]
            await a.commit(leader.epoch, Record(WORLD), after=0)
            seen.append(await asyncio.wait_for(anext(heads), 10))
            await story.etcd.revoke(a.lease.id)
            seen.append(await asyncio.wait_for(anext(heads), 10))
            return leader, [(head.leader, head.generation) for head in seen]

        leader, seen = nodes(story)
        assert seen == [(leader, 0), (leader, 2), (None, 2)]

    def test_a_gap_in_the_history_is_made_up_for(self, nodes, etcd_server):
        """What was compacted before it was seen is told as what is there now, deletions included."""

        async def story(agent):
            a, b = await agent("a"), await agent("b")
            leader = await a.campaign("a", "a:1")
            head = await b.head()
            await a.commit(leader.epoch, Record(WORLD), after=0)
            await a.resign(leader.epoch)
            revision = (await story.etcd.transact([], [put(a.key("x"), b"")])).revision
            compact = [binary("etcdctl"), "--endpoints", etcd_server.endpoint, "compact", str(revision)]
            subprocess.run(compact, env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True)
            seen = head
            heads = b.heads(head)
            while seen.generation != 2 or seen.leader is not None:
                seen = await asyncio.wait_for(anext(heads), 10)
            return seen

        assert nodes(story).generation == 2
