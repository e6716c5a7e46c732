"""Checkpoints on one node, with a real saver, a real socket, and workers played by the test."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import pickle
import queue
import signal
import subprocess
import time
from pathlib import Path

import pytest

from elastic_adapter.core.checkpoint import desk as desk_module
from elastic_adapter.core.checkpoint import staging
from elastic_adapter.core.checkpoint.agent_link import AgentLink
from elastic_adapter.core.checkpoint.buffers import Buffers
from elastic_adapter.core.checkpoint.desk import SaveDesk
from elastic_adapter.core.checkpoint.files import Skeleton
from elastic_adapter.core.checkpoint.link import Finishing, Found
from elastic_adapter.core.checkpoint.manifest import folder_name
from elastic_adapter.core.checkpoint.order import FileOrder, Order, Stretch, order_to_bytes
from elastic_adapter.core.checkpoint.page import DONE, SavePages
from elastic_adapter.core.checkpoint.saver_process import SaverProcess
from elastic_adapter.core.checkpoint.shared_folder import hold_own_folder, make_shared_folder, sweep
from elastic_adapter.core.checkpoint.staging import EMPTY, FULL, StagingBuffer
from elastic_adapter.core.checkpoint.store import Checkpoint, Store
from elastic_adapter.core.checkpoint.writers import job_token
from elastic_adapter.core.errors import SpawnFailed, UserError
from elastic_adapter.core.events import (
    CheckpointerClosed,
    CheckpointerOpened,
    CheckpointPrepared,
    CheckpointPublished,
    CheckpointsFound,
    RestoreFailed,
    SaveWanted,
    ShardReported,
    StepsReached,
)
from elastic_adapter.core.model import (
    CheckpointRef,
    Drop,
    Part,
    Pause,
    Prepare,
    Publish,
    Resume,
    SaveAt,
    Settle,
    Shard,
)
from elastic_adapter.core.notices import NoticeBoard
from elastic_adapter.core.output import Output
from elastic_adapter.core.processes import Guard
from elastic_adapter.core.testing import world_of

WITHIN_S = 20.0

TOKEN = job_token("job", "run-1")


class Node:
    """A desk with all that belongs to it, and the reports that it made."""

    def __init__(self, guard, folder):
        self.folder = folder
        self.root = folder / "checkpoints"
        self.output = Output()
        self.saver = SaverProcess(guard, self.output)
        self.pages = SavePages(folder)
        self.desk = SaveDesk(self.saver, self.pages, folder, job="job", run=lambda: "run-1")
        self.board = NoticeBoard(str(folder / "notices"))
        self.reports = asyncio.Queue()
        self.links = []

    async def __aenter__(self):
        self.desk.node = "a"
        self.desk.report = self.reports.put_nowait
        self.board.hear, self.board.gone = self.desk.hear, self.desk.gone
        self.board.open()
        return self

    async def __aexit__(self, *_):
        for link in self.links:
            link.shut()
        self.saver.close()
        self.board.close()
        self.output.close(1.0)

    def begin(self, generation=1, slots=1, resume_from=None):
        world = world_of("a", slots=slots, generation=generation)
        for slot in range(slots):
            self.pages.path(slot)
        assignment = world.assignment("a")
        object.__setattr__(assignment, "resume_from", resume_from)
        self.desk.begin(assignment)

    async def link(self, rank=0, generation=1, size=1):
        names = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "GENERATION": generation,
            "SAVE_PAGE": self.pages.path(rank),
            "NOTICES": self.board.path,
        }
        link = AgentLink({f"ELASTIC_{name}": str(value) for name, value in names.items()})
        self.links.append(link)
        return link, await do(link.open, str(self.root))

    async def report(self, kind):
        """The next report of this kind; others before it are nobody's."""
        while True:
            report = await asyncio.wait_for(self.reports.get(), WITHIN_S)
            if isinstance(report, kind):
                return report

    async def shard(self, part):
        while True:
            found = (await self.report(ShardReported)).shard
            if found.part is part:
                return found

    async def written(self, link, post, step, number=0, **finishing):
        """A part of this step, as a worker leaves it, that the saver has written."""
        link.staged(fill(post, self.root, step, number), str(self.root), step, Finishing(**finishing))
        return await self.shard(Part.WRITTEN)

    async def saver_idle(self):
        """Wait until all that the saver was asked for before is done."""
        place = {"root": str(self.root), "step": 0, "generation": 0, "token": "nobody"}
        assert "dropped" in await asyncio.wait_for(self.saver.ask(drop=place), WITHIN_S)

    @property
    def drafts(self):
        return [name for name in os.listdir(self.root) if "elastic-tmp" in name]


