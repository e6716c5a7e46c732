"""Checkpoints without our launcher: a program that runs alone, or the ranks that another launcher started.

Each process has a saver of its own, which ends with it, when it has done what it was asked for, and takes its buffers
away. Several ranks write into one draft on a file system that they share; rank 0 waits for the parts of all, and makes
the checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_adapter.core import frames
from elastic_adapter.core.checkpoint.buffers import beside
from elastic_adapter.core.checkpoint.command import saver_command
from elastic_adapter.core.checkpoint.framework import Group
from elastic_adapter.core.checkpoint.link import Asked, Finishing, Found, NotRestored, Post, resume_together
from elastic_adapter.core.checkpoint.saver import words
from elastic_adapter.core.checkpoint.saving import missed_name, missing, take_back, taken
from elastic_adapter.core.checkpoint.shared_folder import PLACE, HeldFolder, hold_own_folder
from elastic_adapter.core.checkpoint.staging import give_up, holds
from elastic_adapter.core.checkpoint.store import Draft, Store, write_whole
from elastic_adapter.core.checkpoint.writers import own_token
from elastic_adapter.core.errors import ElasticError, UserError

log = logging.getLogger(__name__)

# How often ranks agree on whether a save is due by the clock, in seconds.
CHECK_S = 2.0
_MOST_STEPS = 10_000
_CLOSE_S = 600.0
_PARTS_S = 600.0
# As above, when this rank is about to end; and when it says what it waits for.
_LAST_PARTS_S = 60.0
_SILENT_S = 5.0
# So many checkpoints may wait for parts of other ranks: one that does when there are more will never be whole.
_MOST_WAITING = 4
_PAUSE_S = 0.05
_TRIES = 2


class SaverLost(ElasticError):
    """The process that writes has ended while it was asked for something."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank gives to a checkpoint, in a buffer."""

    buffer: Path
    root: str
    step: int
    finishing: Finishing


