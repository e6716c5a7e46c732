"""What stacks say, on dumps of real processes that hang: tests/unit/stacks tells how they were made."""

from pathlib import Path

import pytest

from elastic_adapter.core.stacks import Frame, Stack, parse, place, waits_for_others

FOLDER = Path(__file__).parent / "stacks"

# What each process waits in, if it waits for other ranks, and its place in its program.
RECORDED = {
    "torch_init": ("init_process_group", "train.py:24 in connect"),
    "torch_all_reduce": ("all_reduce", "train.py:39 in reduce"),
    "torch_barrier": ("barrier", "train.py:39 in reduce"),
    "torch_recv": ("recv", "train.py:37 in reduce"),
    "torch_all_gather_object": ("all_gather_object", "train.py:32 in reduce"),
    "torch_all_gather_into_tensor": ("all_gather_into_tensor", "train.py:39 in reduce"),
    "torch_wait_tensor": ("wait_tensor", "train.py:35 in reduce"),
    "torch_backward": ("backward", "train.py:50 in step"),
    "torch_ddp_made": ("verify_param_shape_across_processes", "train.py:64 in main"),
    "torch_ddp_forward": ("forward", "train.py:65 in main"),
    "torch_fsdp_forward": ("foreach_all_gather", "train.py:47 in step"),
    # The main thread blocked the signal, so that another thread took it.
    "torch_signal_blocked": ("barrier", "train.py:72 in main"),
    # Python's frames do not tell what a call into C does.
    "torch_async_handle": (None, "train.py:30 in reduce"),
    # These keep the others waiting.
    "torch_data_loader": (None, "train.py:47 in <listcomp>"),
    "torch_hook_in_backward": (None, "train.py:18 in late"),
    "torch_own_forward": (None, "train.py:18 in late"),
    "paddle_init": ("init_parallel_env", "train.py:24 in connect"),
    "paddle_init_with_hook": ("init_parallel_env", "train.py:24 in connect"),
    "paddle_init_store_awaited": ("init_parallel_env", "train.py:24 in connect"),
    "paddle_all_reduce": ("all_reduce", "train.py:41 in reduce"),
    "paddle_barrier": ("barrier", "train.py:39 in reduce"),
    "paddle_recv": ("recv", "train.py:37 in reduce"),
    "paddle_all_gather_object": ("all_gather_object", "train.py:31 in reduce"),
    "paddle_backward": ("backward", "train.py:48 in step"),
    "paddle_data_parallel_made": ("sync_params_buffers", "train.py:58 in main"),
}


def read(name):
    """Both dumps of one process: faulthandler's, py-spy's."""
    text = (FOLDER / f"{name}.txt").read_text()
    begin = text.index("Process ")
    return text[:begin], text[begin:]


def test_every_recording_is_expected_to_say_something():
    assert RECORDED.keys() == {path.stem for path in FOLDER.glob("*.txt")}


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_recorded_process_does(name):
    """Whether it waits for others, and where it is, is read alike from both kinds of dumps."""
    for text in read(name):
        stack = parse(text)
        assert (waits_for_others(stack), place(stack)) == RECORDED[name]


@pytest.mark.parametrize("name", RECORDED)
def test_both_kinds_of_dumps_have_the_same_frames(name):
    """Of a process that does not move, faulthandler and py-spy tell the same."""
    written, spied = read(name)
    assert parse(written) == parse(spied)


def test_frames_are_the_main_threads_innermost_first():
    """Function, file and line of each frame, of the main thread only."""
    for text in read("torch_data_loader"):
        frames = parse(text).frames
        assert frames[0] == Frame("select", "/usr/local/lib/python3.11/selectors.py", 415)
        assert frames[-1] == Frame("<module>", "/opt/elastic-adapter/core/bootstrap.py", 311)
        assert "_feed" not in {frame.function for frame in frames}


