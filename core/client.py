"""An agent's stream to the coordinator: reports go up, directives come down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from elastic_adapter.core.errors import LinkBroken
from elastic_adapter.core.model import Directive, Member, WorkerExit
from elastic_adapter.core.wire import Report, directive_from_wire, hello_to_wire, report_to_wire
from elastic_adapter.proto import control_pb2 as pb
from elastic_adapter.proto import control_pb2_grpc as rpc


class Link:
    """One stream. It is not repaired when it breaks: whoever uses it opens another."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = rpc.CoreStub(self._channel)
        self._call: grpc.aio.StreamStreamCall[pb.Report, pb.Directive] | None = None
        # The highest epoch seen: directives of an older leader are refused.
        self._epoch = 0

    async def attach(self, member: Member, running: int | None, exits: tuple[WorkerExit, ...]) -> None:
        self._call = self._stub.Attach()
        await self._write(hello_to_wire(member, running, exits))

    async def report(self, report: Report) -> None:
        """Send one report. On a broken stream it is dropped: ``directives`` is where a broken stream is noticed."""
        await self._write(report_to_wire(report))

    async def _write(self, message: pb.Report) -> None:
        assert self._call is not None
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(message)

    async def directives(self) -> AsyncIterator[Directive]:
        """The directives as they come, until the coordinator ends the stream. Raises LinkBroken."""
        assert self._call is not None
        try:
            async for message in self._call:
                directive = directive_from_wire(message)
                if directive is not None and message.epoch >= self._epoch:
                    self._epoch = message.epoch
                    yield directive
        except grpc.aio.AioRpcError as error:
            raise LinkBroken(f"{error.code().name}: {error.details()}") from error

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()
