"""Checkpoints on one node: between its workers, its saver and whoever leads the job.

Workers come with what they have staged, and with questions; the leader's directives come down; what happens goes up.
Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

from elastic_adapter.core.checkpoint.manifest import parse_folder
from elastic_adapter.core.checkpoint.page import SavePages
from elastic_adapter.core.checkpoint.saver_process import SaverProcess
from elastic_adapter.core.checkpoint.staging import give_up
from elastic_adapter.core.checkpoint.writers import job_token, own_token
from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.events import (
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
    Assignment,
    CheckpointRef,
    Part,
    Pause,
    Prepare,
    Publish,
    Resume,
    SaveAt,
    Shard,
)
from elastic_adapter.core.notices import Listener

log = logging.getLogger(__name__)

Report: TypeAlias = (
    CheckpointerOpened
    | SaveWanted
    | StepsReached
    | ShardReported
    | CheckpointPrepared
    | CheckpointPublished
    | CheckpointsFound
    | RestoreFailed
)
Directive: TypeAlias = Pause | SaveAt | Prepare | Publish | Resume
# What a worker wrote before it looked at its page is there for all to see after this.
_SETTLE_S = 0.001


class SaveDesk:
    """One per node. ``report`` takes what the leader is to know."""

    def __init__(
        self, saver: SaverProcess, pages: SavePages, folder: Path, *, job: str, run: Callable[[], str]
    ) -> None:
        self._saver = saver
        self._pages = pages
        self._folder = folder
        self._job = job
        self._run = run
        self.node = ""
        self.report: Callable[[Report], None] = lambda _: None
        self._tasks: set[asyncio.Task[None]] = set()
        # Buffers that the saver is to write, or writes. A worker may have filled one again before the desk hears that
        # it was written: then it is counted twice.
        self._busy: Counter[str] = Counter()
        self._assignment: Assignment | None = None
        # Of the workers of this generation that save, by rank.
        self._listeners: dict[int, Listener] = {}
        self._slots: dict[int, int] = {}
        # Those who wait to hear what to go on from.
        self._waiting: set[Listener] = set()
        self._shards: dict[tuple[int, int], Shard] = {}
        # What is to be done with a checkpoint once all have written, by its step.
        self._orders: dict[int, dict[str, Any]] = {}
        self._found: tuple[CheckpointRef, ...] | None = None
        self._resume: Resume | None = None

    @property
    def _generation(self) -> int:
        return self._assignment.generation if self._assignment is not None else 0

    def begin(self, assignment: Assignment) -> None:
        """Workers of this world come; what was staged before is written all the same."""
        self._assignment = assignment
        self._listeners, self._slots, self._waiting = {}, {}, set()
        self._shards, self._orders = {}, {}
        self._found, self._resume = None, None
        self._pages.begin(assignment.generation)

    def state(self) -> tuple[tuple[int, ...], tuple[Shard, ...], tuple[CheckpointRef, ...] | None]:
        """What a new leader must know: who saves, what was saved and is not published, what rank 0 found.

        Nobody waits any longer for what the last leader wanted.
        """
        self._pages.answer(None)
        return tuple(sorted(self._listeners)), tuple(self._shards.values()), self._found

    # What workers say.

    def hear(self, listener: Listener, message: dict[str, Any]) -> None:
        """Take one message. What is not understood, or comes from an older generation, is nobody's."""
        match message:
            case {"checkpointer": {"generation": int(generation), "rank": int(rank), "local_rank": int(slot)}}:
                if generation == self._generation:
                    self._open(listener, rank, slot)
            case _ if listener not in self._listeners.values():
                return
            case {"resume": {"rank": int(rank)}}:
                self._tell_resume(listener, rank)
            case {"found": {"root": str(root), "names": list(names)}}:
                self._found = tuple(_ref(root, name) for name in names)
                self.report(CheckpointsFound(self.node, self._generation, self._found))
            case {"not_restored": {"rank": int(rank), "name": str(name), "why": str(why)}}:
                self.report(RestoreFailed(self.node, self._generation, rank, name, why))
            case {"want": {"reason": str(reason)}}:
                self.report(SaveWanted(self.node, self._generation, reason))
            case {"staged": {"rank": int(rank), "buffer": str(buffer), "step": int(step)} as staged}:
                self._orders[step] = staged
                self._busy[buffer] += 1
                self._keep(self._generation, Shard(rank, step, Part.STAGED))
                self._start(self._save(self._generation, listener, rank, step, buffer))
            case {"missed": {"rank": int(rank), "step": int(step), "why": str(why)}}:
                self._keep(self._generation, Shard(rank, step, Part.MISSED, why))
            case _:
                return

    def _open(self, listener: Listener, rank: int, slot: int) -> None:
        self._listeners[rank] = listener
        self._slots[rank] = slot
        self._start(self._saver.start())
        listener.tell(
            post={
                "folder": str(self._folder),
                "slot": self._slot_name(slot),
                "token": self._token(),
                "job": self._job,
                "run": self._run(),
                "busy": sorted(Path(each).name for each in self._busy),
            }
        )
        self.report(CheckpointerOpened(self.node, self._generation, rank))

    def _slot_name(self, slot: int) -> str:
        """No other worker of this run has it: buffers may have to lie where those of all nodes do."""
        node = hashlib.blake2b(self.node.encode(), digest_size=4).hexdigest()
        return f"slot-{slot}-{node}@{own_token()}"

    def _tell_resume(self, listener: Listener, rank: int) -> None:
        assert self._assignment is not None
        named = self._assignment.resume_from
        if named is None and self._resume is None:
            self._waiting.add(listener)
            if rank == 0:
                listener.tell(resume={"find": True})
            return
        chosen = named if self._resume is None else self._resume.checkpoint
        listener.tell(resume={"name": None if chosen is None else chosen.name})

    async def _save(self, generation: int, listener: Listener, rank: int, step: int, buffer: str) -> None:
        answer = await self._saver.ask(save=buffer)
        if "failed" in answer:
            # A saver that was killed has not released it. Beside the loop: it may lie on a disk that does not answer.
            await asyncio.to_thread(give_up, Path(buffer), step)
        self._busy -= Counter((buffer,))
        if "failed" in answer:
            shard = Shard(rank, step, Part.MISSED, str(answer["failed"]))
        else:
            shard = Shard(rank, step, Part.WRITTEN)
        self._keep(generation, shard)
        if shard.part is Part.MISSED or 0 not in self._listeners:
            # Nobody here learns when it is published.
            listener.tell(settled=step)

    def _keep(self, generation: int, shard: Shard) -> None:
        """Remember it for whoever leads next, and tell who leads now."""
        if generation == self._generation:
            self._shards[shard.rank, shard.step] = shard
        if shard.part is Part.MISSED:
            self._shards.pop((shard.rank, shard.step), None)
        self.report(ShardReported(self.node, generation, shard))

    # What the leader says.

    def follow(self, directive: Directive) -> None:
        if directive.generation != self._generation:
            return
        match directive:
            case Pause(number=number, reason=reason):
                log.info("workers are asked to save: %s", reason)
                self._pages.pause()
                self._start(self._reach(directive.generation, number))
            case SaveAt(step=step, hold=hold):
                self._pages.answer(step, hold=hold)
            case Prepare(step=step):
                self._start(self._prepare(directive.generation, step))
            case Publish(step=step):
                self._start(self._publish(directive.generation, step))
            case Resume(checkpoint=checkpoint):
                self._resume = directive
                for listener in self._waiting:
                    listener.tell(resume={"name": None if checkpoint is None else checkpoint.name})
                self._waiting.clear()
            case _:
                assert_never(directive)

    async def _reach(self, generation: int, number: int) -> None:
        await asyncio.sleep(_SETTLE_S)
        done = max((self._pages.done(slot) for slot in self._slots.values()), default=0)
        self.report(StepsReached(self.node, generation, number, done + 1))

    async def _prepare(self, generation: int, step: int) -> None:
        order = self._orders.get(step)
        if order is None:
            self.report(CheckpointPrepared(self.node, generation, step, trouble="this node knows nothing of it"))
            return
        finishing = order["finishing"]
        answer = await self._saver.ask(
            prepare={
                **self._place(order, generation, step),
                "world_size": order["world_size"],
                "verify": finishing["verify"],
                "md5": finishing["md5"],
            }
        )
        if "failed" in answer:
            self._over(step)
            self.report(CheckpointPrepared(self.node, generation, step, trouble=str(answer["failed"])))
            return
        uri = f"{order['root']}/{answer['prepared']['name']}"
        self.report(CheckpointPrepared(self.node, generation, step, uri))

    async def _publish(self, generation: int, step: int) -> None:
        order = self._orders.get(step)
        if order is None:
            self.report(CheckpointPublished(self.node, generation, step, "this node knows nothing of it"))
            return
        finishing = order["finishing"]
        kept = {"keep_last": finishing["keep_last"], "keep_every": finishing["keep_every"]}
        answer = await self._saver.ask(publish={**self._place(order, generation, step), **kept})
        published = answer.get("published", {})
        trouble = str(answer.get("failed", ""))
        if published.get("existed"):
            trouble = "another checkpoint of this name is there already, and stays"
        if generation == self._generation:
            self._over(step)
        self.report(CheckpointPublished(self.node, generation, step, trouble, tuple(published.get("pruned", ()))))

    def _place(self, order: dict[str, Any], generation: int, step: int) -> dict[str, object]:
        return {"root": order["root"], "step": step, "generation": generation, "token": self._token()}

    def _token(self) -> str:
        return job_token(self._job, self._run())

    def _over(self, step: int) -> None:
        """It is done with, and with it all that was staged before."""
        self._shards = {key: shard for key, shard in self._shards.items() if shard.step > step}
        self._orders = {key: order for key, order in self._orders.items() if key > step}
        for listener in self._listeners.values():
            listener.tell(settled=step)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("checkpoints: %s", error)


def _ref(root: str, name: str) -> CheckpointRef:
    step, generation = parse_folder(name) or (0, 0)
    return CheckpointRef(step, generation, f"{root}/{name}")
