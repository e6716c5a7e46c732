"""How a worker's progress gets to its agent: through a page in memory."""

import os
import subprocess
import sys

import pytest

from elastic_adapter.core import worker
from elastic_adapter.core.progress import Progress, ProgressPages


@pytest.fixture
def pages(tmp_path):
    return ProgressPages(tmp_path)


def tell(text, **variables):
    """Run this in a process that has the function."""
    program = f"from elastic_adapter.core.worker import progress\n{text}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30, env={**os.environ, **variables})


def test_what_is_told_is_read(pages):
    """The last step, and how often it was told, by a worker of that generation."""
    path = pages.path(1)
    assert pages.read(1, 3) is None
    tell("for step in range(40, 50): progress(step)", ELASTIC_PROGRESS=path, ELASTIC_GENERATION="3")
    assert pages.read(1, 3) == Progress(10, 49)
    assert pages.read(1, 4) is None
    assert pages.read(0, 3) is None


def test_a_later_worker_begins_anew(pages):
    """The slot's next worker has the same page, and its own count."""
    path = pages.path(0)
    tell("progress(7); progress(8)", ELASTIC_PROGRESS=path, ELASTIC_GENERATION="1")
    assert pages.path(0) == path
    tell("progress(5)", ELASTIC_PROGRESS=path, ELASTIC_GENERATION="2")
    assert (pages.read(0, 1), pages.read(0, 2)) == (None, Progress(1, 5))


CHILD = "import os, subprocess, sys\n{first}\n{child}\nprogress(3)"
FORKED = "if os.fork() == 0:\n    progress(2)\n    os._exit(0)\nos.wait()"
STARTED = "subprocess.run([sys.executable, '-c', 'from elastic_adapter.core.worker import progress; progress(2)'])"


@pytest.mark.parametrize("child", [FORKED, STARTED])
def test_a_child_does_not_count(pages, child):
    """Neither a data loader that gets on hides a training that hangs, nor the other way round."""
    text = CHILD.format(first="progress(1)", child=child)
    tell(text, ELASTIC_PROGRESS=pages.path(0), ELASTIC_GENERATION="1")
    assert pages.read(0, 1) == Progress(2, 3)


def test_numbers_of_other_kinds(pages):
    """Whatever is a whole number, or nearly."""
    tell("progress(True); progress(7.0)", ELASTIC_PROGRESS=pages.path(0), ELASTIC_GENERATION="1")
    assert pages.read(0, 1) == Progress(2, 7)


@pytest.mark.parametrize("variables", [{}, {"ELASTIC_PROGRESS": "/nowhere"}, {"ELASTIC_PROGRESS": "/proc/version"}])
def test_without_a_launcher_it_does_nothing(monkeypatch, variables):
    """The same script runs by itself."""
    monkeypatch.setattr(worker, "_pages", [])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    worker.progress(1)
    worker.progress(2)
    assert worker._pages == [[0, 2, 2, 0]]