async def do(work, *args):
    """What a worker does, which may wait."""
    return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, work, *args), WITHIN_S)


def fill(post, root, step, number=0):
    """A state without tensors in a buffer, as a worker leaves it."""
    packed = Skeleton(pickle.dumps({"step": step}, protocol=2), ()).pack()
    files = (FileOrder(f"rank-{post.rank}.pt", "torch", Stretch(0, len(packed)), ()),)
    order = Order(
        str(root), post.token, step, post.generation, post.rank, post.world_size, "torch", {}, files, time.time()
    )
    path = post.folder / f"{post.slot}-{number}"
    buffer = StagingBuffer.open(path) if path.exists() else StagingBuffer.create(path, 65536)

    def copy(into):
        into[:] = packed

    assert buffer.fill(step, post.generation, order_to_bytes(order), len(packed), copy)
    buffer.close()
    return path


@pytest.fixture
def node(guarded, tmp_path):
    """Tells a story with a node: ``node(story)``, where the story takes it."""

    def tell(story):
        async def main():
            async with guarded() as ward, Node(ward.guard, tmp_path) as made:
                return await story(made)

        return asyncio.run(main())

    return tell


def test_from_a_buffer_to_a_checkpoint(node):
    """Staged, written, prepared, published: each is reported when it is so, and the worker hears of the end."""

    async def story(node):
        node.begin()
        link, post = await node.link()
        assert (post.token, post.run, post.job, post.busy) == (TOKEN, "run-1", "job", frozenset())
        buffer = fill(post, node.root, 40)
        link.staged(buffer, str(node.root), 40, Finishing(verify="full", md5=True))
        assert await node.shard(Part.STAGED) == Shard(0, 40, Part.STAGED)
        assert await node.shard(Part.WRITTEN) == Shard(0, 40, Part.WRITTEN)
        assert StagingBuffer.open(buffer).mark == EMPTY
        assert node.desk.state()[:2] == ((), (Shard(0, 40, Part.WRITTEN),))
        assert not await do(link.settled, 0.05)
        name = folder_name(40, 1)
        node.desk.follow(Prepare(1, 40))
        prepared = await node.report(CheckpointPrepared)
        assert prepared == CheckpointPrepared("a", 1, 40, f"{node.root}/{name}")
        assert not (node.root / name).exists()
        node.desk.follow(Publish(1, 40))
        assert await node.report(CheckpointPublished) == CheckpointPublished("a", 1, 40)
        found = Store(node.root).look(name)
        assert isinstance(found, Checkpoint)
        assert (found.path / "checkpoints.md5").exists()
        # Whether it counts is for the leader to say.
        assert not await do(link.settled, 0.05)
        node.desk.follow(Settle(1, 40))
        assert await do(link.settled, WITHIN_S)
        assert link.troubles() == ()
        assert node.desk.state()[1] == ()

    node(story)


def test_what_can_not_be_written(node):
    """The words of whoever could not write it reach the leader, and nobody waits for it."""

    async def story(node):
        node.begin()
        link, post = await node.link()
        node.root.write_text("a file where a folder should be")
        link.staged(fill(post, node.root, 5), str(node.root), 5, Finishing())
        missed = await node.shard(Part.MISSED)
        assert str(node.root) in missed.why
        # The leader may not hear it: the next one is told.
        assert node.desk.state()[1] == (missed,)
        node.desk.follow(Drop(1, 5, f"rank 0 on a: {missed.why}"))
        assert await do(link.settled, WITHIN_S)
        assert link.troubles() == (f"step 5 is not saved: rank 0 on a: {missed.why}",)
        link.missed(6, "it has no room")
        assert await node.shard(Part.MISSED) == Shard(0, 6, Part.MISSED, "it has no room")
        node.desk.follow(Drop(1, 6, "rank 0 on a: it has no room"))
        assert node.desk.state()[1] == ()

    node(story)


def test_a_part_is_missing(node):
    """What another rank did not write is found when all is put together."""

    async def story(node):
        node.begin(slots=2)
        link, post = await node.link(size=2)
        link.staged(fill(post, node.root, 5), str(node.root), 5, Finishing())
        await node.shard(Part.WRITTEN)
        node.desk.follow(Prepare(1, 5))
        assert "shared by all nodes" in (await node.report(CheckpointPrepared)).trouble
        node.desk.follow(Prepare(1, 77))
        assert (await node.report(CheckpointPrepared)).trouble

    node(story)


