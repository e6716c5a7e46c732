"""The CPUs near each worker's GPU, read from sysfs: what --numa-binding means.

Local rank n uses the n-th visible GPU. GPUs are numbered by PCI address here; where CUDA numbers them otherwise
(different models in one machine), CUDA_DEVICE_ORDER=PCI_BUS_ID makes both agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from elastic_adapter.core.errors import UserError

MODES = ("node", "socket", "exclusive", "core-complex")


def bind(
    mode: str, pcis: tuple[str, ...], slots: int, allowed: frozenset[int], root: str
) -> tuple[frozenset[int], ...]:
    """The CPUs of each local rank, within those that this process may use."""
    if len(pcis) < slots:
        raise UserError(f"--numa-binding {mode}: {slots} workers need a GPU each, but {len(pcis)} were found")
    sysfs = _Sysfs(root, allowed)
    try:
        nodes = tuple(sysfs.node_of_gpu(pci) for pci in pcis)
        choice = {"node": _node, "socket": _socket, "exclusive": _exclusive, "core-complex": _core_complex}[mode]
        bound = tuple(choice(sysfs, nodes, index) for index in range(slots))
    except (OSError, ValueError) as error:
        raise UserError(f"--numa-binding {mode}: this machine's topology can't be read: {error}") from error
    if not all(bound):
        raise UserError(f"--numa-binding {mode}: none of the CPUs near GPU {bound.index(frozenset())} may be used")
    return bound


class _Sysfs:
    def __init__(self, root: str, allowed: frozenset[int]) -> None:
        self._root = root
        self._allowed = allowed

    def read(self, *path: str) -> str:
        with open(os.path.join(self._root, *path), encoding="ascii") as file:
            return file.read().strip()

    def cpu(self, cpu: int, *path: str) -> str:
        return self.read("devices/system/cpu", f"cpu{cpu}", *path)

    def node_of_gpu(self, pci: str) -> int:
        # A machine with a single NUMA node often says -1.
        return max(int(self.read("bus/pci/devices", pci, "numa_node")), 0)

    def nodes(self) -> list[int]:
        return sorted(_numbers(self.read("devices/system/node/online")))

    def cpus(self, node: int) -> frozenset[int]:
        return _numbers(self.read("devices/system/node", f"node{node}", "cpulist")) & self._allowed

    def socket(self, node: int) -> int | None:
        cpus = self.cpus(node)
        return int(self.cpu(min(cpus), "topology/physical_package_id")) if cpus else None

    def core(self, cpu: int) -> int:
        return min(_numbers(self.cpu(cpu, "topology/thread_siblings_list")))

    def last_cache(self, cpu: int) -> int:
        """The lowest CPU that shares this one's outermost data cache stands for the cache."""
        folder = os.path.join(self._root, "devices/system/cpu", f"cpu{cpu}", "cache")
        indexes = [name for name in os.listdir(folder) if name[:5] == "index" and name[5:].isdecimal()]
        data = [name for name in indexes if self.cpu(cpu, "cache", name, "type") in ("Unified", "Data")]
        outermost = max(data, key=lambda name: int(self.cpu(cpu, "cache", name, "level")))
        return min(_numbers(self.cpu(cpu, "cache", outermost, "shared_cpu_list")))


def _numbers(text: str) -> frozenset[int]:
    """0-2,5 as sysfs writes it."""
    spans = [part.partition("-") for part in text.split(",") if part]
    return frozenset(number for low, _, high in spans for number in range(int(low), int(high or low) + 1))


def _grouped(cpus: Iterable[int], key: Callable[[int], int]) -> list[frozenset[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(key(cpu), set()).add(cpu)
    return [frozenset(groups[name]) for name in sorted(groups)]


def _node(sysfs: _Sysfs, nodes: tuple[int, ...], index: int) -> frozenset[int]:
    return sysfs.cpus(nodes[index])


def _socket(sysfs: _Sysfs, nodes: tuple[int, ...], index: int) -> frozenset[int]:
    socket = sysfs.socket(nodes[index])
    near = [sysfs.cpus(node) for node in sysfs.nodes() if sysfs.socket(node) == socket]
    return frozenset().union(*near)


def _place(nodes: tuple[int, ...], index: int) -> tuple[int, int]:
    """The GPU's place among those of its NUMA node, and how many those are."""
    return nodes[:index].count(nodes[index]), nodes.count(nodes[index])


def _exclusive(sysfs: _Sysfs, nodes: tuple[int, ...], index: int) -> frozenset[int]:
    place, sharing = _place(nodes, index)
    cores = _grouped(sysfs.cpus(nodes[index]), sysfs.core)
    if len(cores) < sharing:
        raise ValueError(f"{sharing} GPUs share the {len(cores)} usable cores of NUMA node {nodes[index]}")
    each, extra = divmod(len(cores), sharing)
    start = place * each + min(place, extra)
    return frozenset().union(*cores[start : start + each + (place < extra)])


def _core_complex(sysfs: _Sysfs, nodes: tuple[int, ...], index: int) -> frozenset[int]:
    place, _ = _place(nodes, index)
    complexes = sorted(_grouped(sysfs.cpus(nodes[index]), sysfs.last_cache), key=len, reverse=True)
    return complexes[place % len(complexes)] if complexes else frozenset()
