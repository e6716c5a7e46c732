"""What the stack of a worker's main thread says: where in its own program it is, and whether it waits for other ranks.

Read from what faulthandler or py-spy wrote. Judged by Python's frames alone: a wait that a program enters by a call
into C from its own line, such as ``handle.wait()`` or ``loss.item()``, does not show as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Stack:
    """The main thread's frames, innermost first; faulthandler leaves out what is beyond the hundredth."""

    frames: tuple[Frame, ...]


_PYTHON_LINE = re.compile(r'  File "(?P<file>.*)", line (?:(?P<line>\d+)|\?\?\?) in (?P<function>.+)')
_SPY_LINE = re.compile(r"    (?P<function>.+?) \((?P<file>.+):(?P<line>\d+)\)")
# faulthandler writes letters beyond ASCII as escapes.
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


def parse(text: str) -> Stack | None:
    """The stack of the main thread in a dump of all threads; None where there is none."""
    frames = tuple(_spied(text) if text.startswith("Process ") else _written(text))
    return Stack(frames) if frames else None


def _written(text: str) -> Iterator[Frame]:
    """faulthandler's: threads are listed from the newest to the oldest, which is the main thread.

    "Current" is the one that took the signal: the main thread as well, unless that blocks it. Of more than a hundred
    threads the oldest are left out.
    """
    last = re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)[-1]
    if re.search(r"^\.\.\.$", last, re.MULTILINE):
        return
    for line in last.splitlines():
        if found := _PYTHON_LINE.fullmatch(line):
            yield Frame(_unescaped(found["function"]), _unescaped(found["file"]), int(found["line"] or 0))


def _spied(text: str) -> Iterator[Frame]:
    """py-spy's: the main thread has the process's own number, or comes first where it knows no numbers (Python 3.10).

    It can't be told by its name, which it does not have where nobody imported threading.
    """
    process, *threads = re.split(r"^(?=Thread )", text, flags=re.MULTILINE)
    number = process.split()[1].rstrip(":")
    mains = [each for each in threads if each.split()[1] == number or each.startswith("Thread 0x")]
    for line in mains[0].splitlines() if mains else ():
        if found := _SPY_LINE.fullmatch(line):
            # Methods are told with their class, inner functions with their outer ones.
            yield Frame(found["function"].rpartition(".")[2], found["file"], int(found["line"]))


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


# The path inside a framework's package. A torch that is used where it was built lies in no site-packages: its most
# telling files are known by their names.
_FRAMEWORK = re.compile(
    r"(?:.*/(?:site|dist)-packages/)?(?P<path>(?:torch|paddle)/.+)"
    r"|/.*/(?P<built>torch/(?:distributed/(?:distributed_c10d|rendezvous)|autograd/graph|_tensor)\.py)"
)
_NAMES = (
    r"all_?reduce|reduce_scatter|all_?gather|all_?to_?all|broadcast|barrier|scatter|gather|send|recv|p2p|wait|sync"
    r"|across_processes"
)
# Where a stack ends that waits for others: the file within the framework, and the function.
_WAITS = tuple(
    (re.compile(file), re.compile(function))
    for file, function in (
        (r"torch/distributed/(distributed_c10d|rendezvous|_functional_collectives)\.py", r"(?!<module>).*"),
        (r"torch/distributed/(?!(elastic|launcher|checkpoint)/|(run|launch)\.py).+", rf".*({_NAMES}).*"),
        # At a forward, the ranks agree on the order of their gradients.
        (r"torch/nn/parallel/distributed\.py", rf"(_pre_)?forward|_ddp_init_helper|.*({_NAMES}).*"),
        (r"torch/(autograd/(__init__|graph)|_tensor)\.py", r"backward|grad|_engine_run_backward"),
        (r"torch/(cuda|xpu|accelerator)/.+", r".*(synchronize|wait).*"),
        (r"paddle/distributed/((collective|parallel|parallel_with_gloo)\.py|communication/.+)", r"(?!<module>).*"),
        (r"paddle/distributed/(?!(launch|flex_checkpoint|fleet/elastic)/|elastic\.py).+", rf".*({_NAMES}).*"),
        (r"paddle/(base/dygraph/(tensor_patch_methods|base)|autograd/backward_mode)\.py", r"backward|grad"),
        (r"paddle/device/.+", r".*(synchronize|wait).*"),
    )
)


def waits_for_others(stack: Stack) -> str | None:
    """What it waits in, if its innermost frames are a framework's that wait for other ranks: "all_reduce", "backward".

    A framework that calls back into the program, from a hook in a backward, waits for the program.
    """
    root = _own_root(stack)
    calls = [frame for frame in stack.frames if not _is_between(frame, root)]
    if not calls or not _waits(calls[0]):
        return None
    word = calls[0].function
    for frame in calls:
        if _is_of_program(frame, root):
            break
        # What the program called says more than what that came to.
        word = frame.function if _waits(frame) and not frame.function.startswith("__") else word
    return word.lstrip("_")


def place(stack: Stack) -> str:
    """Where it is in the program's own code, or where it is at all: "train.py:12 in load_batch"."""
    root = _own_root(stack)
    frame = next((frame for frame in stack.frames if _is_of_program(frame, root)), stack.frames[0])
    return f"{frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}"


def _waits(frame: Frame) -> bool:
    found = _FRAMEWORK.fullmatch(frame.file)
    inside = (found["path"] or found["built"]) if found else ""
    return any(file.fullmatch(inside) and function.fullmatch(frame.function) for file, function in _WAITS)


_STANDARD_LIBRARY = re.compile(r".*/lib(64|32)?/python3\.\d+t?/.+")
_INSTALLED = re.compile(r".*/(site|dist)-packages/.+")
# Code without a file of its own, and what torch.compile made.
_GENERATED = re.compile(r"<.*>|.*/torchinductor_[^/]*/.+")


def _is_between(frame: Frame, root: str) -> bool:
    """Whether it only passes on what its caller wants: the standard library, torch's dispatch, our own hooks."""
    is_library = _STANDARD_LIBRARY.fullmatch(frame.file) and not _INSTALLED.fullmatch(frame.file)
    return bool(is_library or frame.file.endswith("torch/_ops.py") or _is_ours(frame, root))


def _is_of_program(frame: Frame, root: str) -> bool:
    foreign = (_STANDARD_LIBRARY, _INSTALLED, _GENERATED)
    return not (_is_ours(frame, root) or _waits(frame) or any(each.fullmatch(frame.file) for each in foreign))


def _is_ours(frame: Frame, root: str) -> bool:
    return bool(root) and frame.file.startswith((f"{root}core/", f"{root}adapters/"))


def _own_root(stack: Stack) -> str:
    """The folder of this package: a Python worker's outermost frame is its bootstrap's."""
    root, found, _ = stack.frames[-1].file.rpartition("core/bootstrap.py")
    return root if found else ""
