"""The rings hold: who may import whom, read from the source."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "elastic_adapter"

# Values in, values out: no clock, no asyncio, no input or output, no logging.
PURE = {
    "model",
    "config",
    "errors",
    "events",
    "membership",
    "world",
    "blame",
    "restart",
    "levels",
    "job",
    "state",
    "environment",
    "isolation",
    "succession",
    "stacks",
    "hang",
    "ledger",
    "saves",
    "checkpoint.policy",
}
PURE_MAY_IMPORT = {"__future__", "collections", "dataclasses", "enum", "re", "signal", "typing", "zlib"}
# Pure but for the calendar and for JSON: they format values for people, for etcd and for files. The sampler takes
# its rank from the environment, where nobody gives it one.
ALMOST_PURE = {
    "summary": {"time"},
    "ports": set(),
    "codec": {"json"},
    "checkpoint.manifest": {"hashlib", "json"},
    "checkpoint.order": {"json"},
    "checkpoint.sampler": {"array", "os", "random"},
}
# Each owns one outside thing; decides nothing.
EDGE = {
    *("memory", "wire", "server", "client", "processes", "output", "workers", "reservation", "readiness", "standby"),
    *("waiting", "frames", "descent", "etcd", "registry", "lease", "probe", "session", "notices", "embedded"),
    *("oom", "chronicle", "progress", "dump", "health", "witness"),
    *("checkpoint.files", "checkpoint.hashing", "checkpoint.transfer", "checkpoint.sources", "checkpoint.pickles"),
    *("checkpoint.trees", "checkpoint.archive", "checkpoint.torchfile", "checkpoint.torchstate"),
    *("checkpoint.paddlefile", "checkpoint.paddlestate", "checkpoint.store", "checkpoint.staging", "checkpoint.saving"),
    *("checkpoint.saver", "checkpoint.command", "checkpoint.link", "checkpoint.framework", "checkpoint.contents"),
    *(
        "checkpoint.buffers",
        "checkpoint.calls",
        "checkpoint.restoring",
        "checkpoint.single",
        "checkpoint.overwriting",
        "checkpoint.own_link",
        "checkpoint.writers",
        "checkpoint.connect",
    ),
    *("checkpoint.page", "checkpoint.agent_link", "checkpoint.saver_process", "checkpoint.desk"),
    *("checkpoint.shared_folder", "checkpoint.garbage"),
}
SHELL = {"coordinator", "agent", "cluster", "checkpoint.checkpointer"}
# Imported by the user's program: standard library only.
IN_WORKERS = {"worker"}
# Run by path, with the standard library only.
BY_PATH = {"guard": {"descent", "frames"}, "bootstrap": {"frames"}, "frames": set(), "descent": set()}
FOR_TESTS = {"testing"}

GRPC_MAY_BE_IMPORTED_BY = {"core.server", "core.client", "core.etcd"}
PROTOBUF_MAY_BE_SEEN_BY = {*GRPC_MAY_BE_IMPORTED_BY, "core.wire"}


def modules() -> dict[str, Path]:
    return {
        str(path.relative_to(ROOT).with_suffix("")).replace("/", "."): path
        for folder in ("core", "adapters", "launchers")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
    }


def imports(path: Path) -> set[str]:
    """Everything that a module imports anywhere in its text, by full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(name: str) -> str | None:
    """core.job for elastic_adapter.core.job.step; None for what is not ours."""
    if not name.startswith(f"{PACKAGE}."):
        return None
    parts = name.split(".")[1:]
    known = modules()
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts) or name.removeprefix(f"{PACKAGE}.")


def test_every_core_module_has_a_ring():
    """A new module must be put into a ring, here."""
    core = {name.removeprefix("core.") for name in modules() if name.startswith("core.")}
    assert core == PURE | set(ALMOST_PURE) | EDGE | SHELL | set(BY_PATH) | IN_WORKERS | FOR_TESTS


@pytest.mark.parametrize("name", sorted(PURE | set(ALMOST_PURE)))
def test_pure_modules_import_only_values(name):
    """The pure ring imports the pure ring and a few harmless modules of the standard library."""
    for imported in imports(modules()[f"core.{name}"]):
        if (ours := own(imported)) is not None:
            assert ours.removeprefix("core.") in PURE | set(ALMOST_PURE), imported
        else:
            allowed = PURE_MAY_IMPORT | ALMOST_PURE.get(name, set())
            assert imported.split(".")[0] in allowed, imported


@pytest.mark.parametrize("name", sorted(EDGE))
def test_edges_do_not_import_shells(name):
    """Importing goes inward only."""
    for imported in imports(modules()[f"core.{name}"]):
        assert own(imported) not in {f"core.{shell}" for shell in SHELL}, imported


