"""A command that runs, and all that came from it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
import uuid
from pathlib import Path

import pytest

MARK = "E2E_MARK"
PATIENCE_S = 45.0
# How long a guard whose launcher was killed has for the rest.
_TIDY_S = 3.0


class Launched:
    """A running elastic-launch. Its output is collected; every wait is bounded."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path, stdin: int | None = None) -> None:
        self.mark = uuid.uuid4().hex
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "ELASTIC_"))}
        self.process = subprocess.Popen(
            argv,
            env={**clean, MARK: self.mark, **env},
            cwd=cwd,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.lines: list[str] = []
        self.out: list[str] = []
        self._news = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, True)),
            threading.Thread(target=self._read, args=(self.process.stderr, False)),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, is_out: bool) -> None:
        for line in stream:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                if is_out:
                    self.out.append(line.rstrip("\n"))
                self._news.notify_all()
        stream.close()
        with self._news:
            self._news.notify_all()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def seen(self, pattern: str, times: int = 1) -> re.Match[str]:
        """Wait until the pattern stood in that many lines; the last match."""
        end = time.monotonic() + PATIENCE_S
        with self._news:
            while True:
                found = [match for line in self.lines if (match := re.search(pattern, line))]
                if len(found) >= times:
                    return found[times - 1]
                left = end - time.monotonic()
                ended = not any(reader.is_alive() for reader in self._readers)
                if left <= 0 or ended:
                    pytest.fail(f"{pattern!r} was seen {len(found)} of {times} times in:\n{self.text}")
                self._news.wait(min(left, 0.5))

    def finish(self, within_s: float = PATIENCE_S) -> int:
        """Wait for the end; the exit code."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {within_s} s:\n{self.text}")
        for reader in self._readers:
            reader.join(within_s)
        return code

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def family(self) -> dict[int, str]:
        """All living processes that came from this launch, wherever they have gone, by pid."""
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    environ = Path(f"/proc/{name}/environ").read_bytes()
                    state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                    if f"{MARK}={self.mark}".encode() in environ and state != "Z":
                        found[int(name)] = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue
        return found

    def saver(self) -> int:
        """The pid of the process that writes checkpoints, which is started beside the first steps."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for pid, command in self.family().items():
                if "checkpoint.saver" in command:
                    return pid
            time.sleep(0.01)
        return pytest.fail(f"there is no saver:\n{self.text}")

    def gone(self, within_s: float = 10.0) -> None:
        """Wait until no process of the family is left."""
        end = time.monotonic() + within_s
        while left := self.family():
            if time.monotonic() >= end:
                pytest.fail(f"left behind: {left}\n{self.text}")
            time.sleep(0.02)

    def destroy(self) -> None:
        """End whatever is left of the family, by pid."""
        # The launcher first: its guard ends the rest and removes their files.
        self.process.kill()
        end = time.monotonic() + _TIDY_S
        while self.family() and time.monotonic() < end:
            time.sleep(0.02)
        for _ in range(3):
            for pid in self.family():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.process.wait(10)
        for reader in self._readers:
            reader.join(10)
