"""torchrun, Paddle's launcher and elastic-launch, side by side: ``make bench``.

Each case runs both launchers in turns on the same script, on this machine, and compares medians. Seconds are
of this machine and day; ratios are what counts. Results are written to benchmarks/results.md.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import checkpoints
import nodes
from common import BIN, ENVIRON, HERE, PATIENCE_S, SCRIPTS, THEIR_ENV

OURS = [str(BIN / "elastic-launch"), "--framework", "torch"]
THEIRS = [str(BIN / "torchrun"), "--standalone"]
MORE_IMPORTS = "sympy,networkx,numpy.testing,unittest.mock,xml.dom.minidom,email.mime.text"


@dataclass
class Run:
    """One launcher at work on one script."""

    launcher: list[str]
    script: str
    env: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ("--nproc-per-node", "2", "--max-restarts", "5")

    def __enter__(self) -> Run:
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self.log = (self.folder / "log").open("wb")
        extra = THEIR_ENV if self.launcher is THEIRS else {}
        self.started = time.time()
        self.process = subprocess.Popen(
            [*self.launcher, *self.flags, str(SCRIPTS / self.script)],
            env={**ENVIRON, "BENCH_FOLDER": str(self.folder), **extra, **self.env},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "stop").touch()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        self.log.close()
        shutil.rmtree(self.folder)

    def first_all_reduce(self, restart: int) -> tuple[float, dict[int, int]]:
        """Wait for the first all_reduce of this attempt on both ranks; its time and each rank's pid."""
        events = self.folder / "events"

        def seen() -> tuple[float, dict[int, int]] | None:
            lines = [line.split() for line in events.read_text().splitlines()] if events.exists() else []
            mine = [(float(at), int(rank), int(pid)) for at, rank, pid, count in lines if int(count) == restart]
            return (max(at for at, _, _ in mine), {rank: pid for _, rank, pid in mine}) if len(mine) == 2 else None

        return self.wait_for(seen, f"attempt {restart}")

    def standbys_ready(self, times: int = 1) -> None:
        def seen() -> bool | None:
            log = (self.folder / "log").read_text(errors="replace")
            return log.count("standbys are ready") >= times or None

        self.wait_for(seen, "standbys")

    def wait_for(self, seen: Callable[[], object], what: str) -> object:
        end = time.time() + PATIENCE_S
        while time.time() < end:
            found = seen()
            if found is not None:
                return found
            time.sleep(0.005)
        log = (self.folder / "log").read_text(errors="replace")
        raise TimeoutError(f"{what} did not come in {PATIENCE_S} s:\n{log[-3000:]}")


def launch_to_all_reduce(launcher: list[str]) -> float:
    with Run(launcher, "all_reduce.py") as run:
        return run.first_all_reduce(0)[0] - run.started


def whole_command(launcher: list[str]) -> float:
    with Run(launcher, "noop.py") as run:
        run.process.wait(PATIENCE_S)
        return time.time() - run.started


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    at = time.time()
    os.kill(pid, number)
    return at


def recovery(launcher: list[str], *, again: bool = False, number: int = signal.SIGKILL, **options: object) -> float:
    """A signal to rank 1, once standbys are ready (or as long after the start for who has none)."""
    with Run(launcher, "all_reduce.py", **options) as run:  # type: ignore[arg-type]
        _, pids = run.first_all_reduce(0)
        if launcher is OURS and "--no-standby" not in run.flags:
            run.standbys_ready()
        time.sleep(1.0)
        killed = kill(pids[1], number)
        done, pids = run.first_all_reduce(1)
        if again:
            time.sleep(0.5)
            killed = kill(pids[1])
            done, _ = run.first_all_reduce(2)
        return done - killed


def pss_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE).group(1)) / 1024  # type: ignore[union-attr]