def test_a_part_is_missing_of_one_of_several(node):
    """What can't be put together is forgotten when the leader says so, and nothing else is forgotten with it."""

    async def story(node):
        node.begin(slots=2)
        link, post = await node.link(size=2)
        for number, step in enumerate((4, 5)):
            await node.written(link, post, step, number)
        await node.written(link, post, 6)
        node.desk.follow(Prepare(1, 5))
        trouble = (await node.report(CheckpointPrepared)).trouble
        assert [shard.step for shard in node.desk.state()[1]] == [4, 5, 6]
        node.desk.follow(Drop(1, 5, trouble))
        assert [shard.step for shard in node.desk.state()[1]] == [4, 6]
        await node.saver_idle()
        assert sorted(name.split(".")[1] for name in node.drafts) == [folder_name(4, 1), folder_name(6, 1)]
        node.desk.follow(Prepare(1, 4))
        assert "shared by all nodes" in (await node.report(CheckpointPrepared)).trouble

    node(story)


def test_what_was_not_put_together_in_the_last_world(node):
    """It is nothing to the one that runs."""

    async def story(node):
        node.begin(slots=2)
        link, post = await node.link(size=2)
        await node.written(link, post, 5)
        os.kill(node.saver._process.pid, signal.SIGSTOP)
        node.desk.follow(Prepare(1, 5))
        await asyncio.sleep(0.05)
        node.begin(generation=2, slots=2)
        later, post = await node.link(generation=2, size=2)
        later.staged(fill(post, node.root, 5, number=1), str(node.root), 5, Finishing())
        await node.shard(Part.STAGED)
        os.kill(node.saver._process.pid, signal.SIGCONT)
        assert (await node.report(CheckpointPrepared)).generation == 1
        await node.shard(Part.WRITTEN)
        node.desk.follow(Drop(1, 5, "of a world that is over"))
        assert node.desk.state()[1] == (Shard(0, 5, Part.WRITTEN),)

    node(story)


def test_what_nothing_came_of(node):
    """Its draft is removed, and those who wait for it are told why; what others saved later is not touched."""

    async def story(node):
        node.begin(slots=2)
        links = [await node.link(rank, size=2) for rank in range(2)]
        for link, post in links:
            await node.written(link, post, 5)
        await node.written(*links[0], 6, number=1)
        node.desk.follow(Drop(1, 5, "rank 2 on b: the disk is full"))
        (first, _), (second, _) = links
        assert await do(second.settled, WITHIN_S)
        assert second.troubles() == ("step 5 is not saved: rank 2 on b: the disk is full",)
        # Another save is under way here.
        assert not await do(first.settled, 0.05)
        await node.saver_idle()
        assert [name.split(".")[1] for name in node.drafts] == [folder_name(6, 1)]
        assert node.desk.state()[1] == (Shard(0, 6, Part.WRITTEN),)
        node.desk.follow(Settle(1, 6))
        assert await do(first.settled, WITHIN_S)
        # Whoever waits for the later one has what it wants.
        assert first.troubles() == ()

    node(story)


def test_dropped_while_it_is_being_written(node):
    """What is written of it after that goes as well, and is nobody's news."""

    async def story(node):
        node.begin()
        link, post = await node.link()
        await node.saver.start()
        os.kill(node.saver._process.pid, signal.SIGSTOP)
        link.staged(fill(post, node.root, 5), str(node.root), 5, Finishing())
        await node.shard(Part.STAGED)
        node.desk.follow(Drop(1, 5, "rank 1 on b: the disk is full"))
        assert await do(link.settled, WITHIN_S)
        os.kill(node.saver._process.pid, signal.SIGCONT)
        await node.saver_idle()
        assert node.drafts == []
        assert node.desk.state()[1] == ()
        assert node.reports.empty()

    node(story)