# Python 3.13.0: a file and a function beyond ASCII.
ESCAPED = r"""Current thread 0x00007f4cd5b0bb80 (most recent call first):
  File "/tmp/gr\xf6\xdfe \u4e2d \U0001f600.py", line 4 in gr\xf6\xdfe
  File "/tmp/gr\xf6\xdfe \u4e2d \U0001f600.py", line 5 in <module>
"""
# Python 3.11.7, of a process with 121 threads: the main thread is not among the hundred that are told.
TOO_MANY_THREADS = """Thread 0x00007f6d30ff96c0 (most recent call first):
  File "/home/me/threads.py", line 6 in other
  File "/usr/local/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f6d317fa6c0 (most recent call first):
  File "/home/me/threads.py", line 6 in other
  File "/usr/local/lib/python3.11/threading.py", line 982 in run

...
"""
# Python 3.11.7, a fatal error: faulthandler tells more than stacks.
FATAL = """Fatal Python error: Segmentation fault

Current thread 0x00007f0e24dcab80 (most recent call first):
  File "/usr/local/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/fatal.py", line 4 in deep
  File "/home/me/fatal.py", line 5 in <module>

Extension modules: numpy._core._multiarray_umath, numpy.linalg._umath_linalg (total: 2)
"""
# py-spy 0.4.3, of a program that did not import threading: its thread has no name.
UNNAMED = """Process 18076: python busy.py
Python v3.11.7 (/usr/local/bin/python3.11)

Thread 18076 (active+gil)
    deeper (/home/me/busy.py:6)
    spin (/home/me/busy.py:4)
    <module> (/home/me/busy.py:9)
"""
# py-spy 0.4.3 with --nonblocking, of Python 3.10.13: it does not know the numbers that the kernel gave the threads.
UNNUMBERED = """Process 809:
Python v3.10.13 (/usr/local/bin/python3.10)

Thread 0x7F2DA27D7B80 (active): "MainThread"
    hang (/home/me/program.py:5)
    <module> (/home/me/program.py:6)
Thread 0x7F2DA1DDA6C0 (active): "Thread-1 (sleep)"
    run (/usr/local/lib/python3.10/threading.py:953)
    _bootstrap_inner (/usr/local/lib/python3.10/threading.py:1016)
    _bootstrap (/usr/local/lib/python3.10/threading.py:973)
"""
# py-spy 0.4.3 with --native: frames without a line are not Python's.
NATIVE = """Process 18076: python busy.py
Python v3.11.7 (/usr/local/bin/python3.11)

Thread 18076 (idle): "MainThread"
    0x7f512a8a3f16 (libc.so.6)
    c10d::Work::wait (libtorch_cpu.so)
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    <module> (busy.py:9)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(ESCAPED, "größe 中 😀.py:4 in größe", id="beyond ASCII"),
        pytest.param(FATAL, "fatal.py:4 in deep", id="fatal error"),
        pytest.param(UNNAMED, "busy.py:6 in deeper", id="thread without a name"),
        pytest.param(UNNUMBERED, "program.py:5 in hang", id="threads without numbers"),
        pytest.param(NATIVE, "busy.py:9 in <module>", id="native frames"),
    ],
)
def test_odd_dumps_are_read(text, expected):
    assert place(parse(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no dump at all\n",
        TOO_MANY_THREADS,
        "Current thread 0x00007f6d90eddb80 (most recent call first):\n  <no Python frame>\n",
        "Process 18076: sleep 60\n",
        'Process 7: python\nPython v3.11.7 (python3.11)\n\nThread 8 (idle): "Thread-1"\n    f (a.py:1)\n',
    ],
)
def test_dumps_without_a_main_thread_have_no_stack(text):
    """Rather no stack than that of another thread."""
    assert parse(text) is None


PACKAGES = "/opt/venv/lib/python3.12/site-packages"


def stack(*calls):
    """A stack of (function, file), innermost first, below it the program and its bootstrap."""
    below = (("main", "/home/me/train.py"), ("main", f"{PACKAGES}/elastic_adapter/core/bootstrap.py"))
    return Stack(tuple(Frame(function, file, 1) for function, file in (*calls, *below)))


@pytest.mark.parametrize(
    ("function", "file", "word"),
    [
        ("synchronize", f"{PACKAGES}/torch/cuda/__init__.py", "synchronize"),
        ("synchronize", f"{PACKAGES}/torch/cuda/streams.py", "synchronize"),
        ("synchronize", f"{PACKAGES}/paddle/device/cuda/__init__.py", "synchronize"),
        ("grad", f"{PACKAGES}/torch/autograd/__init__.py", "grad"),
        ("_store_based_barrier", "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py", "store_based_barrier"),
        ("_wait_batch_p2p", f"{PACKAGES}/torch/distributed/pipelining/schedules.py", "wait_batch_p2p"),
        ("_recv_partial", f"{PACKAGES}/paddle/distributed/fleet/meta_parallel/pp_utils/p2p_communication.py", "recv_partial"),
        ("all_reduce", "/src/pytorch/torch/distributed/distributed_c10d.py", "all_reduce"),
        ("barrier", f"{PACKAGES}/torch/distributed/elastic/utils/store.py", None),
        ("_write_item", f"{PACKAGES}/torch/distributed/checkpoint/filesystem.py", None),
        ("<module>", f"{PACKAGES}/torch/distributed/distributed_c10d.py", None),
        ("forward", f"{PACKAGES}/torch/nn/modules/linear.py", None),
        ("all_reduce", "/home/me/torch/distributed/train.py", None),
        ("all_reduce", "/home/me/train.py", None),
        ("synchronize", "/home/me/cuda/__init__.py", None),
    ],
)  # fmt: skip
def test_innermost_frame_decides(function, file, word):
    """A frame of a framework that waits, by its file and its name; a program's own never does."""
    assert waits_for_others(stack((function, file))) == word


