"""What every registry promises: one leader at a time, and a record that only the leader changes."""

import asyncio
import signal

import pytest

from elastic_adapter.core.errors import Fenced
from elastic_adapter.core.memory import MemoryRegistry
from elastic_adapter.core.model import CheckpointRef, Endpoint, Failed, Placement, Succeeded, WorkerExit, World
from elastic_adapter.core.ports import Record
from elastic_adapter.core.restart import History

WORLD = World(
    generation=2,
    restart_count=1,
    placements=(Placement("n0", "10.0.0.1", 2, 0), Placement("n1", "10.0.0.2", 2, 2)),
    master=Endpoint("10.0.0.1", 29500),
    reason="rank 3 failed",
    resume_from=CheckpointRef(100, 1, "file:///ckpt/100"),
    start_delay_s=1.5,
)
EXIT = WorkerExit("n1", 2, 1, 3, None, signal.SIGKILL, at=1794801518.5, pid=77, detail_source="stderr", detail="größe")
RECORDS = {
    "empty": Record(),
    "world": Record(WORLD, History().charge(12.5)),
    "success": Record(WORLD, History(), Succeeded()),
    "failure": Record(WORLD, History().charge(1.0).charge(2.0), Failed("too many", EXIT)),
}


# Each gives a registry of a new job. One that needs a server is added here and skips where there is none.
@pytest.fixture(params=[MemoryRegistry], ids=["memory"])
def registry(request):
    return request.param()


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

    @pytest.mark.parametrize("name", RECORDS)
    def test_commit_of_the_leader_is_loaded_back(self, registry, name):
        """What the leader commits is what everybody loads, all of its values."""

        async def main():
            leader = await registry.campaign("n0", "unix:/a")
            await registry.commit(leader.epoch, RECORDS[name])
            return await registry.load()

        assert asyncio.run(main()) == RECORDS[name]

    def test_later_commit_replaces_the_earlier(self, registry):
        """A commit replaces the whole record."""

        async def main():
            leader = await registry.campaign("n0", "unix:/a")
            for record in RECORDS.values():
                await registry.commit(leader.epoch, record)
                assert await registry.load() == record

        asyncio.run(main())

    @pytest.mark.parametrize("step", [-1, 1])
    def test_commit_of_another_epoch_is_fenced(self, registry, step):
        """A commit of an epoch that does not lead raises Fenced with both epochs and changes nothing."""

        async def main():
            leader = await registry.campaign("n0", "unix:/a")
            await registry.commit(leader.epoch, RECORDS["world"])
            with pytest.raises(Fenced) as caught:
                await registry.commit(leader.epoch + step, RECORDS["failure"])
            return leader.epoch, caught.value, await registry.load()

        epoch, error, record = asyncio.run(main())
        assert (error.epoch, error.current) == (epoch + step, epoch)
        assert record == RECORDS["world"]

    def test_commit_without_a_leader_is_fenced(self, registry):
        """Nobody commits before somebody leads."""

        async def main():
            with pytest.raises(Fenced):
                await registry.commit(1, RECORDS["world"])
            return await registry.load()

        assert asyncio.run(main()) == Record()