def test_the_end_can_wait_for_what_is_being_removed(node):
    async def story(node):
        node.begin()
        await node.desk.tidied()
        link, post = await node.link()
        await node.written(link, post, 5)
        os.kill(node.saver._process.pid, signal.SIGSTOP)
        node.desk.follow(Drop(1, 5, "rank 1 on b: the disk is full"))
        tidied = asyncio.create_task(node.desk.tidied())
        await asyncio.sleep(0.05)
        assert not tidied.done()
        assert node.drafts
        os.kill(node.saver._process.pid, signal.SIGCONT)
        await asyncio.wait_for(tidied, WITHIN_S)
        assert node.drafts == []

    node(story)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_ranks_that_save_in_different_folders(node, ranks):
    """That is a mistake, and nothing is left of it in either of them."""

    async def story(node):
        node.begin(slots=2)
        roots = [node.folder / "one", node.folder / "other"]
        for rank in ranks:
            link, post = await node.link(rank, size=2)
            link.staged(fill(post, roots[rank], 5), str(roots[rank]), 5, Finishing())
            await node.shard(Part.WRITTEN)
        assert all(os.listdir(root) for root in roots)
        node.desk.follow(Drop(1, 5, "rank 1 on a: it is not there"))
        await asyncio.wait_for(node.desk.tidied(), WITHIN_S)
        assert not any(os.listdir(root) for root in roots)

    node(story)


def test_who_comes_after_the_others_gave_it_up(node):
    """It is told once more, and leaves no draft behind either."""

    async def story(node):
        node.begin()
        node.desk.follow(Drop(1, 5, "rank 1 on b: the disk is full"))
        link, post = await node.link()
        await node.written(link, post, 5)
        assert node.drafts
        node.desk.follow(Drop(1, 5, "rank 1 on b: the disk is full"))
        assert await do(link.settled, WITHIN_S)
        await node.saver_idle()
        assert node.drafts == []

    node(story)


def test_a_node_without_rank_0(node):
    """Its ranks wait until it is committed, and what it knows of it is forgotten then."""

    async def story(node):
        node.begin(slots=2)
        link, post = await node.link(1, size=2)
        for number, step in enumerate((4, 5)):
            await node.written(link, post, step, number)
        assert not await do(link.settled, 0.05)
        node.desk.follow(Settle(1, 5))
        assert await do(link.settled, WITHIN_S)
        assert link.troubles() == ()
        assert node.desk.state()[1] == ()
        await node.saver_idle()
        assert [name.split(".")[1] for name in node.drafts] == [folder_name(5, 1)]

    node(story)


def test_a_checkpoint_that_got_no_name(node):
    """Whoever waits for it is told, and nothing is removed: it is committed."""

    async def story(node):
        node.begin()
        link, post = await node.link()
        await node.written(link, post, 5)
        node.desk.follow(Settle(1, 5, "it could not be given its name: the device is gone"))
        assert await do(link.settled, WITHIN_S)
        assert "the device is gone" in link.troubles()[0]
        await node.saver_idle()
        assert node.drafts

    node(story)


@pytest.mark.parametrize("settled", [False, True])
def test_asked_twice_to_publish(node, settled):
    """A leader that did not hear of the name is told again, the same."""

    async def story(node):
        node.begin()
        link, post = await node.link()
        for step in (5, 6):
            await node.written(link, post, step, keep_last=1)
            node.desk.follow(Prepare(1, step))
            assert not (await node.report(CheckpointPrepared)).trouble
            node.desk.follow(Publish(1, step))
            published = await node.report(CheckpointPublished)
        assert published == CheckpointPublished("a", 1, 6, pruned=(folder_name(5, 1),))
        if settled:
            node.desk.follow(Settle(1, 6))
        node.desk.follow(Publish(1, 6))
        assert await node.report(CheckpointPublished) == published
        node.desk.follow(Publish(1, 7))
        assert (await node.report(CheckpointPublished)).trouble

    node(story)


def test_nobody_reads_for_long(node):
    """What was said meanwhile is read before another save: who does not read is told nothing more."""

    async def story(node):
        node.begin()
        link, post = await node.link()
        for number in range(5000):
            node.board.tell(notice="drain", number=number, reason="x" * 200)
        await asyncio.sleep(0.05)
        await node.written(link, post, 5)
        await asyncio.sleep(0.05)
        node.desk.follow(Settle(1, 5))
        assert await do(link.settled, WITHIN_S)

    node(story)


def test_a_step_that_is_tried_again(node):
    """It came to nothing, and stays so: that is said, beside the reason of the first time."""

    async def story(node):
        node.begin()
        link, post = await node.link()
        for number, end in enumerate(
            ("the disk is full", "the disk is full; a step that came to nothing is not tried")
        ):
            await node.written(link, post, 5, number)
            node.desk.follow(Drop(1, 5, "the disk is full"))
            assert await do(link.settled, WITHIN_S)
            (told,) = link.troubles()
            assert told.partition(" again")[0] == f"step 5 is not saved: {end}"
        link.missed(6, "no room")
        await node.written(link, post, 6)
        node.desk.follow(Drop(1, 6, "no room"))
        assert await do(link.settled, WITHIN_S)
        assert "no room; a step that came to nothing" in link.troubles()[0]

    node(story)


