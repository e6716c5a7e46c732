"""A node's lease in etcd: kept alive, taken anew when it is lost, and known to the second for how long it is good."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from elastic_adapter.core.errors import OutOfReach, RunOver
from elastic_adapter.core.etcd import Etcd, Lease

# A lease is renewed this often in its life.
_RENEWALS = 4
_RETRY_S = 0.3


class LeaseKeeper:
    """Renews a lease for as long as it runs, and registers anew under another one when it has ended."""

    def __init__(
        self,
        etcd: Etcd,
        seconds: int,
        register: Callable[[Lease], Awaitable[None]],
        check: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self._etcd = etcd
        self._seconds = seconds
        # Both raise OutOfReach, and RunOver when etcd does not know this run.
        self._register = register
        self._check = check
        self._changed = changed
        self._asking = asyncio.Lock()
        self.lease = Lease(0, seconds)
        # How many leases there were: a new one means that all keys under the one before are gone.
        self.count = 0
        # When the last keep-alive that was answered had been sent (monotonic).
        self.acked_at = time.monotonic()
        # Whether etcd answers, and still knows of this run: one that lost its data counts as silent.
        self.answers = True
        # Whether it answers without knowing of this run.
        self.forgot = False
        # Set for good when the job has a newer run.
        self.replaced: RunOver | None = None

    async def keep(self) -> None:
        """Renew until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(self.lease.ttl_s / _RENEWALS if self.answers else _RETRY_S)

    async def ask(self) -> bool:
        """Renew once, now; whether etcd answered."""
        async with self._asking:
            return await self._ask()

    def adopt(self, lease: Lease, sent: float) -> None:
        """Keep this lease, which is registered, and was last granted or renewed by what was sent then."""
        self.lease, self.acked_at = lease, sent
        self.count += 1

    async def _ask(self) -> bool:
        before = self._state()
        sent = time.monotonic()
        try:
            if self.lease.id == 0 or await self._etcd.keep_alive(self.lease.id) == 0:
                await self._enrol()
            else:
                await self._check()
                self.acked_at = sent
            self.answers, self.forgot = True, False
        except OutOfReach:
            self.answers = self.forgot = False
        except RunOver as over:
            self.answers, self.forgot = False, True
            if over.replaced:
                self.replaced = over
        if before != self._state():
            self._changed()
        return self.answers

    def _state(self) -> tuple[object, ...]:
        return self.answers, self.forgot, self.count, self.replaced

    async def _enrol(self) -> None:
        """Register under a new lease. Raises OutOfReach, RunOver."""
        sent = time.monotonic()
        lease = await self._etcd.grant(self._seconds)
        await self._register(lease)
        self.lease, self.acked_at = lease, sent
        self.count += 1
