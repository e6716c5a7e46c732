"""Launchers with their workers, all on this machine: what it takes until the world is whole again.

Ours meet at a real etcd, torchrun's at the c10d store of the one that is started first, Paddle's at the same etcd. By
itself this file runs one side of one case and writes nothing: ``benchmarks/nodes.py ours node-killed [TIMES]``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import BIN, ENVIRON, HERE, PATIENCE_S, SCRIPTS, THEIR_ENV

sys.path.append(str(HERE.parent / "tests"))
from helpers.etcd_servers import cluster, free_ports

OURS, THEIRS = "ours", "theirs"
TORCH, PADDLE = "torch", "paddle"
NAMES = ("n1", "n2", "n3")


class Never(Exception):
    """What was waited for does not come; says how it ended."""


@functools.cache
def etcd() -> str:
    """One real server on loopback for the whole run; its endpoint."""
    folder = tempfile.mkdtemp(prefix="bench-etcd-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    running = contextlib.ExitStack()
    (server,) = running.enter_context(cluster(Path(folder), 1))
    atexit.register(running.close)
    return server.endpoint


def listens(port: int) -> bool:
    """Asked of the kernel: a connection of ours would be one more client to a store."""
    listening = "0A"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == listening and int(words[1].rpartition(":")[2], 16) == port:
                return True
    return False


@dataclass(frozen=True)
class Event:
    """The first all_reduce of one worker."""

    at: float
    world: int
    rank: int
    pid: int
    node: str
    restarts: str
    generation: str

    @classmethod
    def of(cls, line: str) -> Event:
        at, world, rank, pid, node, restarts, generation = line.split()
        return cls(float(at), int(world), int(rank), int(pid), node, restarts, generation)


class Node:
    """One launcher with all that came from it."""

    def __init__(self, argv: list[str], env: dict[str, str], log: Path) -> None:
        self._mark = f"BENCH_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self.log = log
        with log.open("wb") as output:
            self.started = time.time()
            self.process = subprocess.Popen(
                argv, env={**ENVIRON, **env, name: value}, stdout=output, stderr=subprocess.STDOUT
            )

    def family(self) -> list[int]:
        """All its living processes, the launcher first."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    environ = Path(f"/proc/{name}/environ").read_bytes()
                    state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if self._mark.encode() in environ and state != "Z":
                    found.append(int(name))
        return sorted(found, key=lambda pid: (pid != self.process.pid, pid))

    def signal_all(self, number: signal.Signals) -> float:
        """As if the machine did it: the launcher can not tell anybody of its workers' end. When it began."""
        pids = self.family()
        at = time.time()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return at

    def destroy(self) -> None:
        while self.family():
            self.signal_all(signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait(10)


@functools.cache
def etcd3_folder() -> str:
    """What Paddle's launcher needs to talk to etcd, and what can't be installed beside anything of today."""
    folder = tempfile.mkdtemp(prefix="bench-etcd3-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--target", folder)
    subprocess.run([*install, "etcd3==0.12.0", "protobuf==3.20.3"], check=True, timeout=300, stderr=subprocess.DEVNULL)
    return folder


class Job:
    """One worker on each of 2 to 3 nodes, or two on a node of their own."""

    def __init__(
        self, side: str, *flags: str, framework: str = TORCH, alone: bool = False, restarts: bool = True
    ) -> None:
        self.side, self.flags, self.framework, self.alone = side, flags, framework, alone
        # Paddle's launcher restarts nothing without an etcd, even on a single node.
        self.restarts = restarts
        self.id = f"bench-{uuid.uuid4().hex[:8]}"
        self.nodes: dict[str, Node] = {}

    def __enter__(self) -> Job:
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        (self.port,) = free_ports(1)
        if self.framework == PADDLE and self.side == THEIRS:
            etcd3_folder()
        if self.side == OURS or self.framework == PADDLE:
            etcd()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """End it as a training ends, if it still runs well; then whatever is left."""
        try:
            if kind is None:
                (self.folder / "stop").touch()
                end = time.time() + 10
                while time.time() < end and any(node.process.poll() is None for node in self.nodes.values()):
                    time.sleep(0.02)
        finally:
            for node in self.nodes.values():
                node.destroy()
            shutil.rmtree(self.folder)

    def start(self, name: str) -> Node:
        env = {"BENCH_FOLDER": str(self.folder), "BENCH_NODE": name}
        if self.side == OURS:
            command = [*self._ours(name), *self.flags]
        elif self.framework == TORCH:
            command, env = [*self._torchrun(), *self.flags], {**env, **THEIR_ENV}
        else:
            command, env = [*self._paddle_launch(name), *self.flags], {**env, "PYTHONPATH": etcd3_folder()}
        argv = [*command, str(SCRIPTS / {TORCH: "steps.py", PADDLE: "paddle_steps.py"}[self.framework])]
        self.nodes[name] = Node(argv, env, self.folder / f"{name}.log")
        return self.nodes[name]

    def _ours(self, name: str) -> list[str]:
        command = [str(BIN / "elastic-launch"), "--framework", self.framework, "--max-restarts", "10"]
        if self.alone:
            return [*command, "--nproc-per-node", "2"]
        meet = ("--rdzv-id", self.id, "--rdzv-backend", "etcd", "--rdzv-endpoint", etcd(), "--local-addr", "127.0.0.1")
        return [*command, "--node-id", name, "--nnodes", "2:3", "--nproc-per-node", "1", *meet]

    def _torchrun(self) -> list[str]:
        # A worker that lost its peers fails, and torchrun counts that as a restart.
        command = [str(BIN / "torchrun"), "--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "10"]
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}")
        return [*command, "--rdzv-id", self.id, *meet, "--local-addr", "127.0.0.1"]

    def _paddle_launch(self, name: str) -> list[str]:
        nodes, workers = ("1", "2") if self.alone else ("2:3", "1")
        meet = ("--master", f"etcd://{etcd()}", "--job_id", self.id, "--max_restart", "10", "--elastic_level", "1")
        return [
            *(sys.executable, "-m", "paddle.distributed.launch", "--nnodes", nodes, "--nproc_per_node", workers),
            *("--host", "127.0.0.1", "--log_dir", str(self.folder / f"{name}-logs")),
            *(() if self.alone and not self.restarts else meet),
        ]

    def start_in_order(self, *names: str) -> None:
        """The first one leads, or has the store, before there is another."""
        first, *others = names
        self.start(first)
        self.wait_for(self.is_led, "the first node", [first])
        for name in others:
            self.start(name)

    def is_led(self) -> bool:
        if self.side == THEIRS and self.framework == TORCH:
            return listens(self.port)
        words = ("--endpoints", etcd(), "get", "", "--prefix", "--keys-only")
        keys = subprocess.run([BIN / "etcdctl", *words], capture_output=True, text=True, timeout=20, check=True).stdout
        return self.id in keys

    def settle(self, size: int) -> None:
        """Train until nothing is left to be done but training."""
        names = list(self.nodes)
        self.world(size, names, 0.0)
        if self.side == OURS:
            logs = [node.log for node in self.nodes.values()]
            ready = lambda: all("standbys are ready" in log.read_text(errors="replace") for log in logs)  # noqa: E731
            self.wait_for(ready, "standbys", names)
        time.sleep(1.0 if self.side == OURS else 3.0)

    def world(self, size: int, names: list[str], since: float) -> float:
        """Wait for the first all_reduce of a world of that size on all these nodes; when the last rank had it."""

        def seen() -> float | None:
            events = self.events()
            fresh = [event for event in reversed(events) if event.world == size and event.at >= since]
            firsts = {event.rank: event for event in fresh}
            whole = len(firsts) == size and {event.node for event in firsts.values()} == set(names)
            return max(event.at for event in firsts.values()) if whole else None

        return self.wait_for(seen, f"the world of {size}", names)

    def events(self) -> list[Event]:
        path = self.folder / "events"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [Event.of(line) for line in lines if line.endswith("\n")]

    def wait_for(self, seen: Callable[[], object], what: str, names: list[str]) -> object:
        end = time.time() + PATIENCE_S
        while time.time() < end:
            found = seen()
            if found:
                return found
            if any(self.nodes[name].process.poll() is not None for name in names):
                raise self.never("job lost", what)
            time.sleep(0.005)
        raise self.never(f"not within {PATIENCE_S:.0f} s", what)

    def never(self, outcome: str, what: str) -> Never:
        if self.side == OURS:
            for name, node in self.nodes.items():
                print(f"--- {name}, waiting for {what}: {outcome}", file=sys.stderr)
                print(node.log.read_text(errors="replace")[-2000:], file=sys.stderr)
        return Never(outcome)


def lost(side: str, victim: str, end: Callable[[Node], float], framework: str = TORCH) -> float:
    """Three nodes train, one goes: to the first all_reduce of the world of the other two on both."""
    with Job(side, framework=framework) as job:
        job.start_in_order(*NAMES)
        job.settle(3)
        at = end(job.nodes[victim])
        return job.world(2, [name for name in NAMES if name != victim], at) - at


def node_killed(side: str, framework: str = TORCH) -> float:
    return lost(side, "n3", lambda node: node.signal_all(signal.SIGKILL), framework)


def coordinator_killed(side: str) -> float:
    return lost(side, "n1", lambda node: node.signal_all(signal.SIGKILL))


def leave(side: str) -> float:
    def ask(node: Node) -> float:
        at = time.time()
        node.process.send_signal(signal.SIGTERM)
        return at

    return lost(side, "n3", ask)


def silent_node(side: str) -> float:
    return lost(side, "n3", lambda node: node.signal_all(signal.SIGSTOP))


def scale_up(side: str, framework: str = TORCH) -> float:
    """Two nodes train, a third is started: from there to the first all_reduce of the world of three on all."""
    their_flags = {TORCH: ("--rdzv-conf", "last_call_timeout=1"), PADDLE: ("--elastic_timeout", "5")}[framework]
    with Job(side, *(("--quiet-time", "0") if side == OURS else their_flags), framework=framework) as job:
        job.start_in_order(*NAMES[:2])
        job.settle(2)
        third = job.start(NAMES[2])
        return job.world(3, list(NAMES), third.started) - third.started


def first_start(side: str) -> float:
    """Three nodes are started at once: from there to the first all_reduce of the world of three on all."""
    with Job(side) as job:
        begin = min(job.start(name).started for name in NAMES)
        return job.world(3, list(NAMES), begin) - begin


def two_workers(side: str) -> float:
    """One node of two workers is started: from there to the first all_reduce on both."""
    with Job(side, framework=PADDLE, alone=True, restarts=False) as job:
        begin = job.start("n1").started
        return job.world(2, ["n1"], begin) - begin


def worker_killed(side: str) -> float:
    """kill -9 of rank 1 of two workers on one node: to the first all_reduce on both that take their places."""
    with Job(side, framework=PADDLE, alone=True) as job:
        job.start("n1")
        job.settle(2)
        (pid,) = [event.pid for event in job.events() if event.rank == 1]
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return job.world(2, ["n1"], at) - at


@dataclass(frozen=True)
class Measure:
    name: str
    what: str
    run: Callable[[str], float]
    target: str
    # How often at most the other side is tried where it is known to fail.
    their_times: int | None = None
    # How often at least ours is, where it counts that it never fails.
    our_times: int = 0


MEASURES = [
    Measure(
        "node-killed", "kill -9 of all of one of 3 nodes, to the world of 2", node_killed, "at most 0.02x, below 1 s"
    ),
    Measure(
        "coordinator-killed",
        "kill -9 of all of the node that leads, to the world of 2",
        coordinator_killed,
        "below 1.5 s",
        2,
    ),
    Measure("leave", "SIGTERM to one of 3 launchers, to the world of 2", leave, "below 1 s"),
    Measure("scale-up", "start of a third launcher, to the world of 3", scale_up, "at most 0.5x"),
    Measure("first-start", "start of 3 launchers, to the world of 3", first_start, "at most 0.6x"),
    Measure("silent-node", "SIGSTOP of all of one of 3 nodes, to the world of 2", silent_node, "below 7 s", 1),
]


PADDLE_MEASURES = [
    Measure("paddle-launch", "start of 1 node x 2, to the first all_reduce", two_workers, "at most 0.6x"),
    Measure("paddle-worker-killed", "kill -9 of one of 2 workers, to the next world", worker_killed, "at most 0.05x"),
    Measure(
        "paddle-pod-killed",
        "kill -9 of all of one of 3 pods, to the world of 2",
        functools.partial(node_killed, framework=PADDLE),
        "at most 0.02x",
        our_times=20,
    ),
    Measure(
        "paddle-scale-up",
        "start of a third pod, to the world of 3",
        functools.partial(scale_up, framework=PADDLE),
        "at most 0.25x",
    ),
]


def main() -> None:
    side, name, times = [*sys.argv[1:], "1"][:3]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    (measure,) = [measure for measure in (*MEASURES, *PADDLE_MEASURES) if measure.name == name]
    for _ in range(int(times)):
        try:
            print(f"{measure.run(side):.3f} s", flush=True)
        except Never as never:
            print(never, flush=True)


if __name__ == "__main__":
    main()