def test_who_waits_for_nothing_is_told_nothing(node):
    """The launcher tells of what went wrong; a worker does so only to whoever waited for it."""

    async def story(node):
        node.begin()
        link, post = await node.link()
        for step in (5, 6):
            await node.written(link, post, step)
            node.desk.follow(Drop(1, step, "rank 1 on b: the disk is full"))
            await asyncio.sleep(0.05)
            assert link.troubles() == ()
        assert await do(link.settled, WITHIN_S)
        assert link.troubles() == ("step 6 is not saved: rank 1 on b: the disk is full",)
        assert link.troubles() == ()
        # Whoever asks again is answered again.
        assert await do(link.settled, WITHIN_S)
        assert len(link.troubles()) == 1

    node(story)


def test_who_can_be_asked(node):
    """A rank that looks whether it is asked, until its connection ends, whatever its children do."""

    async def story(node):
        node.begin()
        link, _ = await node.link()
        link.want("it is time")
        await node.report(SaveWanted)
        assert node.desk.state()[0] == ()
        assert link.asked(1) is None
        assert await node.report(CheckpointerOpened) == CheckpointerOpened("a", 1, 0)
        assert link.asked(2) is None
        assert node.desk.state()[0] == (0,)
        with subprocess.Popen(["sleep", "60"], pass_fds=[link._socket.fileno()]) as child:  # noqa: ASYNC220
            link.close()
            assert await node.report(CheckpointerClosed) == CheckpointerClosed("a", 1, 0)
            child.kill()
        assert node.desk.state()[0] == ()
        other, _ = await node.link()
        other.close()
        node.begin(generation=2)
        await asyncio.sleep(0.05)
        assert node.reports.empty()

    node(story)


@pytest.mark.parametrize("again", [True, False], ids=["comes again", "is gone"])
def test_what_ended_a_worker_is_told_first(node, again, monkeypatch):
    """That it saves no more is told a little later, and not at all of a rank that does by then."""
    monkeypatch.setattr(desk_module, "CLOSED_S", 0.3)

    async def story(node):
        node.begin()
        link, _ = await node.link()
        link.attend()
        await node.report(CheckpointerOpened)
        link.close()
        while node.desk.state()[0]:
            await asyncio.sleep(0.01)
        assert node.reports.empty()
        if again:
            link, _ = await node.link()
            link.attend()
            assert await node.report(CheckpointerOpened) == CheckpointerOpened("a", 1, 0)
            await asyncio.sleep(0.5)
            assert node.reports.empty()
        else:
            assert await node.report(CheckpointerClosed) == CheckpointerClosed("a", 1, 0)

    node(story)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"found": {"root": "/checkpoints", "names": [1]}},
        {"staged": {"rank": 0, "buffer": "/dev/shm/none", "step": 5}},
        {"staged": {"rank": 0, "buffer": "", "root": 1, "step": 5, "world_size": 1, "finishing": {}}},
    ],
    ids=["names", "half", "types"],
)
def test_what_makes_no_sense_is_nobodys(node, nonsense):
    """It changes nothing, and what is said after it is heard."""

    async def story(node):
        node.begin()
        link, _ = await node.link()
        link._tell(**nonsense)
        link.want("it is time")
        assert await asyncio.wait_for(node.reports.get(), WITHIN_S) == SaveWanted("a", 1, "it is time")
        node.desk.follow(Drop(1, 5, "there is none"))

    node(story)


@pytest.mark.parametrize(
    ("looks", "word"),
    [
        (False, "rank 1 waits in restore(): rank 0 has not called restore() of its Checkpointer yet"),
        (True, "rank 1 waits in restore(): rank 0 is still looking for what to go on from"),
    ],
)
def test_a_restore_that_waits(node, looks, word, monkeypatch, caplog):
    """After a while it is said what for."""
    monkeypatch.setattr(desk_module, "PATIENCE_S", 0.1)

    async def story(node):
        node.begin(slots=2)
        first, _ = await node.link(0, size=2)
        second, _ = await node.link(1, size=2)
        waiting = [asyncio.ensure_future(do(second.resume, pytest.fail))]
        if looks:
            waiting.append(asyncio.ensure_future(do(first.resume, slow_find)))
        await asyncio.sleep(0.3)
        assert [each.getMessage() for each in caplog.records if each.name == desk_module.__name__] == [word]
        node.desk.follow(Resume(1, None))
        await asyncio.gather(*waiting)
        await asyncio.sleep(0.15)
        assert sum("waits in restore()" in each.getMessage() for each in caplog.records) == 1

    node(story)