class OwnLink:
    """See the module's text. A group of None is a program that runs alone, whatever its variables say."""

    def __init__(self, group: Group | None, *, polled: bool = False, memory: Path = PLACE) -> None:
        self._group = group
        self._memory = memory
        self._rank, self._size = 0, 1
        self._token = ""
        self._folder: HeldFolder | None = None
        self._root = ""
        self._saver = Saver()
        self._parts: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="elastic-saver", daemon=True)
        # There is going to be something to write. Before that is a restore, which has better use for the CPUs.
        self._begun = threading.Event()
        self._unsettled = 0
        self._changed = threading.Condition()
        self._troubles: list[str] = []
        self._wanted: str | None = None
        # When this rank began to end.
        self._closing_at = float("inf")
        # The last step of which there was something to tell.
        self._furthest = -1
        # The next step at which all ranks ask rank 0, and when they did so last.
        self._check_at = 0 if polled else 1 << 62
        self._checked: tuple[int, float] | None = None

    def open(self, root: str) -> Post:
        self._rank, self._size = _place(self._group)
        self._root = root
        self._token = self._shared(own_token())
        slot = f"rank-{self._rank}"
        self._folder = hold_own_folder(self._memory)
        # It may outlive this process, and needs what is in there until then.
        self._saver.inherit(self._folder, beside(Path(root), slot, self._token))
        self._thread.start()
        return Post(self._rank, self._size, 0, self._folder.path, slot, self._token)

    def resume(self, find: Callable[[], Found]) -> str | None:
        return resume_together(self._group, self._rank, self._size, find)

    def not_restored(self, name: str, why: str) -> NotRestored:
        """Nobody begins anew here: that is for whoever started this program."""
        return NotRestored(f"rank {self._rank} can't restore {name}: {why}")

    def attend(self) -> None:
        """Nobody outside waits for an answer here; but there is going to be something to write."""
        self._begun.set()

    def asked(self, done: int) -> Asked | None:
        self.attend()
        if self._size == 1:
            reason, self._wanted = self._wanted, None
        elif done < self._check_at:
            return None
        else:
            reason = self._agreed(done)
        return Asked(reason) if reason is not None else None

    def want(self, reason: str) -> None:
        self._wanted = reason

    def note(self, words: str) -> None:
        """Nobody keeps a history here: it is in the program's log."""

    def staged(self, buffer: Path, root: str, step: int, finishing: Finishing) -> None:
        if self._size > 1 and step <= self._furthest:
            # At once: rank 0 looks for what the others have written as soon as it has written its own part.
            take_back(self._draft(step), self._rank)
        self._furthest = max(self._furthest, step)
        with self._changed:
            self._unsettled += 1
        self._parts.put(Part(buffer, root, step, finishing))
        self.attend()

    def missed(self, step: int, why: str) -> None:
        """The others learn of it by a file in the draft, where there is room for one."""
        self._furthest = max(self._furthest, step)
        self._tell_others(step, why)

    def hold(self, seconds: float) -> None:
        """Nobody asks for it."""

    def settled(self, seconds: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._unsettled, seconds)

    def troubles(self) -> tuple[str, ...]:
        if not self._troubles:
            return ()
        with self._changed:
            told, self._troubles = tuple(self._troubles), []
        return told

    def close(self) -> None:
        """Waits for what is being written: nobody else would finish it."""
        if self._folder is None or not self._thread.is_alive():
            return
        self._closing_at = time.monotonic()
        if not self.settled(_SILENT_S):
            log.warning("waiting for checkpoints that are still being written, or for the parts of other ranks")
        if self.settled(_CLOSE_S):
            self._parts.put(None)
            self._begun.set()
            self._thread.join()
            self._folder.remove()
        else:
            self._tell(f"the last checkpoint is still being written after {_CLOSE_S:g} s: it may not be finished")
            self._folder.let_go()
        self._saver.close()

    def _shared(self, value: Any) -> Any:
        return value if self._size == 1 or self._group is None else self._group.broadcast(value)

    def _agreed(self, done: int) -> str | None:
        """Rank 0 says whether to save, and when it is to be asked again."""
        now = time.monotonic()
        answer = self._shared((self._wanted, next_check(done, now, self._checked)) if self._rank == 0 else None)
        self._checked = done, now
        if self._rank == 0:
            self._wanted = None
        reason, self._check_at = answer
        return str(reason) if reason is not None else None

    def _tell_others(self, step: int, why: str) -> None:
        if self._size > 1:
            with contextlib.suppress(OSError):
                path = self._draft(step, begin=True).path / missed_name(self._rank)
                write_whole(path, why.encode(errors="replace"))

    def _tell(self, trouble: str) -> None:
        with self._changed:
            self._troubles.append(trouble)

    def _draft(self, step: int, *, begin: bool = False) -> Draft:
        store = Store(Path(self._root))
        return (store.draft if begin else store.begun)(step, 0, self._token)

    # What follows runs in a thread of its own.

    def _write(self) -> None:
        self._begun.wait()
        # Before it is needed: it takes a moment. Whoever needs it then meets the same error, and tells.
        with contextlib.suppress(Exception):
            if self._closing_at == float("inf"):
                self._saver.start()
        waiting: list[tuple[Part, float]] = []
        while True:
            try:
                part = self._parts.get(timeout=_PAUSE_S if waiting else None)
            except queue.Empty:
                pass
            else:
                if part is None:
                    return
                if self._goes_on(part, self._saved, part):
                    waiting.append((part, time.monotonic() + _PARTS_S))
            # In order: what comes later makes an older draft useless.
            while waiting and not self._goes_on(waiting[0][0], self._unfinished, *waiting[0], len(waiting)):
                waiting.pop(0)

    def _goes_on(self, part: Part, work: Callable[..., bool], *args: object) -> bool:
        """What the work says of this part. Whatever it raises is the end of this part, and not of those after it."""
        try:
            return work(*args)
        except Exception as error:
            give_up(part.buffer, part.step)
            self._settle(part, words(error) or type(error).__name__)
            return False

    def _saved(self, part: Part) -> bool:
        """Write this rank's part; whether there is more to be done for it, once all others have written theirs."""
        save, *finish = self._requests(part)
        alone = self._size == 1
        if not alone:
            # What this thread itself may have told of it since it was staged again.
            take_back(self._draft(part.step), self._rank)
        # All at once where nobody else writes, so that it is finished even if this process is not there any more.
        why = self._ask(part, [save, *finish] if alone else [save])
        if why is None and not alone and self._rank == 0:
            return True
        if why is not None and alone:
            # On a disk that is full, it would be in the way of the next one.
            self._draft(part.step).discard()
        self._settle(part, why)
        return False

    def _unfinished(self, part: Part, deadline: float, waiting: int) -> bool:
        """Make a checkpoint of what all have written, if they have; whether there is more to be done for it."""
        draft = self._draft(part.step)
        if (why := _missed_by(draft, self._size)) is None:
            last = min(deadline, self._closing_at + _LAST_PARTS_S)
            if missing(draft, self._size) and time.monotonic() < last and waiting <= _MOST_WAITING:
                return True
            # Whoever has not written by now is named by the answer.
            why = self._ask(part, self._requests(part)[1:])
        self._settle(part, why)
        if why is not None:
            # It will never be whole, and others like it would fill the disk.
            draft.discard()
        return False

    def _settle(self, part: Part, why: str | None) -> None:
        if why is not None:
            self._tell_others(part.step, why)
        with self._changed:
            if why is not None:
                self._troubles.append(f"step {part.step} is not saved: {why}")
            self._unsettled -= 1
            self._changed.notify_all()

    def _requests(self, part: Part) -> list[dict[str, object]]:
        which = {"root": part.root, "step": part.step, "generation": 0, "token": self._token}
        finishing = asdict(part.finishing)
        prepare = {**which, "world_size": self._size, **{name: finishing[name] for name in ("verify", "md5")}}
        publish = {**which, **{name: finishing[name] for name in ("keep_last", "keep_every")}}
        return [{"save": str(part.buffer)}, {"prepare": prepare}, {"publish": publish}]

    def _ask(self, part: Part, requests: Sequence[dict[str, object]]) -> str | None:
        """Have the saver do this. One that dies is replaced, and asked again for what is not done, once."""
        for _ in range(_TRIES):
            try:
                answers = self._saver.ask(requests)
            except SaverLost as lost:
                why = str(lost)
                requests = [each for each in requests if "save" not in each or holds(part.buffer, part.step)]
            except OSError as error:
                why = f"the process that writes checkpoints can't be started ({error})"
            else:
                return next(filter(None, map(_why_not, answers)), None)
        give_up(part.buffer, part.step)
        return f"{why}, again and again"


