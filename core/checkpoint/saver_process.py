"""The agent's side of the process that writes checkpoints. One that is killed is started again."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic_adapter.core.checkpoint.command import saver_command
from elastic_adapter.core.errors import GuardLost, SpawnFailed
from elastic_adapter.core.model import signal_name
from elastic_adapter.core.output import STDERR_FD, Output, Stream
from elastic_adapter.core.processes import CHANNEL_FD, Exit, Guard, Process, Spawn

log = logging.getLogger(__name__)

# How often one request is tried with another saver, when the first was killed over it.
_TRIES = 2


@dataclass(slots=True, eq=False)
class _Request:
    message: dict[str, Any]
    answer: asyncio.Future[dict[str, Any]]
    tries: int = 0


class SaverProcess:
    """Takes requests, one after the other, and gives each an answer. See ``saver`` for what they are."""

    def __init__(self, guard: Guard, output: Output) -> None:
        self._guard = guard
        self._output = output
        self._process: Process | None = None
        self._starting = asyncio.Lock()
        self._waiting: deque[_Request] = deque()

    async def start(self) -> None:
        """See to it that there is one. Raises SpawnFailed, GuardLost."""
        async with self._starting:
            if self._process is not None and self._process.alive:
                return
            process = await self._guard.spawn(Spawn(tuple(saver_command(CHANNEL_FD)), {}))
            for fd in (process.stdout, process.stderr):
                self._output.attach(Stream(fd, STDERR_FD, b"[saver] "))
            process.channel.listen(self._hear)
            process.exited.add_done_callback(partial(self._ended, process))
            self._process = process
            for request in self._waiting:
                self._send(request)

    async def ask(self, **message: object) -> dict[str, Any]:
        """The answer; one with ``failed`` says why there is none."""
        request = _Request(message, asyncio.get_running_loop().create_future())
        try:
            await self.start()
        except (SpawnFailed, GuardLost) as error:
            return {"failed": str(error)}
        self._waiting.append(request)
        self._send(request)
        return await request.answer

    def close(self) -> None:
        """At the end of its channel it ends, when it has done what it was asked for."""
        if self._process is not None:
            self._process.channel.close()

    def _send(self, request: _Request) -> None:
        assert self._process is not None
        request.tries += 1
        self._process.channel.send(request.message)

    def _hear(self, answer: dict[str, object]) -> None:
        if self._waiting:
            request = self._waiting.popleft()
            if not request.answer.done():
                request.answer.set_result(answer)

    def _ended(self, process: Process, exit: asyncio.Future[Exit]) -> None:
        process.channel.drain()
        process.channel.close()
        if not self._waiting or exit.cancelled():
            return
        ended = exit.result()
        how = f"was killed by {signal_name(ended.signal)}" if ended.signal is not None else f"ended with {ended.code}"
        log.warning("the process that writes checkpoints (pid %d) %s", process.pid, how)
        if self._waiting[0].tries >= _TRIES:
            self._hear({"failed": f"the process that writes checkpoints {how}, {_TRIES} times"})
        if self._waiting:
            self._again = asyncio.ensure_future(self._start_again())

    async def _start_again(self) -> None:
        try:
            await self.start()
        except (SpawnFailed, GuardLost) as error:
            while self._waiting:
                self._hear({"failed": str(error)})