def slow_find():
    time.sleep(0.4)
    return Found(())


@pytest.mark.parametrize("times", [1, 2])
def test_the_saver_is_killed(node, times):
    """Another one writes the same buffer; if that is killed over it as well, it is given up."""

    async def story(node):
        node.begin()
        link, post = await node.link()
        await node.saver.start()
        killed = []
        os.kill(node.saver._process.pid, signal.SIGSTOP)
        buffer = fill(post, node.root, 5)
        link.staged(buffer, str(node.root), 5, Finishing())
        await node.shard(Part.STAGED)
        for _ in range(times):
            process = node.saver._process
            assert process.pid not in killed
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.wait_for(asyncio.shield(process.exited), WITHIN_S)
            while times == 2 and len(killed) == 1 and node.saver._process is process:
                await asyncio.sleep(0)
        shard = (await node.report(ShardReported)).shard
        assert shard.part is (Part.WRITTEN if times == 1 else Part.MISSED), shard
        assert times == 1 or "killed by SIGKILL" in shard.why
        assert StagingBuffer.open(buffer).mark == EMPTY
        link.staged(fill(post, node.root, 6, number=1), str(node.root), 6, Finishing())
        assert await node.shard(Part.WRITTEN) == Shard(0, 6, Part.WRITTEN)

    node(story)


