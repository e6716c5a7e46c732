"""Saves and restores, of 1 GiB or of many small tensors: ours, the framework's own, and a plain copy.

They take turns in one process. Ours runs as users run it: saves under elastic-launch, on one node; restores in a
program of their own.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import BIN, ENVIRON, HERE, SCRIPTS

_PATIENCE_S = 1800
LAUNCHER = {
    "save": (str(BIN / "elastic-launch"), "--no-standby", "--framework"),
    "restore": (),
}


@dataclass(frozen=True)
class Measure:
    """One row: a series of ours, and the one that it is compared with."""

    name: str
    what: str
    framework: str
    tensors: str
    ours: str
    theirs: str
    other: str
    target: str


def _measures(framework: str, load: str, save_target: str) -> list[Measure]:
    save = f"{framework}.save"
    rows = (
        ("copy: a save", "save", "ours", "memcpy", "memcpy", "at most 2x"),
        ("disk: a save", "save", "ours", "disk", save, save_target),
        ("memory: a save", "save", "ours", "memory", f"{save} to memory", "reported"),
        ("first: the first save", "save", "first", "their first", save, "reported"),
        ("restore: warm page cache", "restore", "ours", "theirs", load, "at most 0.6x"),
        ("restore-copy: warm page cache", "restore", "ours", "memcpy", "memcpy", "reported"),
        ("restore-cold: cold page cache", "restore", "cold", "their cold", load, "reported"),
    )
    small = (
        ("small: a save of 8000 tensors of 64 bytes", "save", "ours", "disk", save, "reported"),
        ("small-restore: of the same", "restore", "ours", "theirs", load, "reported"),
    )
    return [
        Measure(f"{framework}-checkpoint-{name}", what, framework, tensors, *rest)
        for tensors, those in (("large", rows), ("small", small))
        for name, what, *rest in those
    ]


MEASURES = [
    *_measures("torch", "torch.load(weights_only=True)", "at most 0.3x"),
    *_measures("paddle", "paddle.load", "at most 0.2x"),
]


@functools.cache
def samples(what: str, framework: str, tensors: str, times: int) -> dict[str, list[float]]:
    """One process serves all rows that it is asked for."""
    # Not in the folder for temporary files, which may be in memory.
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=HERE))
    launcher = [*LAUNCHER[what], framework] if LAUNCHER[what] else [sys.executable]
    try:
        subprocess.run(
            [*launcher, str(SCRIPTS / "checkpoints.py"), what, framework, tensors],
            env={**ENVIRON, "BENCH_FOLDER": str(folder), "BENCH_TURNS": str(times)},
            timeout=_PATIENCE_S,
            stdout=sys.stderr,
            check=True,
        )
        found: dict[str, list[float]] = json.loads((folder / "samples").read_text())
        return found
    finally:
        shutil.rmtree(folder)


def both(measure: Measure, times: int) -> tuple[list[float], list[float]]:
    """Our samples of this row, and the other side's."""
    found = samples(measure.what, measure.framework, measure.tensors, times)
    return found[measure.ours], found[measure.theirs]
