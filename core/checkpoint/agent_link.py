"""A Checkpointer's link to the agent that launched its process: a socket, and a page that is looked at each step."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from elastic_adapter.core.checkpoint.framework import Group
from elastic_adapter.core.checkpoint.link import Asked, Finishing, Found, NotRestored, Post, resume_together
from elastic_adapter.core.checkpoint.manifest import parse_folder
from elastic_adapter.core.checkpoint.page import ANSWERED, DONE, HOLD, NOWHERE, PAUSED, SAVE_AT, open_page
from elastic_adapter.core.errors import ElasticError, UserError

# How long a worker waits until it is told where to save. The one who asks gives up sooner.
_AGREED_S = 10.0
_LOOK_EVERY_S = 0.001
# How long a rank that can't restore waits to be ended.
_ENDED_S = 120.0
# How long the next Checkpointer of a process waits for what the last one has saved.
_FORMER_S = 600.0
_TELL_AGAIN_S = 5.0
# Parts of a first try may still be written on some node when a second one begins.
_ONCE = "; a step that came to nothing is not tried again by the same generation, but the next one is"
# How long the agent may take to answer at the start.
_POST_S = 60.0


class AgentGone(ElasticError):
    """The launcher on this node does not answer any more."""


class AgentLink:
    """See ``Link``. The process that it is made in is the worker."""

    # Who has been told what its world goes on from: whoever asks later goes back, in the midst of it.
    _begun: ClassVar[set[tuple[str, int, int]]] = set()
    # Those that were closed, and are still to hear what became of what they had staged: the next one waits for that.
    _left: ClassVar[dict[tuple[str, int, int], AgentLink]] = {}

    def __init__(self, environ: Mapping[str, str] | None = None, group: Group | None = None) -> None:
        """Raises OSError where no agent listens."""
        environ = os.environ if environ is None else environ
        self._group = group
        self._rank = int(environ["ELASTIC_RANK"])
        self._local_rank = int(environ["ELASTIC_LOCAL_RANK"])
        self._world_size = int(environ["ELASTIC_WORLD_SIZE"])
        self._generation = int(environ["ELASTIC_GENERATION"])
        self._worker = (environ["ELASTIC_NOTICES"], self._generation, self._rank)
        self._page = open_page(environ["ELASTIC_SAVE_PAGE"])
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(environ["ELASTIC_NOTICES"])
        self._unread = b""
        self._root = ""
        # What was asked for before does not concern this process.
        self._answered = self._page[ANSWERED]
        # Whether the agent knows that this process looks at its page, or is going to.
        self._looks = False
        # Steps that were staged here and are not known to be settled.
        self._unsettled: set[int] = set()
        # Of those that came to nothing since the last one was staged, and that no later one made up for: why.
        self._lost: dict[int, str] = {}
        # All that ever came to nothing here.
        self._failed: set[int] = set()
        # What is to be told to whoever waited.
        self._troubles: tuple[str, ...] = ()

    def open(self, root: str) -> Post:
        if (former := AgentLink._left.pop(self._worker, None)) is not None:
            former.settled(_FORMER_S)
            former.shut()
        self._root = root
        self._tell(
            checkpointer={
                "generation": self._generation,
                "rank": self._rank,
                "local_rank": self._local_rank,
                "root": root,
            }
        )
        post = self._wait_for("post", _POST_S)["post"]
        return Post(
            self._rank,
            self._world_size,
            self._generation,
            Path(post["folder"]),
            post["slot"],
            post["token"],
            post["job"],
            post["run"],
            frozenset(post["busy"]),
        )

    def resume(self, find: Callable[[], Found]) -> str | None:
        name = self._newest(find) if self._worker in AgentLink._begun else self._told(find)
        AgentLink._begun.add(self._worker)
        place = None if name is None else parse_folder(name)
        # Whoever asks how far we are is told where we begin.
        self._page[DONE] = place[0] if place is not None else 0
        return name

    def _told(self, find: Callable[[], Found]) -> str | None:
        """What the launcher says that this world goes on from."""
        self._tell(resume={"rank": self._rank})
        answer = self._wait_for("resume", None)["resume"]
        if answer.get("find"):
            self._tell(found={"root": self._root, "names": find().names})
            answer = self._wait_for("resume", None)["resume"]
        name: str | None = answer["name"]
        return name

    def _newest(self, find: Callable[[], Found]) -> str | None:
        """What there is by now: since the world began, it has saved. The ranks agree as they do without a launcher."""
        if self._world_size > 1 and (self._group is None or self._group.place() is None):
            raise UserError(
                f"restore() once more is agreed upon by all {self._world_size} ranks, and they have no group: "
                "make it first (torch.distributed.init_process_group(), paddle.distributed.init_parallel_env())"
            )
        return resume_together(self._group, self._rank, self._world_size, find)

    def not_restored(self, name: str, why: str) -> NotRestored:
        end = time.monotonic() + _ENDED_S
        while time.monotonic() < end:
            # Whoever leads may change meanwhile.
            self._tell(not_restored={"rank": self._rank, "name": name, "why": why})
            time.sleep(_TELL_AGAIN_S)
        return NotRestored(f"{name} can't be restored: {why}")

    def attend(self) -> None:
        if not self._looks:
            self._looks = True
            self._tell(looks={"rank": self._rank})

    def asked(self, done: int) -> Asked | None:
        page = self._page
        page[DONE] = done
        self.attend()
        if page[PAUSED] == self._answered:
            return None
        return self._asked(done)

    def _asked(self, done: int) -> Asked | None:
        page = self._page
        if page[ANSWERED] != page[PAUSED]:
            end = time.monotonic() + _AGREED_S
            while page[ANSWERED] != page[PAUSED] and time.monotonic() < end:
                time.sleep(_LOOK_EVERY_S)
            if page[ANSWERED] != page[PAUSED]:
                # Nobody tells any more. If they do after all, others have waited in vain, and nothing is committed.
                self._answered = page[PAUSED]
                return None
        step = page[SAVE_AT]
        if step > done:
            return None
        self._answered = page[ANSWERED]
        if step == NOWHERE:
            return None
        # All ranks waited before it was known: if they call this with the same numbers, this is the same one for all.
        return Asked("the launcher asked for it", hold=bool(page[HOLD]))

    def want(self, reason: str) -> None:
        self._tell(want={"rank": self._rank, "reason": reason})

    def note(self, words: str) -> None:
        self._tell(note={"rank": self._rank, "words": words})

    def staged(self, buffer: Path, root: str, step: int, finishing: Finishing) -> None:
        self._listen()
        # Nobody waits any more for what is before it.
        self._lost.clear()
        self._unsettled.add(step)
        self._tell(
            staged={
                "rank": self._rank,
                "buffer": str(buffer),
                "root": root,
                "step": step,
                "world_size": self._world_size,
                "finishing": asdict(finishing),
            }
        )

    def missed(self, step: int, why: str) -> None:
        self._listen()
        self._failed.add(step)
        self._tell(missed={"rank": self._rank, "step": step, "why": why})

    def hold(self, seconds: float) -> None:
        """Wait to be ended; whoever is told something else by its page goes on."""
        end = time.monotonic() + seconds
        while self._page[PAUSED] == self._answered and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S * 10)

    def settled(self, seconds: float | None = None) -> bool:
        end = None if seconds is None else time.monotonic() + seconds
        came = self._wait_until_settled(end)
        self._troubles = tuple(f"step {step} is not saved: {why}" for step, why in sorted(self._lost.items()))
        return came

    def _wait_until_settled(self, end: float | None) -> bool:
        while self._unsettled:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            try:
                message = self._read(left)
            except AgentGone:
                return False
            if message is not None:
                self._note(message)
        return True

    def troubles(self) -> tuple[str, ...]:
        """Those that somebody waited for. The launcher tells of all."""
        told, self._troubles = self._troubles, ()
        return told

    def close(self) -> None:
        if self._unsettled:
            self._tell(closed={"rank": self._rank})
            AgentLink._left[self._worker] = self
        else:
            self.shut()

    def shut(self) -> None:
        # Children that were forked meanwhile have the socket as well: the agent is to see its end all the same.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _tell(self, **message: object) -> None:
        try:
            self._socket.settimeout(_POST_S)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            # The agent is gone, and with it, in a moment, this process.
            return

    def _wait_for(self, kind: str, seconds: float | None) -> dict[str, Any]:
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            message = self._read(None if end is None else max(0.0, end - time.monotonic()))
            if message is None:
                raise AgentGone(f"the launcher did not answer within {seconds:g} s where checkpoints go")
            if kind in message:
                return message
            self._note(message)

    def _listen(self) -> None:
        """Take what was said meanwhile: who does not read is told no more."""
        with contextlib.suppress(AgentGone):
            while (message := self._read(0.0)) is not None:
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if "settled" not in message:
            return
        step, why = message["settled"]["step"], message["settled"]["why"]
        if why and step in self._unsettled:
            self._lost[step] = f"{why}{_ONCE}" if step in self._failed else why
            self._failed.add(step)
        elif not why:
            self._unsettled = {each for each in self._unsettled if each > step}
            self._lost = {each: reason for each, reason in self._lost.items() if each > step}
        self._unsettled.discard(step)

    def _read(self, seconds: float | None) -> dict[str, Any] | None:
        """The next message; None: none came in that time. Raises AgentGone."""
        while b"\n" not in self._unread:
            self._socket.settimeout(seconds)
            try:
                data = self._socket.recv(65536)
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as error:
                raise AgentGone(f"the launcher is gone: {error.strerror}") from error
            if not data:
                raise AgentGone("the launcher is gone")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
