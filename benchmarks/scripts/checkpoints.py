"""Saves and restores, ours and the framework's own in turns: ``checkpoints.py save|restore torch|paddle large|small``.

A state is 64 tensors of 16 MiB, or 8000 of 64 bytes. What a training waits for is measured, and nothing is being
written meanwhile. Writes one line of samples in seconds (JSON) to BENCH_FOLDER/samples.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WHAT, FRAMEWORK, TENSORS = sys.argv[1:]
COUNT, SHAPE = {"large": (64, (1024, 4096)), "small": (8000, (16,))}[TENSORS]
NBYTES = math.prod(SHAPE) * 4
TURNS = int(os.environ.get("BENCH_TURNS", "5"))
FOLDER = Path(os.environ["BENCH_FOLDER"])

if FRAMEWORK == "torch":
    import torch

    from elastic_adapter.adapters.pytorch import Checkpointer

    model = torch.nn.Module()
    for index in range(COUNT):
        model.register_parameter(f"w{index}", torch.nn.Parameter(torch.randn(SHAPE)))

    def addresses() -> list[int]:
        return [each.data_ptr() for each in model.parameters()]

    def save(path: str) -> None:
        torch.save(model.state_dict(), path)

    def load(path: str) -> object:
        return torch.load(path, weights_only=True)

    def change() -> None:
        with torch.no_grad():
            for each in model.parameters():
                each.add_(1.0)

else:
    import paddle

    from elastic_adapter.adapters.paddlepaddle import Checkpointer

    model = paddle.nn.Layer()
    for index in range(COUNT):
        model.add_parameter(f"w{index}", model.create_parameter(list(SHAPE)))

    def addresses() -> list[int]:
        return [each.data_ptr() for each in model.parameters()]

    def save(path: str) -> None:
        paddle.save(model.state_dict(), path)

    def load(path: str) -> object:
        return paddle.load(path)

    def change() -> None:
        with paddle.no_grad():
            for each in model.parameters():
                each.set_value(each + 1.0)


class Memcpy:
    """The same bytes by one thread into shared memory whose pages are all there."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(COUNT * NBYTES)
            self._memory = mmap.mmap(file.fileno(), COUNT * NBYTES)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self()

    def __call__(self) -> None:
        for index, address in enumerate(addresses()):
            ctypes.memmove(self._begin + index * NBYTES, address, NBYTES)


def timed(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    result = act()
    seconds = time.perf_counter() - begin
    del result
    return seconds


def in_turns(sides: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Each side once per turn; whoever goes first changes."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(TURNS):
        names = list(sides)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(sides[name]())
    return samples


def saves(disk: Path, memory: Path) -> dict[str, list[float]]:
    ckpt = Checkpointer(disk / "ours", model=model, every_steps=1, keep_last=1)
    steps = iter(range(ckpt.restore(), 1_000_000))
    copy = Memcpy()

    def ours() -> float:
        change()
        seconds = timed(lambda: saved.append(ckpt.step(next(steps))))
        # What is written beside a training is not measured here, and must not disturb what is.
        assert saved[-1]
        assert ckpt.settled()
        os.sync()
        return seconds

    def theirs(folder: Path) -> float:
        change()
        path = folder / "theirs"
        seconds = timed(lambda: save(str(path)))
        os.sync()
        path.unlink()
        return seconds

    saved: list[bool] = []
    first = {"first": [ours()], "their first": [theirs(disk)]}
    # The buffers are there after the first one's; the second of them is made beside the steps.
    ours()
    sides = {
        "ours": ours,
        "memcpy": lambda: timed(copy),
        "disk": lambda: theirs(disk),
        "memory": lambda: theirs(memory),
    }
    return {**first, **in_turns(sides)}


def forget(folder: Path) -> None:
    """Let nothing of these files be in the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remember(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def restores(disk: Path) -> dict[str, list[float]]:
    mine, other = disk / "ours", disk / "theirs"
    other.mkdir()
    with Checkpointer(mine, model=model) as ckpt:
        ckpt.save(0, wait=True)
    save(str(other / "file"))

    def ours(before: Callable[[Path], None]) -> float:
        change()
        before(mine)
        ckpt = Checkpointer(mine, model=model)
        seconds = timed(lambda: restored.append(ckpt.restore()))
        assert restored[-1] == 1
        ckpt.close()
        return seconds

    def theirs(before: Callable[[Path], None]) -> float:
        before(other)
        return timed(lambda: load(str(other / "file")))

    restored: list[int] = []
    copy = Memcpy()
    return in_turns(
        {
            "ours": lambda: ours(remember),
            "theirs": lambda: theirs(remember),
            "memcpy": lambda: timed(copy),
            "cold": lambda: ours(forget),
            "their cold": lambda: theirs(forget),
        }
    )


with (
    tempfile.TemporaryDirectory(dir=FOLDER) as disk,
    tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as memory,
):
    found = saves(Path(disk), Path(memory)) if WHAT == "save" else restores(Path(disk))
(FOLDER / "samples").write_text(json.dumps(found))
