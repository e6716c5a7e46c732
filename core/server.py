"""The gRPC side of the coordinator: it translates and hands on; it decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
import grpc.aio

from elastic_adapter.core.events import Event, MemberJoined, WorkerExited
from elastic_adapter.core.job import Job
from elastic_adapter.core.wire import hello_from_wire, report_from_wire, status_to_wire
from elastic_adapter.proto import control_pb2 as pb
from elastic_adapter.proto import control_pb2_grpc as rpc

Outbox = asyncio.Queue[pb.Directive | None]


class Desk(Protocol):
    """What the server needs of a coordinator."""

    def next_order(self) -> int: ...

    def attached(self, joined: MemberJoined, exits: tuple[WorkerExited, ...], outbox: Outbox) -> None: ...

    def detached(self, node: str, outbox: Outbox) -> None: ...

    def post(self, event: Event) -> None: ...

    @property
    def job(self) -> Job: ...


class _Servicer(rpc.CoreServicer):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Attach(  # noqa: N802 (the name is the protocol's)
        self, requests: AsyncIterator[pb.Report], context: grpc.aio.ServicerContext[pb.Report, pb.Directive]
    ) -> AsyncIterator[pb.Directive]:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first report on a stream must be Hello")
            return
        joined, exits = hello_from_wire(first, self._desk.next_order())
        outbox: Outbox = asyncio.Queue()
        self._desk.attached(joined, exits, outbox)
        reader = asyncio.create_task(self._read(requests, joined.member.node, outbox))
        try:
            while (directive := await outbox.get()) is not None:
                yield directive
        finally:
            reader.cancel()
            self._desk.detached(joined.member.node, outbox)

    async def Status(  # noqa: N802 (as above)
        self, _request: pb.StatusRequest, _context: grpc.aio.ServicerContext[pb.StatusRequest, pb.StatusReply]
    ) -> pb.StatusReply:
        return status_to_wire(self._desk.job)

    async def _read(self, requests: AsyncIterator[pb.Report], node: str, outbox: Outbox) -> None:
        try:
            async for report in requests:
                event = report_from_wire(report, node)
                if event is not None:
                    self._desk.post(event)
        finally:
            outbox.put_nowait(None)


class Server:
    """The coordinator's listening end."""

    def __init__(self, desk: Desk, address: str) -> None:
        self.address = address
        self._server = grpc.aio.server()
        rpc.add_CoreServicer_to_server(_Servicer(desk), self._server)
        self._server.add_insecure_port(address)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=None)
