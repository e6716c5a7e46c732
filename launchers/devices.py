"""What the launcher asks this machine, without importing a framework: devices, CPUs, names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic_adapter.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Gpu:
    # As in sysfs: 0000:dc:00.0
    pci: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The questions that settings may raise; tests answer them with values."""

    gpus: Callable[[], tuple[Gpu, ...]]
    amd_gpus: Callable[[], int]
    xpus: Callable[[str], int]
    # The CPUs this process may use.
    cpus: Callable[[], frozenset[int]]
    installed: Callable[[str], bool]
    resolvable: Callable[[str], bool]
    # Whether a host is this machine.
    local: Callable[[str], bool]
    # The address of this machine by which it reaches a host and port; None: there is no way.
    address_towards: Callable[[str, int], str | None]
    # The file with the certificates that this system trusts.
    roots: Callable[[], str | None]
    new_id: Callable[[], str]
    host_name: str
    python: str
    sysfs: str = "/sys"


def this_machine() -> Machine:
    import sys

    return Machine(
        gpus=nvidia_gpus,
        amd_gpus=amd_gpus,
        xpus=xpus,
        cpus=lambda: frozenset(os.sched_getaffinity(0)),
        installed=installed,
        resolvable=resolvable,
        local=local,
        address_towards=address_towards,
        roots=roots,
        new_id=_new_id,
        host_name=os.uname().nodename,
        python=sys.executable,
    )


def gpu_count(machine: Machine, environ: Mapping[str, str]) -> int:
    """The GPUs a worker would see, as far as that can be told from outside."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "all")
    if visible != "all":
        return len(_entries(visible))
    return len(machine.gpus()) or machine.amd_gpus()


def visible_gpus(machine: Machine, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs in the order in which a worker numbers them."""
    gpus = machine.gpus()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else tuple(_pick(gpus, entry, visible) for entry in _entries(visible))


def _entries(visible: str) -> list[str]:
    """CUDA ignores everything from the first invalid entry on."""
    entries: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry in ("", "-1"):
            break
        entries.append(entry)
    return entries


def _pick(gpus: tuple[Gpu, ...], entry: str, visible: str) -> Gpu:
    if entry.isdecimal() and int(entry) < len(gpus):
        return gpus[int(entry)]
    named = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    if len(named) != 1:
        raise UserError(f"CUDA_VISIBLE_DEVICES={visible}: {entry!r} is none of the {len(gpus)} GPUs found here")
    return named[0]


def nvidia_gpus(folder: str = "/proc/driver/nvidia/gpus") -> tuple[Gpu, ...]:
    """All GPUs by PCI address: from NVML, or from the driver's own files where NVML is missing."""
    return _gpus_of_nvml() or _gpus_of_driver(folder)


def _gpus_of_driver(folder: str) -> tuple[Gpu, ...]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ()
    return tuple(Gpu(name.lower(), _uuid(os.path.join(folder, name, "information"))) for name in names)


def _uuid(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID")), "")
    except OSError:
        return ""


def _gpus_of_nvml() -> tuple[Gpu, ...]:
    import ctypes

    class PciInfo(ctypes.Structure):
        _fields_ = (
            ("legacy", ctypes.c_char * 16),
            ("domain", ctypes.c_uint),
            ("bus", ctypes.c_uint),
            ("device", ctypes.c_uint),
            ("ids", ctypes.c_uint * 2),
            ("text", ctypes.c_char * 32),
        )

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return ()
    except (OSError, AttributeError):
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        gpus: list[Gpu] = []
        for index in range(count.value):
            handle, pci, uuid = ctypes.c_void_p(), PciInfo(), ctypes.create_string_buffer(96)
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci))
            nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid))
            gpus.append(Gpu(f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0", uuid.value.decode()))
        return tuple(gpus)
    finally:
        nvml.nvmlShutdown()


def amd_gpus(folder: str = "/sys/class/kfd/kfd/topology/nodes") -> int:
    """The compute nodes of AMD's driver that are GPUs: CPUs have the id 0."""
    try:
        nodes = os.listdir(folder)
    except OSError:
        return 0
    return sum(_read(os.path.join(folder, node, "gpu_id")) not in ("", "0") for node in nodes)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def xpus(python: str) -> int:
    """Intel's XPUs as torch counts them: asked of the workers' Python, because nothing else can tell."""
    import subprocess

    question = "import torch; print(torch.xpu.device_count() if torch.xpu.is_available() else 0)"
    done = subprocess.run([python, "-c", question], capture_output=True, text=True, check=False)
    answer = done.stdout.strip()
    return int(answer) if done.returncode == 0 and answer.isdecimal() else 0


def installed(module: str) -> bool:
    """Whether the module can be imported. A bare folder of its name does not count."""
    from importlib.util import find_spec

    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def resolvable(host: str) -> bool:
    import socket

    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def local(host: str) -> bool:
    """Whether one of the host's addresses can be bound here."""
    import socket

    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    import socket

    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True


def address_towards(host: str, port: int) -> str | None:
    """What the routes say: connecting a datagram socket sends nothing."""
    import socket

    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
        except OSError:
            continue
    return None


_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def roots() -> str | None:
    import ssl

    candidates = (ssl.get_default_verify_paths().cafile, *_ROOTS)
    return next((path for path in candidates if path and os.path.isfile(path)), None)


def _new_id() -> str:
    from uuid import uuid4

    return str(uuid4())
