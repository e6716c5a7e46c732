"""Trainings that are killed while they save, one after the other in the same folder, and go on from what is there.

Run in a process of its own, which imports the framework once and forks each training:

    PYTHONPATH=tests python -m helpers.kills FRAMEWORK FOLDER SEED TRIALS

One line of JSON is printed for each trial. ``wrong`` names what may not be. See test_checkpoint_faults for what must.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
import logging
import os
import random
import select
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elastic_adapter.core.checkpoint.manifest import is_temporary
from elastic_adapter.core.checkpoint.store import Broken, Checkpoint, Store
from helpers.frameworks import imported

CHECKPOINTERS = {
    "torch": "elastic_adapter.adapters.pytorch.checkpoint",
    "paddle": "elastic_adapter.adapters.paddlepaddle.checkpoint",
}
DTYPES = ("float64", "float16", "bfloat16", "int64", "int8", "bool")
_SUBREAPER = 36
_PATIENCE_S = 30.0


class Tiny:
    """A model and an optimizer, all bits of which are a function of how many steps were done."""

    def __init__(self, framework: Any, width: int = 96) -> None:
        self.framework = framework
        nn = framework.nn
        self.model = nn.Sequential(nn.Linear(width, width + 32), nn.Linear(width + 32, width))
        self.parameters = list(self.model.parameters())
        self.buffers = [framework.zeros([width + 1]).to(getattr(framework, dtype)) for dtype in DTYPES]
        for dtype, buffer in zip(DTYPES, self.buffers, strict=True):
            self.model.register_buffer(f"of_{dtype}", buffer)
        if framework.__name__ == "torch":
            self.optimizer = framework.optim.AdamW(self.parameters)
        else:
            self.optimizer = framework.optimizer.AdamW(parameters=self.parameters)
        # It has a state of its own after the first step.
        self.model(framework.rand([2, width])).sum().backward()
        self.optimizer.step()

    def tensors(self) -> list[Any]:
        state = self.optimizer.state_dict()
        if self.framework.__name__ == "torch":
            moments = [each[name] for each in state["state"].values() for name in ("exp_avg", "exp_avg_sq")]
        else:
            # By the numbers of their parameters.
            moments = [state[f"{each.name}_moment{number}_0"] for each in self.parameters for number in (1, 2)]
        return [*self.parameters, *self.buffers, *moments]

    def set(self, done: int) -> None:
        with self.framework.no_grad():
            for index, tensor in enumerate(self.tensors()):
                if self.framework.__name__ == "torch":
                    tensor.copy_(self._values(done, index, tensor))
                else:
                    tensor.set_value(self._values(done, index, tensor))

    def wrong(self, done: int) -> list[int]:
        """Which tensors are not those of this step, bit by bit."""
        return [
            index
            for index, tensor in enumerate(self.tensors())
            if self._bytes(tensor) != self._bytes(self._values(done, index, tensor))
        ]

    def _values(self, done: int, index: int, tensor: Any) -> Any:
        values = np.random.default_rng([done, index]).random(tuple(tensor.shape), dtype=np.float32) * 200
        made = self.framework.from_numpy if self.framework.__name__ == "torch" else self.framework.to_tensor
        # Numbers of truth are true for half of them.
        return made(values - 100 if "float" in str(tensor.dtype) else values // 100).to(tensor.dtype)

    def _bytes(self, tensor: Any) -> bytes:
        if self.framework.__name__ == "torch":
            return tensor.detach().view(self.framework.uint8).numpy().tobytes()
        return np.array(tensor).tobytes()


@dataclass(frozen=True, slots=True)
class Plan:
    """How one training is to end."""

    # Whom to kill, in this order: worker, saver. Nobody: it ends by itself.
    victims: tuple[str, ...] = ()
    # After how many lines of its log; None: counted from its beginning.
    after: int | None = None
    delay_s: float = 0.0
    # Between two kills.
    gap_s: float = 0.0
    # How long the saver of a killed worker stands still, as on a slow disk, while the next training begins already;
    # None: that begins when it has ended.
    late_s: float | None = None
    keep_last: int = 3
    verify: str = "sample"
    # How often the training waits until all is on disk.
    patience: float = 1.0
    seed: int = 0


def drawn(rng: random.Random) -> Plan:
    after = rng.choice([None, 1, 1, 2, 3])
    return Plan(
        victims=rng.choice([("worker",), ("worker",), ("saver",), ("worker", "saver"), ("saver", "worker")]),
        after=after,
        delay_s=rng.uniform(0, 0.2 if after is None else 0.08),
        gap_s=rng.choice([0, rng.uniform(0, 0.01)]),
        late_s=rng.choice([None, 0, rng.uniform(0, 0.2)]),
        keep_last=rng.randint(1, 3),
        verify=rng.choice(["off", "sample", "full"]),
        patience=rng.choice([0.3, 0.6, 1]),
        seed=rng.getrandbits(32),
    )


@dataclass(slots=True)
class Told:
    """What came of it."""

    trial: int
    plan: Plan
    pid: int = 0
    restored: int | None = None
    committed: list[int] = field(default_factory=list)
    # What was said to have gone wrong, by the program itself.
    troubles: list[str] = field(default_factory=list)
    # Drafts that the kill left behind.
    drafts: int = 0
    # Whether it went on saving after its saver was killed.
    went_on: bool | None = None
    closed: bool = False
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Log(logging.Handler):
    """The lines that a training leaves behind, whatever becomes of it."""

    def __init__(self, fd: int) -> None:
        super().__init__(logging.WARNING)
        self._fd = fd
        self.warned = False

    def tell(self, kind: str, value: Any) -> None:
        os.write(self._fd, (json.dumps([kind, value]) + "\n").encode())

    def emit(self, record: logging.LogRecord) -> None:
        self.warned = True
        self.tell("trouble", record.getMessage())


def train(framework: Any, root: Path, plan: Plan, log: Log) -> None:
    rng = random.Random(plan.seed)
    logging.getLogger("elastic_adapter").addHandler(log)
    checkpointer = importlib.import_module(CHECKPOINTERS[framework.__name__]).Checkpointer
    tiny = Tiny(framework)
    tiny.set(-1 & 0xFFFF)
    ckpt = checkpointer(
        root,
        model=tiny.model,
        optimizer=tiny.optimizer,
        every_steps=1,
        keep_last=plan.keep_last,
        verify=plan.verify,
    )
    begin = ckpt.restore()
    log.tell("restored", [begin, tiny.wrong(begin) if begin else []])
    for step in itertools.count(begin) if plan.victims else range(begin, begin + 3):
        tiny.set(step + 1)
        log.warned = False
        ckpt.step(step)
        if ckpt.settled(None if rng.random() < plan.patience else 0) and not log.warned:
            log.tell("committed", step + 1)
    ckpt.close()
    log.tell("closed", None)


class Training:
    """One that runs, and what it tells."""

    def __init__(self, framework: Any, root: Path, plan: Plan) -> None:
        self._reading, writing = os.pipe()
        self.lines: list[list[Any]] = []
        self._rest = b""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                train(framework, root, plan, Log(writing))
            except BaseException:
                os.write(writing, (json.dumps(["failed", traceback.format_exc()]) + "\n").encode())
            os._exit(1)
        os.close(writing)

    def read(self, seconds: float) -> bool:
        """Wait for more lines; whether there can be more."""
        if not select.select([self._reading], [], [], seconds)[0]:
            return True
        data = os.read(self._reading, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += map(json.loads, lines)
        return bool(data)

    def wait(self, count: int) -> bool:
        """Until it has told so many lines that are no troubles; whether that came."""
        deadline = time.monotonic() + _PATIENCE_S
        while len([line for line in self.lines if line[0] != "trouble"]) < count:
            left = deadline - time.monotonic()
            if left < 0 or not self.read(left):
                return False
        return True

    def saver(self) -> int | None:
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            threads = Path(f"/proc/{self.pid}/task").iterdir()
            for thread in threads:
                children += (thread / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return int(children[0]) if children else None

    def end(self) -> list[list[Any]]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        while self.read(0) and select.select([self._reading], [], [], 0)[0]:
            pass
        os.close(self._reading)
        return self.lines


def kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def attempt(framework: Any, root: Path, plan: Plan, told: Told) -> None:
    training = Training(framework, root, plan)
    told.pid = training.pid
    wanted = 5 if not plan.victims else plan.after or 0
    if not training.wait(wanted):
        told.wrong.append("it does not save")
    time.sleep(plan.delay_s)
    saver = training.saver()
    if plan.late_s is not None and plan.victims == ("worker",) and saver is not None:
        stand_still(saver, plan.late_s)
    for victim in plan.victims:
        kill(training.pid if victim == "worker" else saver)
        time.sleep(plan.gap_s)
    told.drafts = sum(map(is_temporary, os.listdir(root))) if root.exists() else 0
    if plan.victims == ("saver",) and saver is not None:
        # Another one comes, and nothing is lost but time.
        while training.read(0) and select.select([training._reading], [], [], 0)[0]:
            pass
        ended = len([line for line in training.lines if line[0] != "trouble"])
        told.went_on = training.wait(ended + 2)
        if not told.went_on:
            told.wrong.append("it did not go on after its saver was killed")
    for kind, value in training.end():
        match kind:
            case "restored":
                told.restored, tensors = value
                told.wrong += [f"step {told.restored} was restored with wrong tensors: {tensors}"] if tensors else []
            case "committed":
                told.committed.append(value)
            case "trouble":
                told.troubles.append(value)
            case "failed":
                told.wrong.append(value)
            case "closed":
                told.closed = True


def stand_still(pid: int, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    if os.fork() == 0:
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        os._exit(0)


def reap(*, wait: bool) -> None:
    """Savers of killed workers are our children now."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if wait else os.WNOHANG)[0]:
            pass


