"""Checkpoints on one node: between its workers, its saver and whoever leads the job.

Workers come with what they have staged, and with questions; the leader's directives come down; what happens goes up.
Nothing is decided here: what is known of a checkpoint is kept until the leader says what became of it.
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
    CheckpointerClosed,
    CheckpointerOpened,
    CheckpointNoted,
    CheckpointPrepared,
    CheckpointPublished,
    CheckpointsFound,
    RestoreFailed,
    SaveWanted,
    ShardReported,
    StepsReached,
)
from elastic_adapter.core.ledger import ENTRIES_KEPT
from elastic_adapter.core.model import (
    Assignment,
    CheckpointRef,
    Drop,
    Part,
    Pause,
    Prepare,
    Publish,
    Resume,
    SaveAt,
    SaveDirective,
    Settle,
    Shard,
)
from elastic_adapter.core.notices import Listener

log = logging.getLogger(__name__)

Report: TypeAlias = (
    CheckpointerOpened
    | CheckpointerClosed
    | CheckpointNoted
    | SaveWanted
    | StepsReached
    | ShardReported
    | CheckpointPrepared
    | CheckpointPublished
    | CheckpointsFound
    | RestoreFailed
)
# After so long it is said what a rank waits for that waits in restore().
PATIENCE_S = 30.0
# What a worker wrote before it looked at its page is there for all to see after this.
_SETTLE_S = 0.001
# A worker that is killed is seen to be silent before it is seen to be gone: what ended it is to be told first.
CLOSED_S = 0.5
# Of so many checkpoints it is remembered that they have their names.
_PUBLISHED_KEPT = 16


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
        # Those of them that remove what nothing comes of.
        self._removals: set[asyncio.Task[None]] = set()
        # Buffers that the saver is to write, or writes. A worker may have filled one again before the desk hears that
        # it was written: then it is counted twice.
        self._busy: Counter[str] = Counter()
        self._assignment: Assignment | None = None
        # Of the workers of this generation that save, by rank.
        self._listeners: dict[int, Listener] = {}
        self._slots: dict[int, int] = {}
        # Those of them who look whether they are asked to.
        self._looking: set[int] = set()
        # Those who wait to hear what to go on from, and their ranks.
        self._waiting: dict[Listener, int] = {}
        # By rank and step, until the leader says what became of that checkpoint.
        self._shards: dict[tuple[int, int], Shard] = {}
        # What was staged, by step and rank. What rank 0 wants is done with a checkpoint once all have written.
        self._orders: dict[int, dict[int, dict[str, Any]]] = {}
        # Steps that are in the ledger, by this generation: whoever goes back and comes there again can't save them.
        self._committed: set[int] = set()
        # What was said of those that have their names: a leader who did not hear it asks again.
        self._published: dict[int, CheckpointPublished] = {}
        self._found: tuple[CheckpointRef, ...] | None = None
        self._resume: Resume | None = None

    @property
    def _generation(self) -> int:
        return self._assignment.generation if self._assignment is not None else 0

    def begin(self, assignment: Assignment) -> None:
        """Workers of this world come; what was staged before is written all the same."""
        self._assignment = assignment
        self._listeners, self._slots, self._looking, self._waiting = {}, {}, set(), {}
        self._shards, self._orders, self._published = {}, {}, {}
        self._committed = set()
        self._found, self._resume = None, None
        self._pages.begin(assignment.generation)

    def state(self) -> tuple[tuple[int, ...], tuple[Shard, ...], tuple[CheckpointRef, ...] | None]:
        """What a new leader must know: who can be asked to save, what was saved and is not settled, what rank 0 found.

        Nobody waits any longer for what the last leader wanted.
        """
        self._pages.answer(None)
        return tuple(sorted(self._looking)), tuple(self._shards.values()), self._found

    async def tidied(self) -> None:
        """Wait until all is gone that is being removed, however long the storage takes."""
        if self._removals:
            await asyncio.wait(self._removals)

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
            case {"found": {"root": str(root), "names": list(names)}} if all(isinstance(name, str) for name in names):
                # No more than the leader keeps: it is told with each Hello.
                self._found = tuple(_ref(root, name) for name in names[:ENTRIES_KEPT])
                self.report(CheckpointsFound(self.node, self._generation, self._found))
            case {"not_restored": {"rank": int(rank), "name": str(name), "why": str(why)}}:
                self.report(RestoreFailed(self.node, self._generation, rank, name, why))
            case {"note": {"rank": int(rank), "words": str(words)}}:
                self.report(CheckpointNoted(self.node, self._generation, rank, words))
            case {"want": {"reason": str(reason)}}:
                self.report(SaveWanted(self.node, self._generation, reason))
            case _:
                self._hear_of_saves(listener, message)

    def _hear_of_saves(self, listener: Listener, message: dict[str, Any]) -> None:
        match message:
            case {"looks": {"rank": int(rank)}} if self._listeners.get(rank) is listener:
                self._looking.add(rank)
                self.report(CheckpointerOpened(self.node, self._generation, rank))
            case {"closed": {"rank": int(rank)}} if self._listeners.get(rank) is listener:
                self._closed(rank)
            case {
                "staged": {
                    "rank": int(rank),
                    "buffer": str(buffer),
                    "root": str(),
                    "step": int(step),
                    "world_size": int(),
                    "finishing": {"verify": _, "md5": _, "keep_last": _, "keep_every": _},
                } as staged
            }:
                if step in self._committed:
                    self._refuse(listener, rank, step, buffer)
                    return
                self._orders.setdefault(step, {})[rank] = staged
                self._busy[buffer] += 1
                self._keep(self._generation, Shard(rank, step, Part.STAGED))
                self._start(self._save(self._generation, rank, step, staged))
            case {"missed": {"rank": int(rank), "step": int(step), "why": str(why)}}:
                self._keep(self._generation, Shard(rank, step, Part.MISSED, why))
            case _:
                return

    def gone(self, listener: Listener) -> None:
        """A worker says nothing any more: it has closed its Checkpointer, or has ended."""
        self._waiting.pop(listener, None)
        for rank in [rank for rank, known in self._listeners.items() if known is listener]:
            del self._listeners[rank]
            self._closed(rank)

    def _closed(self, rank: int) -> None:
        """It saves no more, but may still wait to hear what became of what it has saved."""
        self._slots.pop(rank, None)
        if rank in self._looking:
            self._looking.discard(rank)
            self._start(self._tell_closed(self._generation, rank))

    async def _tell_closed(self, generation: int, rank: int) -> None:
        await asyncio.sleep(CLOSED_S)
        if generation == self._generation and rank not in self._looking:
            self.report(CheckpointerClosed(self.node, generation, rank))

    def _open(self, listener: Listener, rank: int, slot: int) -> None:
        if (former := self._listeners.get(rank)) is not None:
            self.gone(former)
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

    def _slot_name(self, slot: int) -> str:
        """No other worker of this run has it: buffers may have to lie where those of all nodes do."""
        node = hashlib.blake2b(self.node.encode(), digest_size=4).hexdigest()
        return f"slot-{slot}-{node}@{own_token()}"

    def _tell_resume(self, listener: Listener, rank: int) -> None:
        assert self._assignment is not None
        named = self._assignment.resume_from
        if named is None and self._resume is None:
            self._waiting[listener] = rank
            if rank == 0:
                listener.tell(resume={"find": True})
            else:
                self._start(self._explain_waiting(listener, rank))
            return
        chosen = named if self._resume is None else self._resume.checkpoint
        listener.tell(resume={"name": None if chosen is None else chosen.name})

    async def _explain_waiting(self, listener: Listener, rank: int) -> None:
        """A script that restores on some ranks only would wait without a word."""
        await asyncio.sleep(PATIENCE_S)
        if listener not in self._waiting or self._assignment is None:
            return
        if self._assignment.group_rank:
            why = "rank 0 has not said what to go on from: has it called restore() of its Checkpointer, without a path?"
        elif 0 in self._waiting.values():
            why = "rank 0 is still looking for what to go on from"
        else:
            why = "rank 0 has not called restore() of its Checkpointer yet"
        log.warning("rank %d waits in restore(): %s", rank, why)

    async def _save(self, generation: int, rank: int, step: int, order: dict[str, Any]) -> None:
        buffer = str(order["buffer"])
        answer = await self._saver.ask(save=buffer, part={**self._place(order, generation, step), "rank": rank})
        if "failed" in answer:
            # A saver that was killed has not released it. Beside the loop: it may lie on a disk that does not answer.
            await asyncio.to_thread(give_up, Path(buffer), step)
        self._busy -= Counter((buffer,))
        if "failed" in answer:
            shard = Shard(rank, step, Part.MISSED, str(answer["failed"]))
        else:
            shard = Shard(rank, step, Part.WRITTEN)
        if generation != self._generation or (rank, step) in self._shards:
            self._keep(generation, shard)

    def _refuse(self, listener: Listener, rank: int, step: int, buffer: str) -> None:
        """What the ledger has of this generation stays as it is: what is staged now is another state."""
        why = "this generation has committed it before, and that stays as it is; the next step can be saved"
        if rank == 0:
            log.warning("step %d is not saved: %s", step, why)
        self._start(asyncio.to_thread(give_up, Path(buffer), step))
        listener.tell(settled={"step": step, "why": why})

    def _keep(self, generation: int, shard: Shard) -> None:
        """Remember it for whoever leads next, and tell who leads now."""
        if generation == self._generation:
            self._shards[shard.rank, shard.step] = shard
        self.report(ShardReported(self.node, generation, shard))

    # What the leader says.

    def follow(self, directive: SaveDirective) -> None:
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
            case Settle(step=step, trouble=trouble):
                self._settle(step, trouble)
            case Drop(step=step, why=why):
                self._drop(step, why)
            case Resume():
                self._resumed(directive)
            case _:
                assert_never(directive)

    def _resumed(self, directive: Resume) -> None:
        self._resume, checkpoint = directive, directive.checkpoint
        for listener in self._waiting:
            listener.tell(resume={"name": None if checkpoint is None else checkpoint.name})
        self._waiting.clear()

    async def _reach(self, generation: int, number: int) -> None:
        await asyncio.sleep(_SETTLE_S)
        done = max((self._pages.done(slot) for slot in self._slots.values()), default=0)
        self.report(StepsReached(self.node, generation, number, done + 1))

    async def _prepare(self, generation: int, step: int) -> None:
        order = self._orders.get(step, {}).get(0)
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
            self.report(CheckpointPrepared(self.node, generation, step, trouble=str(answer["failed"])))
            return
        uri = f"{order['root']}/{answer['prepared']['name']}"
        self.report(CheckpointPrepared(self.node, generation, step, uri))

    async def _publish(self, generation: int, step: int) -> None:
        order, known = self._orders.get(step, {}).get(0), self._published.get(step)
        if known is not None:
            self.report(known)
            return
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
        report = CheckpointPublished(self.node, generation, step, trouble, tuple(published.get("pruned", ())))
        if generation == self._generation and not trouble:
            self._published[step] = report
            for each in list(self._published)[:-_PUBLISHED_KEPT]:
                del self._published[each]
        self.report(report)

    def _place(self, order: dict[str, Any], generation: int, step: int) -> dict[str, object]:
        return {"root": order["root"], "step": step, "generation": generation, "token": self._token()}

    def _token(self) -> str:
        return job_token(self._job, self._run())

    def _settle(self, step: int, trouble: str) -> None:
        """It is committed, and what was staged before it is past."""
        for earlier in sorted({shard.step for shard in self._shards.values() if shard.step < step}):
            self._drop(earlier, f"there is a later one, of step {step}")
        self._orders = {key: order for key, order in self._orders.items() if key > step}
        self._committed.add(step)
        self._forget(step, trouble)

    def _drop(self, step: int, why: str) -> None:
        """Nothing comes of it. What is still being written of it here is written first, and goes then."""
        # Ranks may have been told of different folders, by mistake.
        for order in {each["root"]: each for each in self._orders.pop(step, {}).values()}.values():
            removal = self._start(self._remove(self._place(order, self._generation, step)))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
        self._forget(step, why)

    async def _remove(self, place: dict[str, object]) -> None:
        answer = await self._saver.ask(drop=place)
        if "failed" in answer:
            log.warning("what was written of step %s is not removed: %s", place["step"], answer["failed"])

    def _forget(self, step: int, why: str) -> None:
        """Those who saved there are told what became of it."""
        for rank in [rank for rank, known in self._shards if known == step]:
            del self._shards[rank, step]
            if (listener := self._listeners.get(rank)) is not None:
                listener.tell(settled={"step": step, "why": why})

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("checkpoints: %s", error)


def _ref(root: str, name: str) -> CheckpointRef:
    step, generation = parse_folder(name) or (0, 0)
    return CheckpointRef(step, generation, f"{root}/{name}")