@pytest.mark.parametrize(
    ("calls", "word"),
    [
        pytest.param(
            [("wait", "/usr/lib/python3.12/threading.py"), ("barrier", f"{PACKAGES}/torch/distributed/distributed_c10d.py")],
            "barrier",
            id="the standard library is passed over",
        ),
        pytest.param(
            [("get", "/usr/lib/python3.12/queue.py"), ("load", "/home/me/data.py"), ("backward", f"{PACKAGES}/torch/_tensor.py")],
            None,
            id="a program that the framework called back",
        ),
        pytest.param(
            [("__call__", f"{PACKAGES}/torch/_ops.py"), ("linear", f"{PACKAGES}/torch/nn/functional.py")],
            None,
            id="an operator that is no collective",
        ),
        pytest.param(
            [("get_data", "<frozen importlib._bootstrap_external>"), ("<module>", f"{PACKAGES}/torch/distributed/rendezvous.py")],
            None,
            id="an import",
        ),
        pytest.param(
            [
                ("all_reduce", f"{PACKAGES}/torch/distributed/distributed_c10d.py"),
                ("all_reduce", f"{PACKAGES}/deepspeed/comm/torch.py"),
                ("_engine_run_backward", f"{PACKAGES}/torch/autograd/graph.py"),
                ("backward", f"{PACKAGES}/torch/_tensor.py"),
            ],
            "backward",
            id="the outermost says most",
        ),
    ],
)  # fmt: skip
def test_frames_around_the_innermost(calls, word):
    assert waits_for_others(stack(*calls)) == word


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/usr/lib/python3.12/queue.py", "/home/me/data.py", f"{PACKAGES}/torch/x.py", "/home/me/train.py"], "data.py:2"),
        (["<string>", "<frozen runpy>", "/home/me/train.py"], "train.py:3"),
        (["/tmp/torchinductor_me/ab/cdef.py", f"{PACKAGES}/torch/_inductor/x.py", "/home/me/train.py"], "train.py:3"),
        (["/usr/local/lib64/python3.13t/queue.py", "/usr/local/lib/python3.13t/runpy.py"], "queue.py:1"),
        (["/src/adapters/paddlepaddle/hook.py", "/src/examples/train.py", "/src/core/bootstrap.py"], "train.py:2"),
        (["/home/me/core/bootstrap.py", "/src/core/bootstrap.py"], "bootstrap.py:1"),
        (["/src/core/frames.py", "/src/core/bootstrap.py"], "frames.py:1"),
    ],
)  # fmt: skip
def test_place_is_the_innermost_of_the_programs_own_code(files, expected):
    """Neither a package's, nor the standard library's, nor ours, nor generated; where all are, the innermost."""
    frames = tuple(Frame("f", file, line) for line, file in enumerate(files, 1))
    assert place(Stack(frames)) == f"{expected} in f"