class Saver:
    """The process that writes, and our end of its channel."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lock: int | None = None
        self._removes: list[str] = []
        # A data loader that outlives this process must not keep the saver from seeing that it is gone.
        os.register_at_fork(after_in_child=self._forget)

    def inherit(self, folder: HeldFolder, others: list[Path]) -> None:
        """Whoever is started from now on holds this folder as well, and removes all this when this process is gone."""
        self._lock = folder.lock
        self._removes = [str(path) for path in (folder.path, *others)]

    def start(self) -> None:
        """A new one, unless there is one."""
        if self._channel is not None and self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._channel, theirs = socket.socketpair()
        command, fds = saver_command(theirs.fileno()), [theirs.fileno()]
        if self._lock is not None:
            command += [str(self._lock), *self._removes]
            fds.append(self._lock)
        with theirs:
            # In a session of its own: a Ctrl-C ends the training, and not what is being written.
            self._process = subprocess.Popen(
                command,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def ask(self, requests: Sequence[dict[str, object]]) -> list[dict[str, Any]]:
        """All of the requests, and then all of their answers."""
        self.start()
        assert self._channel is not None
        assert self._process is not None
        answers: list[dict[str, Any]] = []
        try:
            for request in requests:
                frames.write(self._channel.fileno(), request)
            while len(answers) < len(requests) and (answer := frames.read(self._channel.fileno())) is not None:
                answers.append(answer)
        except OSError:
            pass
        except Exception:
            # Answers that are still to come would be taken for those to later requests.
            self._process.kill()
            self.close()
            raise
        if len(answers) < len(requests):
            raise SaverLost(f"the process that writes checkpoints has ended{self._ended()}")
        return answers

    def close(self) -> None:
        """It ends by itself, when it has done what it was asked for."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def _forget(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _ended(self) -> str:
        """How, in words; the next one is asked anew."""
        self.close()
        code = self._process.returncode if self._process is not None else None
        return "" if code is None else f" with signal {-code}" if code < 0 else f" with code {code}"


def next_check(done: int, now: float, last: tuple[int, float] | None) -> int:
    """The step at which ranks agree next: some seconds from now, by how fast the steps went since the last time."""
    if last is None or done <= last[0]:
        return done + 1
    pace = (now - last[1]) / (done - last[0])
    return done + (max(1, min(int(CHECK_S / pace), _MOST_STEPS)) if pace > 0 else _MOST_STEPS)


def _place(group: Group | None) -> tuple[int, int]:
    if group is None:
        return 0, 1
    if (found := group.place()) is not None:
        return found
    for size, how in (
        ("WORLD_SIZE", "torch.distributed.init_process_group()"),
        ("PADDLE_TRAINERS_NUM", "paddle.distributed.init_parallel_env()"),
    ):
        if os.environ.get(size, "1") not in ("", "1"):
            ranks = os.environ[size]
            raise UserError(
                f"{size} is {ranks}, and there is no group of {ranks} ranks yet: call {how} before restore()"
            )
    return 0, 1


def _why_not(answer: dict[str, Any]) -> str | None:
    if "failed" in answer:
        return str(answer["failed"])
    published = answer.get("published", {})
    if published.get("existed"):
        return taken(published["path"])
    return None


def _missed_by(draft: Draft, size: int) -> str | None:
    """Why a part will not come, if its rank has said so."""
    for rank in range(1, size):
        with contextlib.suppress(OSError):
            return f"rank {rank}: {(draft.path / missed_name(rank)).read_text()}"
    return None
