"""The keeper of a node's lease against a real etcd."""

import asyncio
import time

import pytest

from elastic_adapter.core.errors import OutOfReach, RunOver
from elastic_adapter.core.etcd import Etcd, put
from elastic_adapter.core.lease import LeaseKeeper
from helpers.etcd_servers import cluster

WITHIN_S = 30.0
KEY = "/lease/member"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("etcd"), 1) as (one,):
        yield one


class Kept:
    """A keeper whose registrations and changes are written down."""

    def __init__(self, server, ttl_s=2, timeout_s=5.0):
        self.etcd = Etcd([server.endpoint], timeout_s=timeout_s)
        self.keeper = LeaseKeeper(self.etcd, ttl_s, self._register, self._check, self._changed)
        # What the next registrations raise, one each.
        self.raises = []
        # What looking whether the run is known raises, as long as it is set.
        self.unknown = None
        self.registered = []
        self.changes = []

    async def _register(self, lease):
        if self.raises:
            raise self.raises.pop(0)
        await self.etcd.transact([], [put(KEY, str(lease.id).encode(), lease.id)])
        self.registered.append(lease)

    async def _check(self):
        if self.unknown is not None:
            raise self.unknown

    def _changed(self):
        keeper = self.keeper
        self.changes.append((keeper.answers, keeper.count, keeper.replaced))

    async def until(self, found):
        async def wait():
            while not found():
                await asyncio.sleep(0.01)

        await asyncio.wait_for(wait(), WITHIN_S)


@pytest.fixture
def keep(server):
    """Run a story with a keeper that has not asked yet."""

    def run(story, on=server, **options):
        async def main():
            kept = Kept(on, **options)
            try:
                return await story(kept)
            finally:
                await kept.etcd.close()

        return asyncio.run(main())

    return run


def test_without_a_lease_it_takes_one(keep):
    """The first time it asks it registers under a fresh lease, and says so once."""

    async def story(kept):
        keeper = kept.keeper
        before = time.monotonic()
        assert await keeper.ask()
        assert keeper.lease == kept.registered[0]
        assert keeper.lease.ttl_s >= 2
        assert (keeper.count, keeper.answers, keeper.replaced) == (1, True, None)
        assert keeper.acked_at >= before
        assert kept.changes == [(True, 1, None)]

    keep(story)


def test_it_renews(keep):
    """A lease that is kept outlives its time to live several times over; nothing is told, since nothing changed."""

    async def story(kept):
        keeper = kept.keeper
        lease = await kept.etcd.grant(2)
        await kept._register(lease)
        keeper.adopt(lease, time.monotonic())
        adopted = keeper.acked_at
        keeping = asyncio.create_task(keeper.keep())
        await asyncio.sleep(3 * lease.ttl_s)
        keeping.cancel()
        assert (await kept.etcd.get(KEY)).items[0].lease == lease.id
        assert (keeper.lease, keeper.count, keeper.answers) == (lease, 1, True)
        assert keeper.acked_at > adopted
        assert (kept.registered, kept.changes) == ([lease], [])

    keep(story)


def test_it_registers_anew(keep):
    """A lease that was revoked is replaced by another one, all by itself; each time counts, and is told."""

    async def story(kept):
        keeper = kept.keeper
        keeping = asyncio.create_task(keeper.keep())
        await kept.until(lambda: keeper.count == 1)
        for count in (2, 3):
            old = keeper.lease.id
            await kept.etcd.revoke(old)
            await kept.until(lambda count=count: keeper.count == count)
            assert keeper.lease.id != old
            assert (await kept.etcd.get(KEY)).items[0].lease == keeper.lease.id
        keeping.cancel()
        assert kept.changes == [(True, 1, None), (True, 2, None), (True, 3, None)]
        assert len(kept.registered) == 3

    keep(story)


