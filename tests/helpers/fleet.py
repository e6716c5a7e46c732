"""A job on several nodes of this machine, and the steps that its workers took."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.hosts import Host
from helpers.launched import PATIENCE_S, Launched

# Whoever trains on takes steps all the time, on whatever machine: who does not for so long has stopped.
_PAUSE_S = 20.0

HERE = Path(__file__).parent
LAUNCHER = [str(Path(sys.executable).with_name("elastic-launch"))]


@dataclass(frozen=True)
class Step:
    """One rank took a step together with all ranks of its world."""

    at: float
    generation: int
    size: int
    rank: int
    step: int
    node: str


class Fleet:
    """``start`` nodes, watch their ``steps``. By default each is on a loopback address of its own."""

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        nnodes: str = "2:3",
        *flags: object,
        backend: str = "etcd",
        framework: str = "plain",
        program: Path = HERE / "world.py",
    ) -> None:
        self.folder = folder
        self.job = f"job-{uuid.uuid4().hex[:8]}"
        self.endpoint = endpoint
        self._program: tuple[object, ...] = (program, folder)
        self._steps = folder
        self._meet = ("--framework", framework, *self._rendezvous(backend))
        self.nodes: dict[str, Launched] = {}
        self._all: list[Launched] = []
        self._flags = ("--nnodes", nnodes, *flags)

    def _rendezvous(self, backend: str) -> tuple[str, ...]:
        if backend == "static":
            host, _, port = self.endpoint.rpartition(":")
            return ("--master-addr", host, "--master-port", port)
        return ("--rdzv-id", self.job, "--rdzv-backend", backend, "--rdzv-endpoint", self.endpoint)

    def trains_with(self, steps: Path, *program: object) -> None:
        """Run another program than the usual one, which leaves its steps in that folder."""
        self._steps, self._program = steps, program

    def start(
        self,
        name: str,
        *flags: object,
        host: Host | None = None,
        launcher: list[str] | None = None,
        script: tuple[object, ...] = (),
        env: dict[str, str] | None = None,
    ) -> Launched:
        number = len(self._all) + 1
        address = host.address if host is not None else f"127.0.0.{number}"
        argv = [
            *(*(launcher or LAUNCHER), *self._meet, "--node-id", name, "--local-addr", address),
            *(*self._flags, *flags, *self._program, *script),
        ]
        words = [str(word) for word in argv]
        node = host.run(words, env) if host is not None else Launched(words, env or {}, self.folder)
        self.nodes[name] = node
        self._all.append(node)
        return node

    def start_in_order(self, *names: str, **options: object) -> None:
        """The first one leads before there is another."""
        for name in names:
            self.start(name, **options).seen(r"this node is a member" if self._all[1:] else r"this node leads")

    def steps(self) -> list[Step]:
        found = []
        for path in self._steps.glob("*.steps"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    at, generation, size, rank, step, node = line.split()
                    found.append(Step(float(at), int(generation), int(size), int(rank), int(step), node))
        return sorted(found, key=lambda step: step.at)

    def until(self, found: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> object:
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if result := found():
                return result
            time.sleep(0.02)
        last = "\n".join(str(step) for step in self.steps()[-8:])
        return pytest.fail(f"{what} did not come in {within_s} s\n{last}\n{self.text}")

    def trains(self, *names: str, since: float | None = None, within_s: float = PATIENCE_S, per_node: int = 1) -> int:
        """Wait until exactly these nodes take steps together that are newer than ``since``; their generation."""
        since = time.time() if since is None else since
        size = per_node * len(names)

        def together() -> int | None:
            fresh = [step for step in self.steps() if step.at > since and step.size == size]
            for generation in sorted({step.generation for step in fresh}, reverse=True):
                taken = [step for step in fresh if step.generation == generation]
                if {step.node for step in taken} == set(names) and len({step.rank for step in taken}) == size:
                    return generation
            return None

        generation = self.until(together, f"a world of {', '.join(names)}", within_s)
        assert isinstance(generation, int)
        return generation

    def trains_on(self, names: str, generation: int, seconds: float) -> None:
        """These nodes, of one letter each, go on taking steps of this generation for that long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.trains(*names, within_s=_PAUSE_S) == generation, self.text
            time.sleep(0.2)

    def kill(self, name: str) -> float:
        """kill -9 of the node's agent and of all that it started; when that was over."""
        node = self.nodes.pop(name)
        pids = [node.process.pid, *(pid for pid in node.family() if pid != node.process.pid)]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        node.process.wait(10)
        return time.time()

    def stop(self) -> None:
        """Let the training end well on all nodes."""
        (self.folder / "stop").touch()
        for node in self.nodes.values():
            assert node.finish() == 0, node.text

    @property
    def text(self) -> str:
        return "\n".join(f"--- {name}\n{node.text}" for name, node in self.nodes.items())

    def generations(self) -> list[int]:
        return sorted({step.generation for step in self.steps()})

    def overlaps(self) -> list[tuple[Step, Step]]:
        """Steps of an earlier generation that were taken after the first of a later one."""
        steps = self.steps()
        found = []
        latest = steps[0] if steps else None
        for step in steps:
            if latest is not None and step.generation < latest.generation:
                found.append((step, latest))
            elif latest is None or step.generation > latest.generation:
                latest = step
        return found

    def destroy(self) -> None:
        for node in self._all:
            node.destroy()