def check(root: Path, committed: int, told: Told) -> None:
    """What is there, seen by somebody who changes nothing. Who deletes meanwhile is allowed to."""
    store = Store(root)
    found = list(store.newest_first())
    while any(isinstance(each, Broken) and not each.path.exists() for each in found):
        # Deleted since the folder was listed: there are newer ones by now.
        found = list(store.newest_first())
    for each in found:
        why = store.trouble(each) if isinstance(each, Checkpoint) else each.why
        if why and each.path.exists():
            told.wrong.append(f"torn: {why}")
    told.wrong += [name for name in os.listdir(root) if "broken" in name] if root.exists() else []
    newest = found[0].manifest.step if found and isinstance(found[0], Checkpoint) else 0
    if newest < committed:
        told.wrong.append(f"step {committed} was told as saved, and the newest is {newest}")


def main() -> None:
    name, folder, seed, trials = sys.argv[1:]
    framework, root, rng = imported(name), Path(folder), random.Random(int(seed))
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    if name == "torch":
        framework.set_num_threads(1)
    importlib.import_module(CHECKPOINTERS[name])
    # All that is imported when it is first needed.
    Tiny(framework).set(1)
    assert len(os.listdir("/proc/self/task")) == 1, "only a process of one thread can be forked"
    committed = 0
    # The last one ends by itself, and leaves nothing behind.
    for trial, plan in enumerate([*(drawn(rng) for _ in range(int(trials))), Plan()]):
        if not plan.victims:
            # Nor does anybody else save what it is about to.
            reap(wait=True)
        began = time.monotonic()
        told = Told(trial, plan)
        attempt(framework, root, plan, told)
        if told.restored is not None and told.restored < committed:
            told.wrong.append(f"step {committed} was told as saved, and {told.restored} was restored")
        committed = max([committed, *told.committed])
        reap(wait=plan.late_s is None)
        check(root, committed, told)
        told.seconds = time.monotonic() - began
        print(json.dumps(asdict(told)), flush=True)


if __name__ == "__main__":
    main()