def test_silence_is_noticed_and_so_is_its_end(tmp_path, keep):
    """While etcd is down the last answer's time stands; when it is back the same lease is renewed."""

    async def story(kept):
        keeper = kept.keeper
        assert await keeper.ask()
        lease, acked = keeper.lease, keeper.acked_at
        one.kill()
        assert not await keeper.ask()
        assert not await keeper.ask()
        assert (keeper.answers, keeper.acked_at, keeper.count, keeper.lease) == (False, acked, 1, lease)
        one.start()
        keeping = asyncio.create_task(keeper.keep())
        await kept.until(lambda: keeper.answers)
        keeping.cancel()
        assert keeper.acked_at > acked
        assert (keeper.lease, keeper.count) == (lease, 1)
        assert kept.changes == [(True, 1, None), (False, 1, None), (True, 1, None)]

    with cluster(tmp_path, 1) as (one,):
        # Longer than the restart takes: etcd gives leases their full time again when it comes back.
        keep(story, on=one, ttl_s=30, timeout_s=1.0)


def test_a_registration_without_an_answer_is_repeated(keep):
    """etcd goes silent between the grant and the registration: not counted, and tried again under another lease."""

    async def story(kept):
        keeper = kept.keeper
        begun = keeper.acked_at
        kept.raises = [OutOfReach("no answer")]
        assert not await keeper.ask()
        assert (keeper.answers, keeper.count, keeper.lease.id, keeper.acked_at) == (False, 0, 0, begun)
        assert await keeper.ask()
        assert (keeper.answers, keeper.count) == (True, 1)
        assert kept.changes == [(False, 0, None), (True, 1, None)]

    keep(story)


def test_an_etcd_that_does_not_know_the_run_is_silent(keep):
    """The run's keys are missing, as in an etcd that lost its data: no contact, but no verdict either."""

    async def story(kept):
        keeper = kept.keeper
        await keeper.ask()
        acked = keeper.acked_at
        await kept.etcd.revoke(keeper.lease.id)
        kept.raises = [RunOver("its keys are gone", replaced=False)] * 2
        assert not await keeper.ask()
        assert not await keeper.ask()
        assert (keeper.answers, keeper.replaced, keeper.count, keeper.acked_at) == (False, None, 1, acked)
        # The data is back.
        assert await keeper.ask()
        assert (keeper.answers, keeper.replaced, keeper.count) == (True, None, 2)
        assert kept.changes == [(True, 1, None), (False, 1, None), (True, 2, None)]

    keep(story)


def test_a_newer_run_is_told(keep):
    """Another run has taken the job's name: that is known as such, and told once."""

    async def story(kept):
        keeper = kept.keeper
        await keeper.ask()
        await kept.etcd.revoke(keeper.lease.id)
        over = RunOver("run 2 has begun", replaced=True)
        kept.raises = [over, over]
        assert not await keeper.ask()
        assert keeper.replaced is over
        assert not await keeper.ask()
        assert (keeper.answers, keeper.replaced, keeper.count) == (False, over, 1)
        assert kept.changes == [(True, 1, None), (False, 1, over)]

    keep(story)


def test_those_who_ask_at_once_take_turns(keep):
    """Several who notice the same ended lease make one new registration, not one each."""

    async def story(kept):
        keeper = kept.keeper
        await keeper.ask()
        await kept.etcd.revoke(keeper.lease.id)
        assert await asyncio.gather(*(keeper.ask() for _ in range(8))) == [True] * 8
        assert (keeper.count, len(kept.registered)) == (2, 2)

    keep(story)


def test_a_lease_that_lives_in_an_etcd_that_forgot_the_run(keep):
    """Somebody deleted the job's keys: the lease can be renewed, but what it was for is gone, as with an empty etcd."""

    async def story(kept):
        keeper = kept.keeper
        assert await keeper.ask()
        acked = keeper.acked_at
        kept.unknown = RunOver("etcd does not know this run", replaced=False)
        assert not await keeper.ask()
        assert (keeper.answers, keeper.forgot, keeper.replaced, keeper.acked_at) == (False, True, None, acked)
        kept.unknown = None
        assert await keeper.ask()
        assert (keeper.answers, keeper.forgot) == (True, False)
        assert [change[0] for change in kept.changes] == [True, False, True]

    keep(story)
