"""The guard: a small process, one per node, that starts the workers and outlives the agent by a moment.

It is the parent of all workers and standbys and the subreaper of everything below them, and it holds a
socket to the agent. When the agent is gone, however it went, the socket ends, and the guard kills all
its descendants, those that made sessions of their own included. It has one thread, so that forking and
the parent-death signal are safe here, which they are not in an agent that runs gRPC.

Run by path with the standard library only: ``python -E -s -S guard.py SOCKET_FD FOLDER_TO_REMOVE ...``.

Requests (each may carry file descriptors): spawn, signal, ask, renice, sweep. Events: spawned, exited, swept.
"""

from __future__ import annotations

import fcntl
import json  # noqa: F401 (frames will need it: better now than when the first worker waits)
import os
import resource
import select
import signal
import socket
import sys
import time
from errno import ENOENT
from types import FrameType

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import descent  # found by path: the package is not needed here
import frames

# Left alone by the guard itself: it ends when its socket does, not when a whole group is signalled.
IGNORED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGTTIN", "SIGTTOU")
CAP_SYS_NICE = 23
_STDERR = 2


class Guard:
    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._decoder = frames.Decoder()
        self._fds: list[int] = []
        # Processes that were asked for and have not ended, by pid: everything else below us is a leftover.
        self._known: dict[int, int] = {}
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._inherited = self._ignore_signals()
        self._wakeup = self._watch_children()

    def run(self) -> None:
        """Serve until the agent is gone."""
        poll = select.poll()
        poll.register(self._agent, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wakeup:
                    os.read(self._wakeup, 4096)
                    self._reap()
                elif not self._receive():
                    return

    def kill_all(self) -> None:
        """The agent is gone: leave nothing behind."""
        descent.kill_below(self._wait_for_any, frozenset(), within_s=10)

    def _ignore_signals(self) -> dict[int, object]:
        """Ignore what is meant for others; what a child must be given back is returned."""
        inherited: dict[int, object] = {signal.SIGPIPE: signal.SIG_DFL, signal.SIGXFSZ: signal.SIG_DFL}
        for name in IGNORED:
            number = getattr(signal, name)
            previous = signal.signal(number, signal.SIG_IGN)
            inherited[number] = signal.SIG_IGN if previous is signal.SIG_IGN else signal.SIG_DFL
        return inherited

    def _watch_children(self) -> int:
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        return reader

    def _receive(self) -> bool:
        """Take what the agent sent; False when it is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._agent, 65536, 16)
        except ConnectionError:
            return False
        self._fds.extend(fds)
        for message in self._decoder.feed(data):
            self._handle(message)
        return bool(data)

    def _handle(self, message: dict[str, object]) -> None:
        operation = message["op"]
        if operation == "spawn":
            self._spawn(message)
        elif operation == "signal":
            self._signal(message)
        elif operation == "ask":
            self._ask(message)
        elif operation == "renice":
            self._renice(message)
        elif operation == "sweep":
            left = descent.kill_below(self._reap, frozenset(self._known), within_s=5)
            self._send({"event": "swept", "left": left})

    def _spawn(self, message: dict[str, object]) -> None:
        targets: list[int] = message["fds"]  # type: ignore[assignment]
        sources, self._fds = self._fds[: len(targets)], self._fds[len(targets) :]
        try:
            pid = self._start(message, dict(zip(targets, sources, strict=True)))
        except OSError as error:
            # The program can't be executed, or no process is to be had: the others go on.
            self._send({"event": "spawned", "id": message["id"], "errno": error.errno or ENOENT})
        else:
            self._known[pid] = message["id"]  # type: ignore[assignment]
            self._send({"event": "spawned", "id": message["id"], "pid": pid})
        for fd in sources:
            os.close(fd)

    def _start(self, message: dict[str, object], fds: dict[int, int]) -> int:
        """The pid of the new process. Raises OSError, also for what goes wrong in the child before it is a program."""
        error_reader, error_writer = os.pipe2(os.O_CLOEXEC)
        guard = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(error_reader)
            os.close(error_writer)
            raise
        if pid == 0:
            self._become(message, fds, error_writer, guard)
        os.close(error_writer)
        error = os.read(error_reader, 64)
        os.close(error_reader)
        if error:
            os.waitpid(pid, 0)
            raise OSError(int(error), os.strerror(int(error)))
        return pid

    def _become(self, message: dict[str, object], fds: dict[int, int], error_fd: int, guard: int) -> None:
        """In the child: turn into the program that was asked for."""
        try:
            # A group of its own, so that a signal reaches all of a worker; not a session of its own: the kernel shares
            # out CPU time between sessions first (autogroup), and a standby's low priority would not count.
            os.setpgid(0, 0)
            descent.prctl(descent.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(1)
            if message.get("background") and self._may_raise_priority():
                # Only what CPU time nobody else wants, and given back at once: a nice value would not do that.
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            if message.get("cpus"):
                os.sched_setaffinity(0, message["cpus"])  # type: ignore[arg-type]
            error_fd = _place(fds, error_fd)
            for number, disposition in self._inherited.items():
                signal.signal(number, disposition)  # type: ignore[arg-type]
            environment = dict(os.environ)
            for name in message["unset"]:  # type: ignore[attr-defined]
                environment.pop(name, None)
            environment.update(message["set"])  # type: ignore[call-overload]
            argv: list[str] = message["argv"]  # type: ignore[assignment]
            os.execvpe(argv[0], argv, environment)  # noqa: S606 (no shell is meant)
        except OSError as error:
            os.write(error_fd, str(error.errno or ENOENT).encode())
        except BaseException:
            os.write(error_fd, str(ENOENT).encode())
        finally:
            os._exit(127)

    def _signal(self, message: dict[str, object]) -> None:
        """To the whole group of the process, data loaders included; one that is gone is no error."""
        pid = self._pid(message)
        if pid is not None:
            try:
                os.killpg(pid, message["signal"])  # type: ignore[arg-type]
            except ProcessLookupError:
                pass

    def _ask(self, message: dict[str, object]) -> None:
        """A signal to the process alone, unless it would die of it. Looked up at the last moment: it may be ending."""
        pid = self._pid(message)
        number: int = message["signal"]  # type: ignore[assignment]
        if pid is None:
            return
        try:
            with open(f"/proc/{pid}/status") as status:
                caught = next((line.split()[1] for line in status if line.startswith("SigCgt:")), "0")
            if int(caught, 16) >> number - 1 & 1:
                os.kill(pid, number)
        except OSError:
            pass

    def _renice(self, message: dict[str, object]) -> None:
        """Give a background process, all its threads, the priority that a worker has."""
        pid = self._pid(message)
        if pid is None:
            return
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                os.sched_setscheduler(int(task), os.SCHED_OTHER, os.sched_param(0))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass

    def _may_raise_priority(self) -> bool:
        """Whether a lowered priority can be given back; without that right it is not lowered at all."""
        limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
        if limit == resource.RLIM_INFINITY or 20 - self._nice <= limit:
            return True
        with open("/proc/self/status") as status:
            effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
        return bool(int(effective, 16) >> CAP_SYS_NICE & 1)

    def _pid(self, message: dict[str, object]) -> int | None:
        return next((pid for pid, id in self._known.items() if id == message["id"]), None)

    def _reap(self) -> None:
        """Report the processes that ended; leftovers that ended are just taken away."""
        for pid, status in self._wait_for_any():
            id = self._known.pop(pid, None)
            if id is not None:
                code = os.waitstatus_to_exitcode(status)
                outcome = {"code": code} if code >= 0 else {"signal": -code}
                self._send({"event": "exited", "id": id, "at": time.time(), **outcome})

    def _wait_for_any(self) -> list[tuple[int, int]]:
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            ended.append((pid, status))

    def _send(self, event: dict[str, object]) -> None:
        try:
            self._agent.sendall(frames.encode(event))
        except (BrokenPipeError, ConnectionResetError):
            # The agent is gone: the next read says so.
            pass


def _place(fds: dict[int, int], error_fd: int) -> int:
    """Put each descriptor where the program expects it and close all others but the standard ones."""
    above = max((*fds, _STDERR)) + 1
    error_fd = fcntl.fcntl(error_fd, fcntl.F_DUPFD_CLOEXEC, above)
    parked = {target: fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, above) for target, source in fds.items()}
    for target, source in parked.items():
        os.dup2(source, target, inheritable=True)
    # Not os.closerange: where Python was built without close_range(2) it tries each of up to a billion numbers.
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {*range(_STDERR + 1), error_fd, *fds}:
        try:
            os.close(fd)
        except OSError:
            # The listing's own.
            pass
    return error_fd


def _nothing(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor says it all."""


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    agent = socket.socket(fileno=int(sys.argv[1]))
    descent.become_subreaper()
    guard = Guard(agent)
    try:
        guard.run()
    finally:
        guard.kill_all()
        for folder in sys.argv[2:]:
            _remove(folder)


if __name__ == "__main__":
    main()
