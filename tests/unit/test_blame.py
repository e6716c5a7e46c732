"""Which of several failures was the cause."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from elastic_adapter.core.blame import by_cause, follows
from elastic_adapter.core.testing import exit_of

TRACE = "Traceback (most recent call last):\n  File 'train.py', line 3, in <module>\n"


def said(text, at=0.0):
    return replace(exit_of(0, 1), detail=text, detail_source="stderr", at=at)


def raised(error):
    """What the agent is told of an uncaught exception: of its words the last line."""
    return replace(exit_of(0, 1), detail=TRACE + error, detail_source="traceback", error=error)


# As they were read from workers of torch 2.13 and paddle 3.3 whose peers had gone, or did not come.
REAL = {
    "gloo": "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:11695. This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️",
    "gloo waits": "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete",
    "gloo has waited": "RuntimeError: Application timeout caused pair closure",
    "torch's store": "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    "torch's store, written to": "torch.distributed.DistNetworkError: Connection reset by peer",
    "torch's store is not there": "torch.distributed.DistNetworkError: The client socket has timed out after 8000ms while trying to connect to (127.0.0.1, 60955).",
    "torch's store waits": "torch.distributed.DistStoreError: wait timeout after 8000ms, keys: /default_pg/0//cpu//0/0",
    "torch's store is alone": "torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 2/3 clients joined.",
    "monitored barrier": "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 8000ms for send operation to complete",
    "paddle's gloo": "RuntimeError: [/paddle/third_party/gloo/gloo/transport/tcp/pair.cc:584] TIMEOUT self_rank = 1 pair_rank = 0 peer_str = [127.0.0.1]:7590",
    "paddle's gloo waits": "RuntimeError: [/paddle/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:80] TIMEOUT self_rank = none pair_rank = -1 peer_str = none",
    "paddle's store": "ValueError: (InvalidArgument) TCP connection reset by peer. Details: Operation now in progress. (at /paddle/paddle/phi/core/distributed/store/tcp_utils.h:111)",
    "paddle's store, written to": "  [Hint: Expected byte_sent > 0, but received byte_sent:-1 <= 0:0.] (at /paddle/paddle/phi/core/distributed/store/tcp_utils.h:85)",
}


@pytest.mark.parametrize("error", REAL.values(), ids=REAL)
def test_what_frameworks_say_of_others(error):
    """Whoever says this has lost another rank, or waited for it in vain, whether as an exception or on stderr."""
    assert follows(raised(error)) == 2
    assert follows(said(TRACE + error)) == 2


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError",
        "RuntimeError: DataLoader timed out after 30 seconds",
        "TimeoutError: timed out waiting for the lock of the cache",
        "OSError: [Errno 28] No space left on device",
    ],
)
def test_what_is_a_worker_s_own(error):
    """Not every wait is one for another rank."""
    assert follows(raised(error)) == 0


@pytest.mark.parametrize(
    ("exit", "much"),
    [
        pytest.param(said(TRACE + "ValueError: loss is nan"), 0, id="its own error"),
        pytest.param(said(""), 0, id="nothing was said"),
        pytest.param(said(TRACE + "ConnectionResetError: [Errno 104] Connection reset by peer"), 2, id="reset"),
        pytest.param(said("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"), 2, id="gloo"),
        pytest.param(said("torch.distributed.DistBackendError: NCCL error, ncclRemoteError: ..."), 2, id="nccl"),
        pytest.param(said("Broken pipe\n" + "at line\n" * 9 + "ValueError: bad data"), 0, id="long ago"),
        pytest.param(exit_of(0, signal=signal.SIGKILL), 0, id="killed from outside"),
        pytest.param(exit_of(0, signal=signal.SIGSEGV), 0, id="crashed"),
        pytest.param(exit_of(0, signal=signal.SIGABRT), 1, id="gave up"),
        pytest.param(exit_of(0, signal=signal.SIGTERM), 1, id="was told to end"),
    ],
)
def test_what_looks_like_a_consequence(exit, much):
    """The words of a lost peer, or an abort, say that somebody else was first."""
    assert follows(exit) == much


def test_the_look_counts_more_than_the_clock():
    """Clocks of nodes differ, and a guard may be late: the one that lost its peer was not first."""
    cause, consequence = said("ValueError: x", at=5.0), said("Connection reset by peer", at=4.9)
    assert by_cause((consequence, cause)) == (cause, consequence)


def test_the_clock_counts_between_equals():
    """Of two of the same kind the earlier one is told."""
    first, second = said("ValueError: x", at=1.0), said("KeyError: y", at=2.0)
    assert by_cause((second, first)) == (first, second)
