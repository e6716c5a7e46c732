"""The user's own check whether a node is fit to take part: a command, run by a shell."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from elastic_adapter.core.errors import GuardLost, SpawnFailed
from elastic_adapter.core.model import signal_name
from elastic_adapter.core.output import STDERR_FD, Output, Stream
from elastic_adapter.core.processes import Guard, Spawn

_DRAIN_S = 1.0
_LONGEST_WORDS = 300


class HealthCheck:
    """Runs the command; its output is shown."""

    def __init__(self, guard: Guard, output: Output, command: str, within_s: float, node: str) -> None:
        self._guard = guard
        self._output = output
        self._command = command
        self._within_s = within_s
        self._node = node

    async def run(self) -> str:
        """Why this node is not fit, in one line; empty: it is. The command is not told: it may hold a secret."""
        try:
            process = await self._guard.spawn(Spawn(("/bin/sh", "-c", self._command), {"ELASTIC_NODE": self._node}))
        except (SpawnFailed, GuardLost) as error:
            return str(error)
        streams = [Stream(fd, STDERR_FD, b"[health-check] ") for fd in (process.stdout, process.stderr)]
        for stream in streams:
            self._output.attach(stream)
        try:
            exit = await asyncio.wait_for(asyncio.shield(process.exited), self._within_s)
        except asyncio.TimeoutError:
            self._guard.signal(process, signal.SIGKILL)
            await process.exited
            return f"it did not end within {self._within_s:g} s (--health-check-timeout)"
        finally:
            process.channel.close()
        if exit.code == 0:
            return ""
        how = f"exited with code {exit.code}" if exit.signal is None else f"was killed by {signal_name(exit.signal)}"
        words = await self._last_words(streams)
        return f"it {how}{f': {words}' if words else ''}"

    async def _last_words(self, streams: list[Stream]) -> str:
        """The last line that it wrote, to stderr if there is one."""
        for stream in reversed(streams):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._output.drained(stream), _DRAIN_S)
            lines = stream.tail.decode(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].strip()[:_LONGEST_WORDS]
        return ""
