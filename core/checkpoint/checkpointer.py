"""Saves a training while it goes on, and restores it. For the user's program, which has it from an adapter.

    ckpt = Checkpointer("/nfs/job1", model=model, optimizer=optimizer, sampler=sampler, every_steps=1000)
    for step in range(ckpt.restore(), total):
        ...
        ckpt.step(step)

A save copies the state into a buffer in memory; another process writes it. So the training waits for a copy, and for
nothing else. What can't be saved is told in one line, and the training goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import mmap
import os
import re
import time
import weakref
from collections.abc import Callable, MutableMapping
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from elastic_adapter.core import worker
from elastic_adapter.core.checkpoint.buffers import Buffers
from elastic_adapter.core.checkpoint.calls import plainly
from elastic_adapter.core.checkpoint.contents import (
    Layout,
    Training,
    check_things,
    lay_out,
    own_epoch,
    sampler_facts,
    states,
)
from elastic_adapter.core.checkpoint.files import FOLDER as A_FOLDER
from elastic_adapter.core.checkpoint.files import Damaged, Refused, kind_of, path_of
from elastic_adapter.core.checkpoint.framework import Framework
from elastic_adapter.core.checkpoint.garbage import uncollected
from elastic_adapter.core.checkpoint.link import Asked, Finishing, Found, Link, NotRestored, Post
from elastic_adapter.core.checkpoint.manifest import (
    ALGORITHMS,
    is_quarantined,
    newest_first,
    parse_folder,
)
from elastic_adapter.core.checkpoint.order import Order, order_to_bytes
from elastic_adapter.core.checkpoint.policy import Saved, SavePolicy, due_by_minutes, due_by_steps, steps_done
from elastic_adapter.core.checkpoint.restoring import Loaded, Restoring, is_damaged_in_storage, load_foreign
from elastic_adapter.core.checkpoint.single import look_in, there
from elastic_adapter.core.checkpoint.staging import NoRoom
from elastic_adapter.core.checkpoint.store import (
    VERIFY,
    Broken,
    Checkpoint,
    Store,
    is_gone,
    is_unread,
    look_at,
    why_unread,
)
from elastic_adapter.core.checkpoint.writers import is_in_use
from elastic_adapter.core.errors import ElasticError, UserError, one_of

log = logging.getLogger(__name__)

FOLDER = "CHECKPOINT_PATH"
_MINUTE_S = 60.0
# When a save that it is time for, and that does not come, is asked for once more.
_WANT_AGAIN_S = 10.0
# Far longer than whoever asks for it takes to stop this process.
_HOLD_S = 600.0
# What another node has renamed is seen here a little later, where file systems remember what was not there.
_SEEN_WITHIN_S = 5.0
_PAUSE_S = 0.25
_MOST_NAMED = 5
# How troubles name the step whose save they are of.
_STEP = re.compile(r"\bstep ([0-9]+)\b")


class NotSaved(ElasticError):
    """What was to be waited for is not saved. The training can go on."""


class Checkpointer:
    """See the module's text. All ranks make one, with the same arguments, and call the same methods at the same steps.

    ``model`` and ``optimizer`` may be dicts of several; wrappers of data parallelism are seen through. ``extra`` is a
    dict of the user's, or anything with ``state_dict`` and ``load_state_dict``. ``verify`` says how much of a
    checkpoint is read back after it was written; what is restored is always checked as a whole. ``when_busy`` says what
    to do when a save is due and the last two are still being written. ``trusted`` lets files run what they ask for.
    """

    # What the adapter's subclass gives.
    framework: ClassVar[Callable[[], Framework]]
    # The one that is open, with the process that has opened it (who forks has another one), and what is to be done at
    # its end: it may be gone by now, without a word.
    _open_one: ClassVar[tuple[int, weakref.ref[Checkpointer], Finalize] | None] = None
    # Folders that this program has saved to, or restored from.
    _known: ClassVar[set[str]] = set()

    @plainly
    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        sampler: Any = None,
        extra: Any = None,
        rng: bool = True,
        save_optimizer: bool = True,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        verify: str = "sample",
        algorithm: str = "xxh3_128",
        md5: bool = False,
        when_busy: str = "wait",
        trusted: bool = False,
        link: Link | None = None,
    ) -> None:
        self.folder = _folder(folder)
        one_of("verify", verify, VERIFY)
        one_of("algorithm", algorithm, tuple(ALGORITHMS))
        one_of("when_busy", when_busy, ("wait", "skip"))
        try:
            self.policy = SavePolicy(every_steps, every_minutes, keep_last, keep_every)
        except ValueError as error:
            raise UserError(str(error)) from None
        self._framework: Framework = type(self).framework()
        check_things(model, optimizer, scheduler)
        _check_others(sampler, extra)
        self._training = Training(model, optimizer, scheduler, sampler, extra, rng, save_optimizer)
        self._restoring = Restoring(self._framework, self._training, trusted=trusted)
        self._finishing = Finishing(verify, md5, keep_last, keep_every)
        self._algorithm = algorithm
        self._waits = when_busy == "wait"
        self._trusted = trusted
        self._store = Store(Path(self.folder))
        self._given_link = link
        self._epoch: int | None = None
        self._advance = getattr(sampler, "advance", None)
        self._done = 0
        self._last = Saved(0, time.monotonic())
        # What a search has loaded: if that is what all ranks restore, it need not be loaded again.
        self._loaded: str | None = None
        # The step that was saved last, or restored: it need not be saved again.
        self._kept: int | None = None
        self._opened: tuple[Link, Post, Buffers] | None = None
        self._link: Link | None = None
        self._prepared = False
        self._closed = False
        # Whether this process has called step; and whether the one had that saved what was restored: then this one is
        # going to, as far as is known. Whoever only calls save can't be asked for one, and manifests do not say what
        # was only hoped for: a program that calls step no more is asked in vain once, and not for ever.
        self._calls_step = False
        self._is_to_step = False
        # When a save is due by the clock, where it is this rank that says so.
        self._due_at = float("inf")
        self._pid = os.getpid()

    @property
    def epoch(self) -> int:
        """The user's own count of epochs, kept in checkpoints; the sampler's, as long as nobody has set it."""
        if self._epoch is None:
            return int(getattr(self._training.sampler, "epoch", 0))
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = int(epoch)

    @plainly
    def restore(self, path: str | os.PathLike[str] | None = None) -> int:
        """Go on from the newest checkpoint that is whole: the step to go on from, 0 where there is none yet.

        With a path, load that instead: the folder of one checkpoint, or a file that somebody else has saved, of weights
        or with "model", "optimizer" and so on. What it returns then is the file's "step", if it has one, else 0.
        """
        # Whoever goes back does its steps again, and those are other ones than those that were saved.
        self._kept = self._loaded = None
        # What is still being written is the newest, in a moment; and what was saved here comes to an end.
        self.settled()
        Checkpointer._known.add(self.folder)
        if path is not None:
            return self._begin(self._restore_from(path_of("a checkpoint's path", path)))
        link, post, _ = self._open()
        name = link.resume(self._find)
        if name is not None and name != self._loaded:
            try:
                checkpoint = self._located(name, post.token)
                loaded = self._restoring.read(checkpoint, post.rank)
            except (Damaged, OSError) as error:
                self._put_aside_named(self._store.root / name, error)
                raise link.not_restored(name, why_unread(error)) from error
            self._apply(checkpoint, loaded)
        if post.rank == 0:
            self._store.sweep(lambda each: is_in_use(self._store.root / each, post.generation, post.token))
        if name is None:
            return self._begin(0)
        if self._is_to_step:
            link.attend()
        place = parse_folder(name)
        assert place is not None
        log.info("goes on from %s", self._store.root / name)
        self._kept = place[0]
        return self._begin(place[0])

    def _restore_from(self, path: str) -> int:
        place = there(path)
        if not os.path.isdir(place):
            return load_foreign(self._framework, self._training, path, place, trusted=self._trusted)
        checkpoint = look_in(Path(place))
        self._warn_of_later_ones(checkpoint)
        self._apply(checkpoint, self._restoring.read(checkpoint, (self._framework.group.place() or (0, 1))[0]))
        return checkpoint.manifest.step

    def _warn_of_later_ones(self, checkpoint: Checkpoint) -> None:
        """Whoever goes back in the folder that this training saves in does not get far: the newest one counts."""
        if checkpoint.path.resolve().parent != self._store.root.resolve():
            return
        names = newest_first(self._names())
        if checkpoint.name in names and (later := names[: names.index(checkpoint.name)]):
            log.warning(
                "%s is not the newest in its folder: a restart goes on from %s; to go back for good, move the later"
                " ones away and call restore() without a path",
                checkpoint.path,
                later[0],
            )

    def _warn_of_later_saves(self, done: int) -> None:
        """Whoever begins anew, and does not say so to anybody, is overtaken by what was there before."""
        with contextlib.suppress(NotRestored):
            found = newest_first(self._names())
            if found and (place := parse_folder(found[0])) is not None and place[0] >= done:
                log.warning(
                    "%s was there before, and nothing was restored: restore() would go on from it;"
                    " call that first, or name another folder",
                    self._store.root / found[0],
                )

    @plainly
    def step(self, step: int) -> bool:
        """At the end of the loop's turn ``step``: save, if it is time or somebody asks for it; whether it was done."""
        done = steps_done(step)
        if self._opened is not None and self._pid != os.getpid():
            raise self._elsewhere()
        if self._advance is not None:
            self._advance()
        worker.progress(done - 1)
        if self._link is None or not self._prepared:
            self._calls_step = True
            self._prepare(done)
        link = self._link
        assert link is not None
        self._done = done
        if self._due_at < time.monotonic():
            self._want(link)
        asked = link.asked(done)
        if asked is None and (self.policy.every_steps is None or done % self.policy.every_steps):
            if troubles := self._troubles(link):
                self._tell(troubles)
            return False
        return self._save_at(done, asked)

    @plainly
    def save(self, step: int | None = None, *, wait: bool = False) -> bool:
        """Save now: at the end of the loop's turn ``step``, or of the last one that was told. All ranks call it.

        With ``wait``, what could not be saved is an error, NotSaved, and what returns is on disk as far as this rank
        can tell. Without it, whether the state was taken.
        """
        done = self._done if step is None else steps_done(step)
        self._done = done
        link = self._open()[0]
        if wait and done == self._kept:
            # It may still be written: whether it has to be saved again is known after that.
            link.settled()
        self._tell(self._troubles(link))
        missed = self._try_to_save(done, wait=wait or self._waits)
        if wait:
            whole = link.settled()
            troubles = self._troubles(link)
            failed = [line for line in troubles if _concerns(line, done)]
            self._tell([line for line in troubles if line not in failed])
            if failed or missed or not whole:
                why = missed or "the launcher is gone"
                raise NotSaved("; ".join(failed) or f"step {done} is not saved: {why}")
        return not missed

    @plainly
    def settled(self, seconds: float | None = None) -> bool:
        """Wait until all that was saved is on disk, as far as this rank can tell; whether that came in time."""
        if self._opened is None or self._closed:
            return True
        link = self._open()[0]
        came = link.settled(seconds)
        self._tell(self._troubles(link))
        return came

    def close(self) -> None:
        """Save no more. Without a launcher, waits for what is still being written."""
        if self._opened is None or self._closed or os.getpid() != self._pid:
            return
        self._closed, self._link = True, None
        if Checkpointer._open_one is not None and Checkpointer._open_one[1]() is self:
            Checkpointer._open_one = None
        atexit.unregister(self._ending)
        self._ending()

    def __enter__(self) -> Checkpointer:  # noqa: PYI034
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    def _open(self) -> tuple[Link, Post, Buffers]:
        """Our place in the world is known when it is first needed: the group may be made after this object."""
        if self._closed:
            raise UserError("this Checkpointer was closed: make another one to save or restore")
        if self._opened is not None and self._pid != os.getpid():
            raise self._elsewhere()
        if self._opened is None:
            self._pid = os.getpid()
            link = self._given_link or self._connect_alone()
            post = link.open(self.folder)
            buffers = Buffers.at(post.folder, post.slot, self._store.root, post.token, post.busy)
            self._opened, self._link = (link, post, buffers), link
            self._begin(self._done)
            # Whether or not this object is still there by then. Children of multiprocessing do not run what atexit has.
            self._ending = Finalize(None, _end, (link, buffers), exitpriority=0)
            atexit.register(self._ending)
            if self._given_link is None:
                Checkpointer._open_one = os.getpid(), weakref.ref(self), self._ending
        return self._opened

    def _elsewhere(self) -> UserError:
        """A child that was forked has this one's memory, but neither its saver nor its place in the world."""
        return UserError(
            f"this Checkpointer is process {self._pid}'s, which forked this one: it saves and restores there"
        )

    def _connect_alone(self) -> Link:
        """Two at a time would fill the same buffers, and write the same drafts."""
        if Checkpointer._open_one is not None and Checkpointer._open_one[0] == os.getpid():
            _, other, ending = Checkpointer._open_one
            if other() is not None:
                # An error that was handled may be all that still has it.
                gc.collect()
            if (found := other()) is not None:
                raise UserError(
                    f"a Checkpointer of {found.folder} is open in this process, and there can be one at a time:"
                    " close() it, or have one save all, as model={'a': ..., 'b': ...}"
                )
            # Nobody has it any more, and nobody has closed it: it may still be writing.
            atexit.unregister(ending)
            ending()
        return self._connect()

    def _connect(self) -> Link:
        from elastic_adapter.core.checkpoint.connect import connect

        return connect(self._framework.group, self.folder, polled=self.policy.every_minutes is not None)

    def _begin(self, done: int) -> int:
        self._done = done
        self._begin_clock(done)
        return done

    def _begin_clock(self, done: int) -> None:
        """The next save by the clock is so long after this one."""
        self._last = Saved(done, time.monotonic())
        minutes = self.policy.every_minutes
        if minutes is not None and self._opened is not None and self._opened[1].rank == 0:
            self._due_at = self._last.at + minutes * _MINUTE_S

    def _want(self, link: Link) -> None:
        """Say that it is time, and again if nothing comes of it: whoever leads may have been busy with another save."""
        now = time.monotonic()
        reason = due_by_minutes(self.policy, self._done, self._last, now)
        if reason is not None:
            self._due_at = now + _WANT_AGAIN_S
            link.want(reason)

    def _prepare(self, done: int) -> None:
        """After the first step the optimizer has its state: the size of all buffers is known.

        Raises Refused or UserError for what could never be restored: later that would be missed in each save.
        """
        _, post, buffers = self._open()
        self._prepared = True
        if post.rank == 0 and (why := _unwritable(self.folder)):
            self._tell((f"nothing can be saved in {self.folder}, as it seems: {why}",))
        if post.rank == 0 and self.folder not in Checkpointer._known:
            self._warn_of_later_saves(done)
        layout, order = self._laid_out(post, self._done)
        buffers.prepare(_needed(layout, order))

    def _save_at(self, done: int, asked: Asked | None) -> bool:
        link = self._open()[0]
        self._tell(self._troubles(link))
        reason = asked.reason if asked is not None else due_by_steps(self.policy, done)
        hold = asked is not None and asked.hold
        log.debug("saves step %d: %s", done, reason)
        missed = self._try_to_save(done, wait=self._waits or hold)
        if hold:
            link.hold(_HOLD_S)
        return not missed

    def _try_to_save(self, done: int, *, wait: bool) -> str:
        """What can't be saved is told, and the training goes on. Why it is not saved, or nothing."""
        try:
            missed = self._save(done, wait=wait)
        except (OSError, NoRoom, Refused, UserError) as error:
            missed = _why(error)
        if missed:
            self._missed(done, missed)
        return missed

    def _save(self, done: int, *, wait: bool) -> str:
        link, post, buffers = self._open()
        self._begin_clock(done)
        if done == self._kept:
            return ""
        layout, order = self._laid_out(post, done)
        buffer = buffers.take(_needed(layout, order), wait=wait)
        for note in buffers.notes():
            self._note(note)
        if buffer is None:
            return "the last two saves are still being written"
        filled = buffer.fill(
            done, post.generation, order, layout.nbytes, lambda into: layout.copy(self._framework, into)
        )
        assert filled, "a buffer that is free can be filled"
        link.staged(buffer.path, self.folder, done, self._finishing)
        self._kept = done
        Checkpointer._known.add(self.folder)
        return ""

    def _laid_out(self, post: Post, done: int) -> tuple[Layout, bytes]:
        with uncollected():
            layout = lay_out(self._framework, states(self._framework, self._training, post.rank))
            return layout, order_to_bytes(self._order(post, done, layout))

    def _order(self, post: Post, done: int, layout: Layout) -> Order:
        sampler = self._training.sampler
        facts: dict[str, Any] = {"epoch": self.epoch, "own_epoch": self._epoch is not None}
        facts["calls_step"] = self._calls_step
        if hasattr(sampler, "state_dict"):
            facts["sampler"] = sampler_facts(sampler.state_dict())
        return Order(
            root=self.folder,
            token=post.token,
            step=done,
            generation=post.generation,
            rank=post.rank,
            world_size=post.world_size,
            framework=self._framework.name,
            versions=self._framework.versions(),
            files=layout.files,
            created_at=time.time(),
            job=post.job,
            run=post.run,
            facts=facts,
            algorithm=self._algorithm,
        )

    def _missed(self, done: int, why: str) -> None:
        self._tell((f"step {done} is not saved: {why}",))
        self._open()[0].missed(done, why)

    def _troubles(self, link: Link) -> tuple[str, ...]:
        """What went wrong meanwhile. A step that was taken for saved, and is not, is to be saved again."""
        troubles = link.troubles()
        if self._kept is not None and any(_concerns(line, self._kept) for line in troubles):
            self._kept = None
        return troubles

    def _tell(self, lines: tuple[str, ...] | list[str]) -> None:
        for line in lines:
            log.warning("%s", line)

    def _find(self) -> Found:
        """The newest checkpoint that can be loaded, which is loaded by that: to read it is to verify it."""
        while (found := self._find_among(self._open()[1].rank)) is None:
            pass
        return found

    def _find_among(self, rank: int) -> Found | None:
        """None: one was deleted meanwhile, by a saver that outlived its training. So there is a newer one."""
        broken: list[str] = []
        unread: list[str] = []
        for name in newest_first(self._names()):
            found = self._store.look(name)
            try:
                if is_gone(found.path):
                    return None
                if isinstance(found, Broken):
                    self._put_aside(found.path, found.why, unread=found.unread)
                    (unread if found.unread else broken).append(found.path.name)
                    continue
                self._restoring.check_others(found, rank)
                loaded = self._restoring.read(found, rank)
            except (Damaged, OSError) as error:
                if is_gone(found.path):
                    return None
                self._put_aside(found.path, why_unread(error), unread=is_unread(error))
                (unread if is_unread(error) else broken).append(found.path.name)
                continue
            self._apply(found, loaded)
            self._loaded = found.name
            names = newest_first(self._names())
            return Found(names[names.index(found.name) :]) if found.name in names else None
        if unread:
            named = ", ".join(unread[:_MOST_NAMED])
            raise NotRestored(f"no checkpoint in {self.folder} can be read ({named}): see to it that they can")
        if broken := broken or sorted(filter(is_quarantined, self._names()), reverse=True):
            advice = "to begin from zero, name another folder, or move them away"
            raise NotRestored(f"no checkpoint in {self.folder} is whole ({', '.join(broken[:_MOST_NAMED])}); {advice}")
        return Found()

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._store.root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise NotRestored(f"nobody knows what there is to go on from: {why_unread(error)}") from error

    def _put_aside(self, path: Path, why: str, *, unread: bool) -> None:
        if unread:
            self._note(f"{path} can't be read, and is passed over: {why}")
        else:
            self._quarantine(path, why, ", and passed over")

    def _put_aside_named(self, path: Path, error: Damaged | OSError) -> None:
        """One that was named, and can't be loaded here. It is renamed if that is the storage's fault.

        If it is not, other ranks can load it; and what comes next is not for this one to say.
        """
        if not is_unread(error) and is_damaged_in_storage(path, error):
            self._quarantine(path, why_unread(error))

    def _quarantine(self, path: Path, why: str, then: str = "") -> None:
        try:
            kept = self._store.quarantine(path)
        except FileNotFoundError:
            self._note(f"{path} is broken: {why}; somebody else has put it aside{then}")
        except OSError as error:
            self._note(f"{path} is broken, and can't be renamed ({error}): {why}{then}")
        else:
            self._note(f"{path} is broken: {why}; it is kept as {kept.name}{then}")

    def _note(self, words: str) -> None:
        """For people, now and later: in this program's log, and in the job's history."""
        log.warning("%s", words)
        self._open()[0].note(words)

    def _located(self, name: str, token: str) -> Checkpoint:
        """The checkpoint that all ranks restore. One that was agreed upon, and not renamed yet, is renamed here."""
        place = parse_folder(name)
        if place is None:
            raise Damaged(name, "no checkpoint is called so")
        draft = self._store.begun(*place, token)
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while not isinstance(found := self._store.look(name), Checkpoint):
            if isinstance(look_at(draft.path, name), Checkpoint):
                try:
                    draft.publish()
                except FileNotFoundError:
                    pass
            elif found.path.exists() or time.monotonic() > deadline:
                named = os.environ.get("ELASTIC_RESUME_FROM", "")
                elsewhere = f" (the world goes on from {named})" if named and not found.path.exists() else ""
                raise Damaged(str(found.path), f"{found.why}{elsewhere}")
            else:
                time.sleep(_PAUSE_S)
        return found

    def _apply(self, checkpoint: Checkpoint, loaded: Loaded) -> None:
        """Whatever goes wrong here is no fault of the checkpoint: the user's things load themselves."""
        facts = checkpoint.manifest.facts
        self._restoring.apply(loaded, facts)
        self._is_to_step = bool(facts.get("calls_step"))
        if "epoch" in facts:
            self._epoch = own_epoch(facts, self._training.sampler)