@pytest.mark.parametrize("name", sorted(name for name in modules() if name.startswith("core.")))
def test_core_knows_no_framework_adapter_or_launcher(name):
    """The core imports neither torch nor paddle, no adapter and no launcher."""
    for imported in imports(modules()[name]):
        assert imported.split(".")[0] not in {"torch", "paddle"}, imported
        ours = own(imported)
        assert ours is None or ours.split(".")[0] in {"core", "proto"}, imported


@pytest.mark.parametrize("name", sorted(BY_PATH))
def test_what_runs_by_path_needs_no_package(name):
    """The guard and the bootstrap use the standard library and what lies beside them, nothing installed."""
    for imported in imports(modules()[f"core.{name}"]):
        root = imported.split(".")[0]
        assert root in sys.stdlib_module_names or root in BY_PATH[name], imported


@pytest.mark.parametrize("name", sorted(modules()))
def test_grpc_and_protobuf_stay_at_the_edge(name):
    """grpc is imported by the server, the client and the etcd edge; protobuf classes are seen by those and the wire."""
    for imported in imports(modules()[name]):
        root = imported.split(".")[0]
        assert root != "grpc" or name in GRPC_MAY_BE_IMPORTED_BY, imported
        seen = root == "google" or imported.startswith(f"{PACKAGE}.proto")
        assert not seen or name in PROTOBUF_MAY_BE_SEEN_BY, imported


@pytest.mark.parametrize("name", sorted(name for name in modules() if name.startswith("adapters.")))
def test_adapters_launch_side_needs_no_framework(name):
    """What the launcher imports of an adapter imports without the framework."""
    for imported in imports(modules()[name]):
        assert imported.split(".")[0] not in {"torch", "paddle"}, imported
        ours = own(imported)
        assert ours is None or ours.split(".")[0] in {"core", "adapters"}, imported


@pytest.mark.parametrize(("adapter", "framework"), [("pytorch", "torch"), ("paddlepaddle", "paddle")])
def test_an_adapter_s_package_is_light(adapter, framework):
    """It is imported by the launcher as well: neither the framework nor what checkpoints are made of comes with it."""
    program = f"""
import sys
from elastic_adapter.adapters import {adapter}
assert not {{"{framework}", "numpy"}} & set(sys.modules)
assert not [name for name in sys.modules if ".checkpoint" in name]
from elastic_adapter.adapters.{adapter} import ElasticBatchSampler, ElasticSampler
from elastic_adapter.adapters.{adapter} import Checkpointer, load_checkpoint, save_checkpoint
assert not {{"{framework}", "numpy"}} & set(sys.modules)
assert sorted({adapter}.__all__) == {adapter}.__all__
try:
    {adapter}.Nonsense
except AttributeError:
    print("light")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout == "light\n", ran.stderr


def test_only_composition_roots_wire_concrete_things():
    """Of a node, of a look at a job, and of one at its checkpoints: no other launcher imports edges and shells."""
    roots = ("launchers.run", "launchers.look", "launchers.checkpoints")
    for name, path in modules().items():
        if name.startswith("launchers.") and name not in roots:
            used = {ours for imported in imports(path) if (ours := own(imported)) and ours.startswith("core.")}
            assert used <= {f"core.{module}" for module in PURE | set(ALMOST_PURE)}, (name, used)


def test_packages_are_the_folders():
    """Every folder with Python modules is listed as a package, and nothing else is."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {
        path.parent.relative_to(ROOT)
        for top in ("core", "adapters", "proto", "launchers")
        for path in (ROOT / top).rglob("*.py")
    }
    assert listed == {f"{PACKAGE}.{str(folder).replace('/', '.')}" for folder in folders}


def test_generated_modules_are_current(tmp_path):
    """The committed modules are what the compiler makes of the .proto file today."""
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    # In a process of its own: paddle can't be imported beside it.
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PACKAGE}/proto={ROOT / 'proto'}"]
    for kind, names in {"python": ("control", "etcd"), "pyi": ("control", "etcd"), "grpc_python": ("control",)}.items():
        files = [f"{PACKAGE}/proto/{name}.proto" for name in names]
        subprocess.run([*protoc, f"--{kind}_out={tmp_path}", *files], check=True)
    for made in sorted((tmp_path / PACKAGE / "proto").iterdir()):
        assert made.read_text() == (ROOT / "proto" / made.name).read_text(), f"run make proto: {made.name} is stale"


def test_lower_bounds_are_the_ones_tried():
    """``make lowest`` runs the tests with exactly the lowest versions that pyproject.toml allows."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    makefile = (ROOT / "Makefile").read_text()
    for dependency in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name, lowest = dependency.split(">=")
        assert re.search(rf"\b{name}=={re.escape(lowest)}(\.0)?\s", makefile), dependency
