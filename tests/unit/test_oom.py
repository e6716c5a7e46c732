"""The kernel's counters of processes killed for want of memory, on made-up trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_adapter.core.oom import OomCounter, memory_left

V2 = "memory.events"
V1 = "memory/memory.oom_control"


class Tree:
    def __init__(self, root: Path, cgroup: str, *files: str) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(cgroup)
        self.files = files
        self.write(0)

    def write(self, count: int) -> None:
        for name in self.files:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"low 0\noom_kill_disable 0\noom_kill {count}\nunder_oom\n")

    def counter(self) -> OomCounter:
        return OomCounter(f"{self.root}/proc", f"{self.root}/cgroup")


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        pytest.param("0::/jobs/one\n", f"cgroup/jobs/one/{V2}", id="v2"),
        pytest.param("0::/jobs/one\n", f"cgroup/{V2}", id="v2 in a container"),
        pytest.param("4:memory:/one\n0::/\n", "cgroup/memory/one/memory.oom_control", id="v1"),
        pytest.param("4:cpu,memory:/one\n", f"cgroup/{V1}", id="v1 in a container"),
        pytest.param("", "proc/vmstat", id="the whole system"),
    ],
)
def test_raised(tmp_path: Path, cgroup: str, file: str) -> None:
    """It tells once that the count was raised, wherever the kernel counts."""
    tree = Tree(tmp_path, cgroup, file)
    counter = tree.counter()
    assert not counter.raised()
    tree.write(1)
    assert counter.raised()
    assert not counter.raised()
    tree.write(3)
    assert counter.raised()


def test_no_counter_at_all(tmp_path: Path) -> None:
    """Where nothing can be read, nothing is claimed."""
    tree = Tree(tmp_path, "0::/one\n")
    assert not tree.counter().raised()


def test_a_counter_that_vanishes(tmp_path: Path) -> None:
    """A cgroup that is gone is no kill."""
    tree = Tree(tmp_path, "0::/one\n", f"cgroup/one/{V2}")
    counter = tree.counter()
    tree.write(2)
    (tmp_path / f"cgroup/one/{V2}").unlink()
    assert not counter.raised()


NO_LIMIT = 9223372036854771712


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        pytest.param("0::/\n", {}, None, id="nothing is known"),
        pytest.param("", {"memory.max": "5", "memory.current": "1"}, None, id="not in any"),
        pytest.param("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "7\n"}, None, id="v2 without a limit"),
        pytest.param("0::/a\n", {"a/memory.max": "100\n", "a/memory.current": "30\n"}, 70, id="v2"),
        pytest.param("0::/a\n", {"a/memory.max": "100", "a/memory.current": "130"}, 0, id="v2, all is used"),
        pytest.param(
            "0::/pod/one\n",
            {
                "pod/one/memory.max": "max",
                "pod/one/memory.current": "7",
                "pod/memory.max": "100",
                "pod/memory.current": "60",
                "pod/memory.stat": "anon 3\nfile 50\ninactive_file 25\n",
            },
            65,
            id="v2, the one above it, less what was read once",
        ),
        pytest.param("0::/gone\n", {"memory.max": "100", "memory.current": "30"}, 70, id="v2 in a container"),
        pytest.param(
            "4:memory:/a/b\n0::/\n",
            {
                "memory/a/b/memory.limit_in_bytes": f"{NO_LIMIT}",
                "memory/a/b/memory.usage_in_bytes": "7",
                "memory/a/memory.limit_in_bytes": "100",
                "memory/a/memory.usage_in_bytes": "60",
                "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 5\n",
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "70",
            },
            45,
            id="v1, the strictest",
        ),
        pytest.param(
            "4:cpu,memory:/docker/1\n",
            {"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "1"},
            99,
            id="v1 in a container",
        ),
    ],
)
def test_memory_left(tmp_path: Path, cgroup: str, files: dict[str, str], left: int | None) -> None:
    """What the strictest cgroup still allows; without a limit, nothing is said."""
    tree = Tree(tmp_path, cgroup)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_left(f"{tree.root}/proc", f"{tree.root}/cgroup") == left