def _folder(folder: str | os.PathLike[str] | None) -> str:
    given = os.environ.get(FOLDER, "") if folder is None else folder
    if given == "":
        raise UserError(f"where checkpoints are kept is not known: pass a folder to Checkpointer, or set {FOLDER}")
    found = path_of("the folder of checkpoints", given)
    if (kind := kind_of(found)) not in (None, A_FOLDER):
        raise UserError(f"checkpoints are kept in a folder, and {found} is {kind}")
    return os.path.abspath(found)


def _check_others(sampler: Any, extra: Any) -> None:
    """What is passed beside these can be kept, too."""
    for needed in ("state_dict", "load_state_dict"):
        if sampler is not None and not hasattr(sampler, needed):
            raise UserError(
                f"sampler has no {needed}(), and is of the type {type(sampler).__name__}: its position can't be kept; "
                "pass an ElasticSampler, or leave it out"
            )
    if extra is not None and not isinstance(extra, MutableMapping) and not hasattr(extra, "state_dict"):
        raise UserError(f"extra must be a dict, or have state_dict() and load_state_dict(), got {type(extra).__name__}")


def _unwritable(folder: str) -> str | None:
    """Why nothing can be written there: better known at the first step than at the first save."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        return error.strerror
    return None if os.access(folder, os.W_OK) else "it can't be written to"


def _concerns(line: str, step: int) -> bool:
    """Whether a trouble is one of this step's save; one that names no step may be."""
    named = _STEP.search(line)
    return named is None or int(named[1]) == step


def _needed(layout: Layout, order: bytes) -> int:
    """How large a buffer for it has to be: the data begins at a page of its own."""
    return layout.nbytes + len(order) + mmap.PAGESIZE


def _end(link: Link, buffers: Buffers) -> None:
    buffers.stop_preparing()
    link.close()
    buffers.remove()
    for line in link.troubles():
        log.warning("%s", line)


def _why(error: Exception) -> str:
    """Why something was not saved; ``why_unread`` is for what can't be loaded."""
    from elastic_adapter.core.checkpoint.saver import words

    return words(error)
