"""Devices and CPUs of a made-up machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_adapter.core.errors import UserError
from elastic_adapter.launchers import numa
from elastic_adapter.launchers.devices import (
    Gpu,
    amd_gpus,
    gpu_count,
    installed,
    nvidia_gpus,
    this_machine,
    visible_gpus,
)
from elastic_adapter.launchers.numa import bind

GPUS = ("0000:01:00.0", "0000:02:00.0", "0000:81:00.0")


@pytest.fixture
def sysfs(tmp_path: Path) -> str:
    """Two sockets of two NUMA nodes each; 16 CPUs, two threads a core; a node's cores share one cache each pair.

    GPUs 0 and 1 are at node 0, GPU 2 is at node 3.
    """

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    for gpu, node in zip(GPUS, ("-1", "0", "3"), strict=True):
        write(f"bus/pci/devices/{gpu}/numa_node", node)
    write("devices/system/node/online", "0-4")
    for node in range(4):
        write(f"devices/system/node/node{node}/cpulist", f"{2 * node}-{2 * node + 1},{2 * node + 8}-{2 * node + 9}")
    write("devices/system/node/node4/cpulist", "")
    for cpu in range(16):
        folder, core = f"devices/system/cpu/cpu{cpu}", cpu % 8
        write(f"{folder}/topology/physical_package_id", str(core // 4))
        write(f"{folder}/topology/thread_siblings_list", f"{core},{core + 8}")
        write(f"{folder}/cache/index0/type", "Data")
        write(f"{folder}/cache/index0/level", "1")
        write(f"{folder}/cache/index0/shared_cpu_list", f"{core},{core + 8}")
        write(f"{folder}/cache/index1/type", "Instruction")
        write(f"{folder}/cache/index1/level", "9")
        write(f"{folder}/cache/index3/type", "Unified")
        write(f"{folder}/cache/index3/level", "3")
        write(f"{folder}/cache/index3/shared_cpu_list", f"{core},{core + 8}")
    return str(tmp_path)


ALL = frozenset(range(16))


@pytest.mark.parametrize(
    ("mode", "allowed", "bound"),
    [
        ("node", ALL, ({0, 1, 8, 9}, {0, 1, 8, 9}, {6, 7, 14, 15})),
        ("node", ALL - {0, 14}, ({1, 8, 9}, {1, 8, 9}, {6, 7, 15})),
        ("socket", ALL, ({0, 1, 2, 3, 8, 9, 10, 11},) * 2 + ({4, 5, 6, 7, 12, 13, 14, 15},)),
        ("exclusive", ALL, ({0, 8}, {1, 9}, {6, 7, 14, 15})),
        ("core-complex", ALL, ({0, 8}, {1, 9}, {6, 14})),
        ("core-complex", ALL - {0, 6}, ({1, 9}, {8}, {7, 15})),
    ],
)
def test_binding(sysfs: str, mode: str, allowed: frozenset[int], bound: tuple[set[int], ...]) -> None:
    """Each worker is bound near its GPU, within the CPUs that may be used."""
    assert bind(mode, GPUS, 3, allowed, sysfs) == tuple(frozenset(cpus) for cpus in bound)


@pytest.mark.parametrize(
    ("mode", "slots", "allowed", "words"),
    [
        ("node", 4, ALL, "4 workers need a GPU each, but 3 were found"),
        ("node", 3, ALL - {6, 7, 14, 15}, "none of the CPUs near GPU 2"),
        ("core-complex", 3, ALL - {6, 7, 14, 15}, "none of the CPUs near GPU 2"),
        ("exclusive", 3, ALL - {0, 8}, "2 GPUs share the 1 usable cores"),
        ("node", 1, ALL, "can't be read"),
    ],
)
def test_binding_that_fails(sysfs: str, mode: str, slots: int, allowed: frozenset[int], words: str) -> None:
    """Where CPUs can't be dealt out, one line says why."""
    gpus = ("0000:77:00.0",) if "read" in words else GPUS
    with pytest.raises(UserError) as caught:
        bind(mode, gpus, slots, allowed, sysfs)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_modes_are_tried() -> None:
    """The table above covers every mode."""
    assert set(numa.MODES) == {"node", "socket", "exclusive", "core-complex"}


def test_gpus_of_the_driver(tmp_path: Path) -> None:
    """Without NVML the driver's files tell the GPUs and their ids."""
    for name in ("0000:3B:00.0", "0000:01:00.0"):
        (tmp_path / name).mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t X\nGPU UUID: \t GPU-1234\n")
    assert nvidia_gpus(str(tmp_path)) == (Gpu("0000:01:00.0", "GPU-1234"), Gpu("0000:3b:00.0", ""))
    assert nvidia_gpus(str(tmp_path / "nothing")) == ()


def test_gpus_of_amd(tmp_path: Path) -> None:
    """AMD's driver lists CPUs and GPUs; only the latter count."""
    for name, text in (("0", "0"), ("1", "5432"), ("2", "871")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "gpu_id").write_text(text + "\n")
    assert amd_gpus(str(tmp_path)) == 2
    assert amd_gpus(str(tmp_path / "nothing")) == 0


def test_visible_devices() -> None:
    """CUDA_VISIBLE_DEVICES chooses by index or id, in its own order."""
    from dataclasses import replace

    first, second = Gpu("a", "GPU-11"), Gpu("b", "GPU-22")
    machine = replace(this_machine(), gpus=lambda: (first, second))
    assert visible_gpus(machine, {}) == (first, second)
    assert visible_gpus(machine, {"CUDA_VISIBLE_DEVICES": "1,0"}) == (second, first)
    assert visible_gpus(machine, {"CUDA_VISIBLE_DEVICES": "GPU-2"}) == (second,)
    assert gpu_count(machine, {"CUDA_VISIBLE_DEVICES": " 1 , 0 "}) == 2
    with pytest.raises(UserError, match="'7' is none of the 2 GPUs"):
        visible_gpus(machine, {"CUDA_VISIBLE_DEVICES": "7"})


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real answers have the right shape; a bare folder is no installed framework."""
    machine = this_machine()
    assert machine.cpus()
    assert machine.new_id() != machine.new_id()
    assert machine.resolvable("127.0.0.1")
    (tmp_path / "barefolder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("barefolder")
    assert installed("json")
    assert not installed("no_such_module_at_all")
    assert machine.xpus("/bin/false") == 0
