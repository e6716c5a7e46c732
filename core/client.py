"""An agent's stream to the coordinator: reports go up, directives come down."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from elastic_adapter.core.errors import LinkBroken, NotLeading
from elastic_adapter.core.events import MemberJoined
from elastic_adapter.core.model import Directive
from elastic_adapter.core.wire import (
    EPOCH,
    TOKEN,
    Report,
    directive_from_wire,
    hello_to_wire,
    is_ping,
    pong_to_wire,
    report_to_wire,
)
from elastic_adapter.proto import control_pb2 as pb
from elastic_adapter.proto import control_pb2_grpc as rpc

_OPTIONS = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1500),
    ("grpc.http2.ping_timeout_ms", 1500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # A new link tries at once, whatever earlier ones to the same address met.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Agents reach each other directly.
    ("grpc.enable_http_proxy", 0),
)


class Link:
    """One stream. It is not repaired when it breaks: whoever uses it opens another."""

    def __init__(self, address: str, token: str = "", epoch: int = 0) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = rpc.CoreStub(self._channel)
        self._metadata = ((TOKEN, token),) if token else ()
        self._call: grpc.aio.StreamStreamCall[pb.Report, pb.Directive] | None = None
        self._attached = False
        # What is to be written, in order: until we are taken in, it waits behind Hello.
        self._unsent: deque[pb.Report] = deque()
        # A stream takes one message at a time.
        self._writing = asyncio.Lock()
        # The highest epoch seen: directives of an older leader are refused.
        self.epoch = epoch

    async def attach(self, state: MemberJoined, within_s: float = 5.0) -> None:
        """Open the stream; done when the coordinator has taken us in. Raises LinkBroken, NotLeading.

        What is reported meanwhile follows the state, which does not tell of it; if this fails, it is dropped.
        """
        call = self._call = self._stub.Attach(metadata=self._metadata)
        try:
            await asyncio.wait_for(self._opened(call, hello_to_wire(state)), within_s)
        except asyncio.TimeoutError:
            call.cancel()
            raise LinkBroken(f"no answer in {within_s:g} s") from None
        self._attached = True
        await self._flush(call)

    async def _opened(self, call: grpc.aio.StreamStreamCall[pb.Report, pb.Directive], hello: pb.Report) -> None:
        try:
            await call.write(hello)
            # Pairs, and in some versions of grpc no mapping.
            shown = next((value for name, value in await call.initial_metadata() or () if name == EPOCH), None)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            shown = None
        if shown is None:
            code, details = await call.code(), await call.details()
            kind = NotLeading if code == grpc.StatusCode.FAILED_PRECONDITION else LinkBroken
            raise kind(_words(code, details or ""))
        if int(shown) < self.epoch:
            call.cancel()
            raise NotLeading(f"it leads in epoch {shown}, which is over")
        self.epoch = int(shown)

    async def report(self, report: Report) -> None:
        """Send one report. Before ``attach``, and when the stream is broken, it is dropped: Hello tells all of it."""
        await self._write(report_to_wire(report))

    async def _write(self, message: pb.Report) -> None:
        if self._call is None:
            return
        self._unsent.append(message)
        if self._attached:
            await self._flush(self._call)

    async def _flush(self, call: grpc.aio.StreamStreamCall[pb.Report, pb.Directive]) -> None:
        async with self._writing:
            while self._unsent:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(self._unsent.popleft())

    async def directives(self) -> AsyncIterator[Directive]:
        """The directives as they come, until the coordinator ends the stream. Raises LinkBroken."""
        assert self._call is not None
        try:
            async for message in self._call:
                if message.epoch < self.epoch:
                    continue
                self.epoch = message.epoch
                if is_ping(message):
                    await self._write(pong_to_wire())
                elif (directive := directive_from_wire(message)) is not None:
                    yield directive
        except grpc.aio.AioRpcError as error:
            raise LinkBroken(_words(error.code(), error.details() or "")) from error

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()


async def ask_phase(address: str, token: str, within_s: float = 2.0) -> tuple[str, str] | None:
    """What a leader says of its job: the phase and why; None where it can't be reached from here."""
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        try:
            ask = rpc.CoreStub(channel).Status
            reply = await ask(pb.StatusRequest(), timeout=within_s, metadata=((TOKEN, token),))
        except grpc.aio.AioRpcError:
            return None
    return reply.phase, reply.reason


async def ask_to_clear(address: str, token: str, node: str, within_s: float = 2.0) -> bool:
    """Tell a leader that nothing is to be held against this node; whether it was told."""
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        try:
            ask = rpc.CoreStub(channel).Clear
            await ask(pb.ClearRequest(node=node), timeout=within_s, metadata=((TOKEN, token),))
        except grpc.aio.AioRpcError:
            return False
    return True


def _words(code: grpc.StatusCode, details: str) -> str:
    """Why a stream ended, for people."""
    said = details.lower()
    if code == grpc.StatusCode.UNAVAILABLE and ("ping" in said or "keepalive" in said):
        return "it does not answer"
    if code == grpc.StatusCode.UNAVAILABLE and "refused" in said:
        return "the connection is refused"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return "the connection ended"
    return f"{details} ({code.name})"
