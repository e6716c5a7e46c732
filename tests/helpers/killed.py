"""Work that is killed before its nth call to the operating system, for each n.

Run by path, in a process of its own with one thread, because it forks:

    python killed.py FOLDER < ACTIONS

FOLDER holds ``checkpoints`` and ``buffer`` as a worker has left them; each trial has a copy of it. ACTIONS is what a
saver is asked for, as JSON. After each kill another saver is asked for the same, and then all must be well. One line
of JSON is printed for each trial.
"""

from __future__ import annotations

import builtins
import json
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path

from elastic_adapter.core.checkpoint import saver
from elastic_adapter.core.checkpoint.staging import FULL, SAVING, StagingBuffer
from elastic_adapter.core.checkpoint.store import Checkpoint, Store

PAIRS = 40


CALLS = ("open", "fsync", "rename", "mkdir", "unlink", "rmdir", "close", "scandir", "listdir", "stat", "posix_fadvise")


class Killer:
    """Ends this process before its nth call to the operating system; and counts them, if it does not come to that."""

    def __init__(self, last: int | None) -> None:
        self._last = last
        self.calls: list[str] = []
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        builtins.open = self._opened(builtins.open)

    def _counted(self, function):
        def call(*args, **options):
            self._count(function.__name__)
            return function(*args, **options)

        return call

    def _opened(self, function):
        def opened(*args, **options):
            self._count("open")
            return File(function(*args, **options), self._count)

        return opened

    def _count(self, name: str) -> None:
        if len(self.calls) == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls.append(name)


class File:
    """A file of which each write is a call."""

    def __init__(self, file, count) -> None:
        self._file = file
        self._count = count

    def write(self, data):
        self._count("write")
        written = self._file.write(data)
        self._file.flush()
        return written

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._count("close")
        self._file.close()


def in_child(work, last: int | None = None) -> list[str] | None:
    """The calls that it made; None: it was killed before that one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            killer = Killer(last)
            work()
            os.write(writing, json.dumps(killer.calls).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    assert told, "it failed, see above"
    return json.loads(told)


def save(folder: Path, asked: dict) -> None:
    """What a saver is asked for; also where one before it has done a part of that."""
    buffer = StagingBuffer.open(folder / "buffer")
    full = buffer.mark in (FULL, SAVING)
    buffer.close()
    root = {"root": str(folder / "checkpoints")}
    if full:
        saver.save(folder / "buffer")
    saver.put_together(**root, **asked["prepare"])
    saver.publish(**root, **asked["publish"])


def wrong(folder: Path) -> list[str]:
    """What may not be, whenever somebody is killed."""
    store = Store(folder / "checkpoints")
    found = list(store.newest_first())
    broken = [each.why for each in found if not isinstance(each, Checkpoint)]
    broken += [why for each in found if isinstance(each, Checkpoint) and (why := store.trouble(each))]
    broken += [name for name in os.listdir(store.root) if "broken" in name]
    return broken


def steps(folder: Path) -> list[int]:
    return [each.manifest.step for each in Store(folder / "checkpoints").newest_first()]


def trial(template: Path, folder: Path, asked: dict, kills: tuple[int, ...]) -> dict:
    shutil.copytree(template, folder)
    told: dict = {"kills": kills, "left": [], "wrong": []}
    for last in kills:
        told["done"] = in_child(lambda: save(folder, asked), last) is not None
        told["wrong"] += wrong(folder)
        told["left"].append(steps(folder))
    told["calls"] = in_child(lambda: save(folder, asked))
    told["wrong"] += wrong(folder)
    told["steps"] = steps(folder)
    # As the next start does.
    Store(folder / "checkpoints").sweep()
    told["names"] = sorted(os.listdir(folder / "checkpoints"))
    shutil.rmtree(folder)
    return told


def main() -> None:
    template, asked = Path(sys.argv[1]), json.load(sys.stdin)
    folder = template.with_name("trial")
    first = trial(template, folder, asked, ())
    print(json.dumps(first))
    count, rng = len(first["calls"]), random.Random(20261116)
    pairs = [tuple(rng.randrange(count) for _ in range(rng.randint(2, 3))) for _ in range(PAIRS)]
    for kills in (*((last,) for last in range(count)), *pairs):
        print(json.dumps(trial(template, folder, asked, kills)))


if __name__ == "__main__":
    main()
