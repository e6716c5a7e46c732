"""Trains on two workers, kills one in the middle, and shows what happens: ``make demo [FRAMEWORK=paddle]``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
KILL_FROM_STEP = 60
# On a machine so busy that standbys do not get ready, the restart is a cold one.
KILL_AT_LATEST = 160
STEPS = 240


def command(framework: str, checkpoint: str) -> list[str]:
    launcher = Path(sys.executable).with_name("elastic-launch")
    script = HERE / f"train_{framework}.py"
    return [
        *(str(launcher), "--framework", framework, "--nproc-per-node", "2", "--max-restarts", "3"),
        *(str(script), "--steps", str(STEPS), "--step-seconds", "0.05", "--checkpoint", checkpoint),
    ]


def say(text: str) -> None:
    print(f"\n>>> {text}\n", flush=True)


class Story:
    """What the demo has seen so far, line by line."""

    def __init__(self) -> None:
        self.victim = 0
        self.saved = 0
        self.standbys = False
        self.killed_at: float | None = None
        self.saved_at_kill = 0
        self.recovered_s: float | None = None
        self.resumed_from = 0
        self.finished = False

    def take(self, line: str) -> None:
        if match := re.search(r"rank (\d) of 2 starts at step (\d+) \(pid (\d+)\)", line):
            rank, step, pid = map(int, match.groups())
            if rank == 1:
                self.victim = pid
            if self.killed_at is not None and self.recovered_s is None:
                self.recovered_s = time.monotonic() - self.killed_at
                self.resumed_from = step
        elif match := re.search(r"checkpoint of step (\d+) is committed", line):
            self.saved = int(match.group(1))
        self.standbys |= "standbys are ready" in line
        self.finished |= "finished at step" in line
        if self.killed_at is None and self.saved >= (KILL_FROM_STEP if self.standbys else KILL_AT_LATEST):
            self.kill()

    def kill(self) -> None:
        say(f"step {self.saved} is saved. kill -9 {self.victim} (the worker of rank 1)")
        self.saved_at_kill = self.saved
        self.killed_at = time.monotonic()
        os.kill(self.victim, signal.SIGKILL)


def main() -> int:
    story = Story()
    with tempfile.TemporaryDirectory() as folder:
        run = command(sys.argv[1] if len(sys.argv) > 1 else "torch", f"{folder}/checkpoints")
        say("two workers train; soon one of them is killed:  elastic-launch " + " ".join(run[1:]))
        with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                story.take(line)
    if process.returncode != 0 or not story.finished or story.recovered_s is None:
        say(f"the demo did not go as planned (exit code {process.returncode})")
        return 1
    say(
        f"killed after step {story.saved_at_kill} was saved; {story.recovered_s:.2f} s later both ranks ran again, "
        f"from step {story.resumed_from}, and training went on to step {STEPS}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