def below(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for word in (task / "children").read_text().split():
            found += [int(word), *below(int(word))]
    return found


def memory(launcher: list[str]) -> dict[str, float]:
    """PSS of the agent, and of everything that is not a worker, without and with standbys."""
    with Run(launcher, "all_reduce.py") as run:
        _, pids = run.first_all_reduce(0)
        if launcher is OURS:
            run.standbys_ready()
        time.sleep(1.0)
        others = [pid for pid in below(run.process.pid) if pid not in pids.values()]
        standbys = [pid for pid in others if b"(standby)" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        agent = pss_mib(run.process.pid)
        rest = sum(pss_mib(pid) for pid in others if pid not in standbys)
        waiting = sum(pss_mib(pid) for pid in standbys)
        return {"agent": agent, "without standbys": agent + rest, "with standbys": agent + rest + waiting}


class Memory:
    """One measured run serves all three rows: each row reads each run once."""

    def __init__(self) -> None:
        self._runs: dict[str, list[dict[str, float]]] = {}
        self._read: dict[tuple[str, str], int] = {}

    def of(self, launcher: list[str], row: str) -> float:
        runs = self._runs.setdefault(launcher[0], [])
        number = self._read.get((launcher[0], row), 0)
        self._read[launcher[0], row] = number + 1
        if number == len(runs):
            runs.append(memory(launcher))
        return runs[number][row]


MEMORY = Memory()


def steps_per_second(flags: tuple[str, ...]) -> float:
    """Steps of a CPU-bound training in 20 s, from 4 s after its first step on: then standbys are being made."""
    seconds = 26.0
    options = {"flags": ("--nproc-per-node", "2", *flags), "env": {"BENCH_SECONDS": str(seconds)}}
    with Run(OURS, "busy.py", **options) as run:  # type: ignore[arg-type]
        run.process.wait(PATIENCE_S)
        times = [float(line) for line in (run.folder / "steps.0").read_text().split()]
        begin = times[0] + 4
        return sum(begin <= at < begin + 20 for at in times) / 20


@dataclass
class Case:
    name: str
    ours: Callable[[], float] | None
    theirs: Callable[[], float] | None
    target: str
    unit: str = "s"
    other: str = "torchrun"
    their_times: int | None = None
    our_times: int = 0
    # All samples of both sides at once, where these take turns in one process.
    both: Callable[[int], tuple[list[float], list[float]]] | None = None


CASES = [
    Case(
        "launch to the first all_reduce on 2 ranks",
        lambda: launch_to_all_reduce(OURS),
        lambda: launch_to_all_reduce(THEIRS),
        "at most 0.6x",
    ),
    Case("no-op script, whole command", lambda: whole_command(OURS), lambda: whole_command(THEIRS), "at most 0.25x"),
    Case(
        "kill -9 of one of 2 workers to the next all_reduce",
        lambda: recovery(OURS),
        lambda: recovery(THEIRS),
        "at most 0.1x",
    ),
    Case(
        "one of 2 workers raises an exception, to the next all_reduce",
        lambda: recovery(OURS, number=signal.SIGUSR1),
        lambda: recovery(THEIRS, number=signal.SIGUSR1),
        "at most 0.1x",
    ),
    Case(
        "kill -9, again 0.5 s later (cold standbys)",
        lambda: recovery(OURS, again=True),
        lambda: recovery(THEIRS, again=True),
        "reported",
    ),
    Case(
        "kill -9, script that imports more than torch",
        lambda: recovery(OURS, env={"BENCH_IMPORTS": MORE_IMPORTS}),
        lambda: recovery(THEIRS, env={"BENCH_IMPORTS": MORE_IMPORTS}),
        "reported",
    ),
    Case(
        "kill -9, the same with --preload",
        lambda: recovery(
            OURS,
            env={"BENCH_IMPORTS": MORE_IMPORTS},
            flags=("--nproc-per-node", "2", "--max-restarts", "5", "--preload", MORE_IMPORTS),
        ),
        lambda: recovery(THEIRS, env={"BENCH_IMPORTS": MORE_IMPORTS}),
        "reported",
    ),
    Case(
        "kill -9, --no-standby",
        lambda: recovery(OURS, flags=("--nproc-per-node", "2", "--max-restarts", "5", "--no-standby")),
        lambda: recovery(THEIRS),
        "reported",
    ),
    Case(
        "memory (PSS): the agent alone",
        lambda: MEMORY.of(OURS, "agent"),
        lambda: MEMORY.of(THEIRS, "agent"),
        "at most 0.25x",
        "MiB",
    ),
    Case(
        "memory (PSS): all but workers, no standbys",
        lambda: MEMORY.of(OURS, "without standbys"),
        lambda: MEMORY.of(THEIRS, "without standbys"),
        "reported",
        "MiB",
    ),
    Case(
        "memory (PSS): all but workers, with standbys",
        lambda: MEMORY.of(OURS, "with standbys"),
        lambda: MEMORY.of(THEIRS, "with standbys"),
        "reported",
        "MiB",
    ),
    Case(
        "steps per second while standbys refill",
        lambda: steps_per_second(()),
        lambda: steps_per_second(("--no-standby",)),
        "at least 0.97x",
        "/s",
        "--no-standby",
    ),
]


def case_of(measure: nodes.Measure, other: str) -> Case:
    return Case(
        f"{measure.name}: {measure.what}",
        functools.partial(measure.run, nodes.OURS),
        functools.partial(measure.run, nodes.THEIRS),
        measure.target,
        other=other,
        their_times=measure.their_times,
        our_times=measure.our_times,
    )


NODE_CASES = [case_of(measure, "torchrun") for measure in nodes.MEASURES]
PADDLE_CASES = [case_of(measure, "paddle.distributed.launch") for measure in nodes.PADDLE_MEASURES]
CHECKPOINT_CASES = [
    Case(
        measure.name,
        None,
        None,
        measure.target,
        other=measure.other,
        both=functools.partial(checkpoints.both, measure),
    )
    for measure in checkpoints.MEASURES
]


@dataclass
class Result:
    """Samples are numbers, or how it ended where there is nothing to measure."""

    case: Case
    ours: list[float | str] = field(default_factory=list)
    theirs: list[float | str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        mine, other = median(self.ours), median(self.theirs)
        return None if mine is None or other is None else mine / other

    @property
    def verdict(self) -> str:
        """Whether all parts of the target are reached."""
        ratio, mine = self.ratio, median(self.ours)
        parts = []
        for kind, number in re.findall(r"(at most|at least|below) ([\d.]+)", self.case.target):
            limit = float(number)
            if kind == "below":
                parts.append(mine is not None and mine < limit)
            else:
                parts.append(ratio is not None and (ratio <= limit if kind == "at most" else ratio >= limit))
        return "" if not parts or not self.ours else "reached" if all(parts) else "missed"

    def row(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}x"
        mine, other = (shown(samples, self.case.unit) for samples in (self.ours, self.theirs))
        target = f"{self.case.target} | {self.verdict}"
        return f"| {self.case.name} | {mine} | {other}, {self.case.other} | {ratio} | {target} |"

    def samples(self) -> str:
        mine, other = (
            " ".join(f"({sample})" if isinstance(sample, str) else f"{sample:.3f}" for sample in samples)
            for samples in (self.ours, self.theirs)
        )
        return f"- {self.case.name}: ours {mine}; {self.case.other} {other}"


def median(samples: list[float | str]) -> float | None:
    """None where a run had no result: then the others do not tell how it goes."""
    numbers = [sample for sample in samples if not isinstance(sample, str)]
    return statistics.median(numbers) if numbers and len(numbers) == len(samples) else None


def shown(samples: list[float | str], unit: str) -> str:
    middle = median(samples)
    if middle is not None:
        return f"{middle:.3f} {unit} ({min(samples):.3f}-{max(samples):.3f})"
    failed = [sample for sample in samples if isinstance(sample, str)]
    return "not measured" if not failed else f"{failed[0]} ({len(failed)} of {len(samples)})"


def measure(case: Case, times: int) -> Result:
    result = Result(case)
    if case.both is not None:
        mine, others = case.both(times)
        result.ours, result.theirs = list(mine), list(others)
        print(result.row(), flush=True)
        return result
    assert case.ours is not None
    assert case.theirs is not None
    their_times = times if case.their_times is None else min(times, case.their_times)
    for turn in range(max(times, case.our_times)):
        # Whoever goes first changes with each turn.
        order = [(case.theirs, result.theirs), (case.ours, result.ours)]
        for run, samples in order if turn % 2 == 0 else reversed(order):
            if run is case.theirs and turn >= their_times:
                continue
            try:
                samples.append(run())
            except nodes.Never as never:
                samples.append(str(never))
    print(result.row(), flush=True)
    return result


TABLE = ["| case | elastic-launch: median (range) | other side | ratio | to reach | |", "|---|---|---|---|---|---|"]
SEVERAL_NODES = "## Several nodes"
PADDLE = "## Paddle"
CHECKPOINTS = "## Checkpoints"


def several_nodes(results: list[Result]) -> list[str]:
    return [
        SEVERAL_NODES,
        "",
        "Three launchers of one worker each, all on this machine: ours with one etcd, torchrun with its c10d store",
        "on the node that is started first. Workers do a step every 5 ms, and standbys are ready. A silent node is",
        "lost with its lease of 5 s. Where torchrun loses the job or does not go on in 90 s, it is tried less often.",
        "",
        *TABLE,
        *(result.row() for result in results),
        "",
    ]


def with_paddle(results: list[Result]) -> list[str]:
    return [
        PADDLE,
        "",
        "The same script on both sides, paddlepaddle with gloo. Ours restarts a worker of a single node without an",
        "etcd; Paddle's launcher is given one for that, because without one it never does. Three pods of one worker",
        "each meet at the same etcd; elastic_timeout is Paddle's default of 30 s where a pod is killed, and 5 s where",
        "one is added.",
        "",
        *TABLE,
        *(result.row() for result in results),
        "",
    ]


def of_checkpoints(results: list[Result]) -> list[str]:
    return [
        CHECKPOINTS,
        "",
        "A state of 1 GiB in 64 tensors, on one disk. A save is what a training waits for in `ckpt.step`, under",
        "elastic-launch; nothing is being written when it begins. memcpy: the same bytes by one thread into shared",
        "memory that is there. The first save makes its buffer. A restore is all of `ckpt.restore()`, every byte",
        "checked and in the parameters; the other side's load is without putting it into the model.",
        "What each tensor costs, whatever its size, is seen where there are 8000 small ones.",
        "",
        *TABLE,
        *(result.row() for result in results),
        "",
    ]


def report(results: list[Result], times: int) -> str:
    import torch

    lines = [
        "# Results",
        "",
        f"Made by `make bench` on {time.strftime('%Y-%m-%d')}: {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, gloo on loopback.",
        f"Medians of {times} runs of each side, in turns. torchrun runs with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, its better setting. Ratios are ours to theirs.",
        "",
        *TABLE,
        *(result.row() for result in results if result.case in CASES),
        "",
        *several_nodes([result for result in results if result.case in NODE_CASES]),
        *with_paddle([result for result in results if result.case in PADDLE_CASES]),
        *of_checkpoints([result for result in results if result.case in CHECKPOINT_CASES]),
        "## All samples",
        "",
        *(result.samples() for result in results),
        "",
    ]
    notes = HERE / "notes.md"
    return "\n".join([*lines, notes.read_text() if notes.exists() else ""])


def renew(text: str, results: list[Result]) -> str:
    """The results with these cases' lines in the place of their older ones."""
    for heading, cases, table in (
        (SEVERAL_NODES, NODE_CASES, several_nodes),
        (PADDLE, PADDLE_CASES, with_paddle),
        (CHECKPOINTS, CHECKPOINT_CASES, of_checkpoints),
    ):
        if heading in text:
            continue
        empty = [Result(case) for case in cases]
        text = text.replace("## All samples\n", "\n".join([*table(empty), "## All samples\n"]))
        samples = "\n".join(result.samples() for result in empty)
        text = re.sub(r"(?<=\n)\n+(?=## Where)", f"{samples}\n\n", text)
    fresh = {f"| {result.case.name} |": result.row() for result in results}
    fresh |= {f"- {result.case.name}:": result.samples() for result in results}
    lines = (
        next((new for beginning, new in fresh.items() if line.startswith(beginning)), line)
        for line in text.splitlines()
    )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="runs of each side")
    parser.add_argument(
        "--only", default="", help="only cases whose name contains this; their lines in the results are replaced"
    )
    args = parser.parse_args()
    # However it ends, nodes and servers are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = [case for case in (*CASES, *NODE_CASES, *PADDLE_CASES, *CHECKPOINT_CASES) if args.only in case.name]
    results = [measure(case, args.times) for case in chosen]
    written = HERE / "results.md"
    written.write_text(renew(written.read_text(), results) if args.only else report(results, args.times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
