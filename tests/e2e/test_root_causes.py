"""One rank fails, and the others fail for want of it: what is told is the cause. Real collectives, torch and paddle."""

import contextlib
import json
import os
import re
import signal
import socket
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.etcd_servers import binary
from helpers.fleet import LAUNCHER, Fleet
from helpers.ports import free_ports

# Who failed first is judged by what is heard within a quarter of a second: that takes CPUs that have time for it.
pytestmark = [pytest.mark.timeout(240), pytest.mark.quiet]
# For several generations on a busy machine.
WITHIN_S = 150.0
MIB = 1 << 20
# Enough for two workers and their launcher; what the one rank takes beyond that makes it by far the biggest.
LIMIT_MIB = 1536


@dataclass(frozen=True)
class Way:
    """How a rank fails, and all that is to be told of it; ``words`` in the traceback or on stderr."""

    text: str
    status: int
    how: str
    error: str = ""
    words: str = ""
    oom: bool = False

    @property
    def code_and_signal(self):
        return (None, self.status - 128) if self.status > 128 else (self.status, None)


BAD_DATA = {"status": 1, "how": "exited with code 1", "error": "ValueError: the data is bad"}
WAYS = {
    "exception": Way("raise ValueError('the data is bad')", **BAD_DATA, words="ValueError: the data is bad"),
    # Its peers learn of the end before it has come.
    "exception, then order": Way(
        "try:\n    raise ValueError('the data is bad')\nfinally:\n    dist.destroy_process_group()",
        **BAD_DATA,
        words="ValueError: the data is bad",
    ),
    # The usual upload of the last logs: the peers are long gone when the rank is.
    "exception, then a late end": Way(
        "atexit.register(time.sleep, 1)\ntry:\n    raise ValueError('the data is bad')\nfinally:\n    dist.destroy_process_group()",
        **BAD_DATA,
        words="ValueError: the data is bad",
    ),
    "code": Way("sys.exit(7)", 7, "exited with code 7"),
    "silence": Way("os._exit(9)", 9, "exited with code 9"),
    "segfault": Way("ctypes.string_at(0)", 139, "was killed by SIGSEGV"),
    "limit": Way(
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (256 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "bytearray(1 << 30)",
        1,
        "exited with code 1",
        error="MemoryError",
        words="bytearray(1 << 30)",
    ),
    # Bounded, should there be no killer.
    "oom": Way(
        f"taken = [bytearray(b'x') * (1 << 24) for _ in range({2 * LIMIT_MIB // 16})]\nsys.exit('nobody minded')",
        137,
        "was killed by SIGKILL, by all signs the kernel's OOM killer",
        oom=True,
    ),
}
# What those say who lost a peer, and no rank that failed by itself.
CONSEQUENCE = re.compile(r"by peer|TIMEOUT self_rank|DistNetworkError|Termination signal|nobody minded")

FRAMEWORKS = {
    "torch": """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")

def summed():
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()
""",
    "paddle": """
import paddle
import paddle.distributed as dist
dist.init_parallel_env()

def summed():
    value = paddle.ones([1])
    dist.all_reduce(value)
    return value.item()
""",
}
# The others have time to get into the collective, where they learn of it.
TRAIN = """
def fail(way):
    time.sleep(0.2)
WAYS

rank, generation = dist.get_rank(), int(os.environ["ELASTIC_GENERATION"])
for step in range(1, 6):
    if step == 3 and (generation, rank) in PLAN:
        fail(PLAN[generation, rank])
    assert summed() == 2.0
    progress(step)
dist.barrier()
dist.destroy_process_group()
print(f"generation {generation} rank {rank} has done all steps", flush=True)
"""
IMPORTS = """
import atexit, ctypes, os, resource, sys, time
from elastic_adapter.core.worker import progress
"""


@pytest.fixture
def train(script, framework):
    """Write a training of which this rank fails in this generation in this way, each in its third step."""

    def write(plan):
        ways = "".join(
            textwrap.indent(f"if way == {name!r}:\n{textwrap.indent(way.text, '    ')}\n", "    ")
            for name, way in WAYS.items()
        )
        text = TRAIN.replace("WAYS", ways).replace("PLAN", repr(plan))
        return script(IMPORTS + FRAMEWORKS[framework] + text, "train.py")

    return write


@contextlib.contextmanager
def memory_cgroup(limit):
    """A memory cgroup with this limit and no swap, of either version: the file to write one's pid to."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root = v1 if v1.is_dir() else v2
    folder = root / f"elastic-causes-{os.getpid()}-{time.monotonic_ns()}"
    names = (
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if root == v1 else ("memory.max", "memory.swap.max")
    )
    try:
        if root == v2 and "memory" not in (root / "cgroup.subtree_control").read_text().split():
            (root / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        (folder / names[0]).write_text(str(limit))
        if (folder / names[1]).exists():
            (folder / names[1]).write_text(str(limit if root == v1 else 0))
        yield folder / "cgroup.procs"
    except PermissionError as error:
        pytest.skip(f"this memory cgroup can not be limited: {error}")
    finally:
        remove(folder)


def remove(folder):
    """End what is left in it, and wait until the kernel lets it go."""
    end = time.monotonic() + 20
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.05)
        else:
            return


@pytest.fixture
def limited():
    """A launcher that has, with all its workers, so much memory and no more."""
    with memory_cgroup(LIMIT_MIB * MIB) as procs:
        yield ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *LAUNCHER]


@pytest.fixture
def launcher(request, way):
    return request.getfixturevalue("limited") if WAYS[way].oom else LAUNCHER


@pytest.fixture
def start(launch, framework, train, tmp_path):
    """Start a training of two workers on one node."""

    def begin(plan, restarts, launcher=LAUNCHER):
        line = ("--nproc-per-node", 2, "--summary-file", tmp_path / "end.json", train(plan))
        return launch(*flags(framework, restarts), *line, command=launcher)

    return begin


@pytest.fixture
def two_nodes(tmp_path, fleets, framework, train):
    """Start a training on a and b, of one worker each; a leads, and runs the etcd."""
    binary("etcd")

    def begin(plan, restarts, launcher=LAUNCHER):
        (port,) = free_ports(1)
        line = ("2", *flags(framework, restarts), "--nproc-per-node", 1)
        fleet = Fleet(
            tmp_path, f"127.0.0.1:{port}", *line, backend="embedded", framework=framework, program=train(plan)
        )
        fleets(fleet)
        fleet.start("a", "--summary-file", tmp_path / "a.json").seen("this node leads")
        fleet.start("b", "--summary-file", tmp_path / "b.json", launcher=launcher)
        return fleet

    return begin


def flags(framework, restarts):
    # A worker of paddle that is told to end while it ends may hang: that is not what is looked at here.
    return ("--framework", framework, "--max-restarts", restarts, "--no-standby", "--shutdown-timeout", 5)


def told(job, path, way, place, generation=1):
    """The command's end, the summary for programs and the one for people are all of this rank, and of no other."""
    rank, node = place
    end = json.loads(path.read_text())
    first = end["first_failure"]
    assert (end["outcome"], end["exit_code"]) == ("failed", way.status), job.text
    assert (first["rank"], first["node"], first["generation"]) == (rank, node, generation), job.text
    assert (first["how"], first["error"]) == (way.how, way.error), job.text
    assert ((first["code"], first["signal"]), first["exit_code"]) == (way.code_and_signal, way.status)
    assert (first["oom"], first["step"]) == (way.oom, 2)
    assert way.words in first["detail"]
    assert not CONSEQUENCE.search(first["detail"])
    summary = job.text[job.text.index("first failure:") :]
    assert re.search(rf"rank +{rank} \(local rank \d, generation {generation}, pid {first['pid']}\)", summary)
    assert re.search(rf"node +{node}\n", summary)
    assert re.search(rf"how +{re.escape(way.how)}\n", summary)
    assert re.search(rf"exit code +{way.status}\n", summary)
    assert re.search(r"last step +2\n", summary)
    assert way.words in summary
    job.seen(rf"job failed: .*rank {rank} on {node} {re.escape(way.how)}")


HOW = rf"exited with code \d+|{re.escape(WAYS['oom'].how)}|was killed by \w+"


def restarts(job, line=r"\d workers on \d node\(s\)"):
    """For what the generations after the first were begun, in the coordinator's words or in an agent's."""
    return re.findall(rf"generation \d+: {line}.*: (rank \d on \S+ (?:{HOW})).*; restart \d of \d", job.text)


def causes(plan, nodes):
    return [f"rank {rank} on {nodes[rank]} {WAYS[way].how}" for (_, rank), way in plan.items()]


@pytest.mark.parametrize("way", WAYS)
def test_the_end_names_the_cause(launcher, start, way, tmp_path):
    """Rank 1 fails, rank 0 in its collective, too: the job's end is rank 1's, with its code and its words."""
    job = start({(1, 1): way}, 0, launcher)
    assert job.finish() == WAYS[way].status, job.text
    told(job, tmp_path / "end.json", WAYS[way], (1, socket.gethostname()))


def good_end(job, path, generation):
    for rank in (0, 1):
        job.seen(rf"generation {generation} rank {rank} has done all steps")
    end = json.loads(path.read_text())
    assert (end["outcome"], end["exit_code"], end["first_failure"]) == ("succeeded", 0, None)
    assert f"generation {generation + 1}" not in job.text


def test_each_restart_names_its_cause(start, tmp_path):
    """Rank 0, where the store is, fails in one generation after the other, until the last one gets through."""
    ways = [name for name, way in WAYS.items() if not way.oom]
    plan = {(generation, 0): way for generation, way in enumerate(ways, 1)}
    job = start(plan, len(plan))
    code = job.finish(WITHIN_S)
    assert restarts(job) == causes(plan, [socket.gethostname()]), job.text
    assert code == 0, job.text
    good_end(job, tmp_path / "end.json", len(plan) + 1)


def test_the_restart_names_the_kernel_s_killer(limited, start, tmp_path):
    """The one restart that is allowed is for the rank that took too much, and is enough."""
    plan = {(1, 0): "oom"}
    job = start(plan, 1, limited)
    assert job.finish() == 0, job.text
    assert restarts(job) == causes(plan, [socket.gethostname()]), job.text
    good_end(job, tmp_path / "end.json", 2)


def test_two_nodes_name_each_cause(two_nodes, tmp_path):
    """Now a node's only worker fails, now the other's, each time in another way; the last time it is the end."""
    plan = {
        (1, 1): "exception",
        (2, 0): "exception, then order",
        (3, 1): "exception, then order",
        (4, 0): "silence",
        (5, 1): "segfault",
        (6, 1): "code",
    }
    fleet = two_nodes(plan, len(plan) - 1)
    codes = [node.finish(WITHIN_S) for node in fleet.nodes.values()]
    expected = causes(plan, "ab")
    assert restarts(fleet.nodes["a"]) == expected[:-1], fleet.text
    for node in fleet.nodes.values():
        assert restarts(node, r"1 worker\(s\) started") == expected[:-1], fleet.text
    assert codes == [7, 7], fleet.text
    for name, node in fleet.nodes.items():
        told(node, tmp_path / f"{name}.json", WAYS["code"], (1, "b"), len(plan))


def test_two_nodes_name_the_kernel_s_killer(limited, two_nodes, tmp_path):
    """A node without memory loses its worker: both say which, and why, and not that rank 0 lost its peer."""
    fleet = two_nodes({(1, 1): "oom"}, 0, limited)
    assert [node.finish(WITHIN_S) for node in fleet.nodes.values()] == [137, 137], fleet.text
    for name, node in fleet.nodes.items():
        told(node, tmp_path / f"{name}.json", WAYS["oom"], (1, "b"))
