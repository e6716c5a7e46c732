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