def test_no_saver_can_be_started(node, monkeypatch):
    """The buffer may be filled again, unless that has been done already."""

    async def story(node):
        async def fail(*_):
            raise SpawnFailed("python", errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr(Guard, "spawn", fail)
        node.begin()
        link, post = await node.link()
        for step, marks in ((5, EMPTY), (6, FULL)):
            buffer = fill(post, node.root, step)
            link.staged(buffer, str(node.root), 5, Finishing())
            missed = await node.shard(Part.MISSED)
            assert "python" in missed.why
            assert StagingBuffer.open(buffer).mark == marks

    node(story)


def test_a_buffer_that_is_filled_again_before_the_saver_has_answered(node):
    """It stays busy until the second state is written, too."""

    async def story(node):
        answers = [asyncio.get_running_loop().create_future() for _ in range(2)]
        asked = iter(answers)
        node.saver.ask = lambda **_: next(asked)
        node.begin()
        link, post = await node.link()
        for step in (5, 6):
            link.staged(post.folder / "buffer", str(node.root), step, Finishing())
            await node.shard(Part.STAGED)
        for step, busy in ((5, {"buffer"}), (6, frozenset())):
            answers[step - 5].set_result({"saved": {}})
            assert await node.shard(Part.WRITTEN) == Shard(0, step, Part.WRITTEN)
            assert (await node.link())[1].busy == busy

    node(story)


def test_nodes_without_memory(node, monkeypatch):
    """The buffers of all lie in one folder then: each has its own, and knows later which are still to be written."""
    monkeypatch.setattr(staging, "_room", lambda _, *, in_memory: 0 if in_memory else 1 << 40)

    async def story(node):
        taken = []
        node.saver.ask = lambda **_: asyncio.get_running_loop().create_future()
        node.begin()
        for name in ("a", "b"):
            node.desk.node = name
            link, post = await node.link()
            taken.append(Buffers.at(post.folder, post.slot, node.root, post.token, post.busy).take(65536, wait=False))
            assert taken[-1].fill(5, 1, b"order", 4, lambda into: None)
            link.staged(taken[-1].path, str(node.root), 5, Finishing())
            await node.shard(Part.STAGED)
        assert [buffer.in_place for buffer in taken] == [True, True]
        node.begin(generation=2)
        _, post = await node.link(generation=2)
        assert post.busy == {buffer.path.name for buffer in taken}
        again = Buffers.at(post.folder, post.slot, node.root, post.token, post.busy)
        assert again.take(65536, wait=False).path not in [buffer.path for buffer in taken]
        assert [buffer.step for buffer in taken if buffer.in_place] == [5, 5]

    node(story)


def test_a_buffer_outlives_its_world(node):
    """What the last generation staged is written when the next one is there, which is told to leave it alone."""

    async def story(node):
        node.begin()
        link, post = await node.link()
        await node.saver.start()
        pid = node.saver._process.pid
        os.kill(pid, signal.SIGSTOP)
        buffer = fill(post, node.root, 5)
        link.staged(buffer, str(node.root), 5, Finishing())
        await node.shard(Part.STAGED)
        node.begin(generation=2)
        _, later = await node.link(generation=2)
        assert later.busy == {buffer.name}
        os.kill(pid, signal.SIGCONT)
        written = await node.report(ShardReported)
        assert (written.generation, written.shard.part) == (1, Part.WRITTEN)
        assert node.desk.state()[1] == ()
        # Whoever is still there of the last generation is not heard.
        link.want("it is time")
        link.staged(fill(post, node.root, 9, number=1), str(node.root), 9, Finishing())
        await asyncio.sleep(0.2)
        assert all(not isinstance(each, SaveWanted | ShardReported) for each in node.reports._queue)

    node(story)


def test_the_world_names_what_to_go_on_from(node):
    """All ranks are told at once, and nobody looks for another."""

    async def story(node):
        node.begin(slots=2, resume_from=CheckpointRef(7, 1, "/elsewhere/step-000000000007-gen-000001"))
        for rank in range(2):
            link, _ = await node.link(rank, size=2)
            assert await do(link.resume, pytest.fail) == "step-000000000007-gen-000001"
            assert node.pages.done(rank) == 7

    node(story)


@pytest.mark.parametrize("names", [(), ("step-000000000009-gen-000002", "step-000000000004-gen-000001")])
def test_rank_0_finds_what_to_go_on_from(node, names):
    """The others wait until all are told the same; who comes later is told as well."""

    async def story(node):
        node.begin(slots=2)
        first, _ = await node.link(0, size=2)
        second, _ = await node.link(1, size=2)
        waiting = [asyncio.ensure_future(do(second.resume, pytest.fail))]
        await asyncio.sleep(0.05)
        waiting.append(asyncio.ensure_future(do(first.resume, lambda: Found(names))))
        found = await node.report(CheckpointsFound)
        assert [each.uri for each in found.found] == [f"{node.root}/{name}" for name in names]
        assert node.desk.state()[2] == found.found
        assert not any(each.done() for each in waiting)
        chosen = found.found[0] if names else None
        node.desk.follow(Resume(1, chosen))
        expected = names[0] if names else None
        assert await asyncio.gather(*waiting) == [expected, expected]
        # In a process of its own.
        AgentLink._begun.clear()
        third, _ = await node.link(1, size=2)
        assert await do(third.resume, pytest.fail) == expected

    node(story)


@pytest.mark.parametrize("size", [1, 2])
def test_who_goes_back_in_the_midst_of_a_world(node, size):
    """Finds what there is by then, and not what the world began with; the ranks agree over their group."""

    class Together:
        """The group of two ranks, in two threads."""

        def __init__(self, rank, values):
            self.rank, self.values = rank, values

        def place(self):
            return self.rank, 2

        def broadcast(self, value):
            if self.rank == 0:
                self.values.put(value)
                return value
            return self.values.get(timeout=20)

    async def story(node):
        values = queue.SimpleQueue()
        node.begin(slots=size)
        links = [(await node.link(rank, size=size))[0] for rank in range(size)]
        waiting = [asyncio.ensure_future(do(link.resume, Found)) for link in links]
        await node.report(CheckpointsFound)
        node.desk.follow(Resume(1, None))
        assert await asyncio.gather(*waiting) == [None] * size
        names = ("step-000000000009-gen-000001", "step-000000000004-gen-000001")
        if size == 2:
            with pytest.raises(UserError, match=r"agreed upon by all 2 ranks, and they have no group: make it first"):
                await do(links[0].resume, pytest.fail)
            for rank, link in enumerate(links):
                link._group = Together(rank, values)
        # As well with another Checkpointer of the same process.
        again = [(await node.link(rank, size=size))[0] for rank in range(size)]
        for rank, link in enumerate(again):
            link._group = Together(rank, values)
        for both in (links, again):
            finds = [lambda: Found(names), pytest.fail]
            waiting = [asyncio.ensure_future(do(link.resume, find)) for link, find in zip(both, finds, strict=False)]
            assert await asyncio.gather(*waiting) == [names[0]] * size
            assert [link._page[DONE] for link in both] == [9] * size

    node(story)


def test_words_of_workers(node):
    """What a worker wants, and what it can't restore, goes up."""

    async def story(node):
        node.begin()
        link, _ = await node.link()
        link.want("30.0 minutes since the last save")
        assert await node.report(SaveWanted) == SaveWanted("a", 1, "30.0 minutes since the last save")
        telling = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(None, tell_once, link))
        assert await node.report(RestoreFailed) == RestoreFailed("a", 1, 0, "step-1", "a flipped bit")
        await telling

    node(story)


