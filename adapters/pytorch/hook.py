"""Run in a worker when it has imported torch: a worker that has done its work ends well.

gloo's threads of torch let go of what belongs to a collective after whoever waited for it has gone on. That may be
Python's; and if the interpreter is ending by then, the thread is ended within a destructor, which aborts the process:
a job whose scripts end with a collective fails now and then after all of its work, with SIGABRT. So here the end waits
until these threads have nothing to do. Standard library only; a script sees no difference but three milliseconds.
"""

import atexit
import os
import time

_NAME = "pt_gloo_runloop"
_LOOK_EVERY_S = 0.001
# Asleep so often in a row is done: who waits for the interpreter gets it between two looks.
_LOOKS = 3
# Some collective is not over: whoever left it so does not wait for it either.
_MOST_S = 1.0


def _threads() -> list[str]:
    try:
        return [thread for thread in os.listdir("/proc/self/task") if _told(thread, "comm").strip() == _NAME]
    except OSError:
        return []


def _is_asleep(thread: str) -> bool:
    """One that has ended sleeps well."""
    return _told(thread, "stat").rpartition(")")[2].split()[:1] in (["S"], [])


def _told(thread: str, what: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/{what}") as file:
            return file.read()
    except OSError:
        return ""


def _let_them_finish() -> None:
    threads, end, looks = _threads(), time.monotonic() + _MOST_S, 0
    while threads and looks < _LOOKS and time.monotonic() < end:
        time.sleep(_LOOK_EVERY_S)
        looks = looks + 1 if all(map(_is_asleep, threads)) else 0


# Before the script has anything of this kind, and so after all of it.
atexit.register(_let_them_finish)