def tell_once(link):
    link._tell(not_restored={"rank": 0, "name": "step-1", "why": "a flipped bit"})


def test_asked_where_workers_are(node):
    """The answer is the step after the furthest one; and a new leader's coming lets everybody go on."""

    async def story(node):
        node.begin(slots=2)
        links = [(await node.link(rank, size=2))[0] for rank in range(2)]
        for link, done in zip(links, (11, 12), strict=True):
            assert link.asked(done) is None
        node.desk.follow(Pause(1, 3, "nodes join"))
        assert await node.report(StepsReached) == StepsReached("a", 1, 3, 13)
        waiting = asyncio.ensure_future(do(links[1].asked, 13))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        node.desk.follow(SaveAt(1, 3, 13, hold=True, reason="nodes join"))
        assert (await waiting).hold
        assert links[0].asked(12) is None
        assert links[0].asked(13).hold
        holding = asyncio.ensure_future(do(links[0].hold, WITHIN_S))
        await asyncio.sleep(0.05)
        assert not holding.done()
        node.desk.state()
        await holding
        node.desk.follow(Pause(9, 4, "of another generation"))
        assert links[0].asked(14) is None

    node(story)


@pytest.mark.parametrize(
    "message",
    [b"no json\n", b"[]\n", b"{}\n", b'{"staged": {}}\n', b'{"checkpointer": {"generation": 1}}\n', b"x" * (2 << 20)],
)
def test_nonsense_on_the_socket(node, message):
    """Whoever says what nobody understands does not disturb the others."""

    async def story(node):
        node.begin()
        _, writer = await asyncio.open_unix_connection(node.board.path)
        writer.write(message)
        await asyncio.sleep(0.05)
        link, _ = await node.link()
        link.want("it is time")
        assert await node.report(SaveWanted)
        writer.close()

    node(story)


def test_shared_folder(tmp_path):
    """It is for this user alone; one whose owner was killed is removed, one whose owner lives is not."""
    place = tmp_path / "shm"
    place.mkdir()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        left = make_shared_folder(tmp_path, place)
        (left / "slot-0-0").write_bytes(b"x")
        os.write(writer, str(left).encode())
        signal.pause()
    left = Path(os.read(reader, 4096).decode())
    sweep(place)
    assert left.stat().st_mode & 0o777 == 0o700
    assert (left / "slot-0-0").exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (place / "elastic-launch-being-made").mkdir()
    (place / "somebody-else").mkdir()
    mine = make_shared_folder(tmp_path, place)
    assert sorted(os.listdir(place)) == sorted([mine.name, "elastic-launch-being-made", "somebody-else"])
    os.close(reader)
    os.close(writer)


def test_no_shared_memory(tmp_path):
    """Then it is an ordinary folder, which goes with the others."""
    assert make_shared_folder(tmp_path, tmp_path / "nowhere") == tmp_path / "buffers"


@pytest.mark.parametrize("moment", ["open", "flock", "rename"])
def test_a_folder_that_is_being_made_while_another_sweeps(tmp_path, monkeypatch, moment):
    """It is there afterwards, and held, whenever the other one came."""
    place = tmp_path / "shm"
    place.mkdir()
    module = fcntl if moment == "flock" else os
    real = getattr(module, moment)

    def meanwhile(*args):
        with monkeypatch.context() as patched:
            patched.setattr(module, moment, real)
            sweep(place)
            done = real(*args)
            sweep(place)
        return done

    monkeypatch.setattr(module, moment, meanwhile)
    folder = make_shared_folder(tmp_path, place)
    monkeypatch.undo()
    assert folder.parent == place
    sweep(place)
    assert os.listdir(folder) == ["lock"]


def test_a_child_does_not_hold_what_its_parent_held(tmp_path):
    """A data loader that outlives a program does not keep the program's buffers."""
    folder = hold_own_folder(tmp_path)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        sweep(tmp_path)
        assert folder.path.exists()
        folder.let_go()
        wait_until(lambda: sweep(tmp_path) or not folder.path.exists())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def wait_until(is_so):
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
