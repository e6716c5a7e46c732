"""The command itself, as a process: what it prints and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from elastic_adapter.launchers.settings import SETTINGS

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

FAMILIES = ("ELASTIC_", "PET_", "PADDLE_", "TORCHELASTIC_")


def environ(**changes: str) -> dict[str, str]:
    """This process's environment without any setting of the launcher in it."""
    named = ("LOGLEVEL", "PYTHON_EXEC", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    named += ("POD_IP", "POD_NAME", "SLURMD_NODENAME")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FAMILIES) and name not in named}
    return {**kept, **changes}


def run(*words: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_adapter.launchers.cli", *words]
    return subprocess.run(command, cwd=cwd, env=environ(**changes), capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("raise SystemExit('not to be run')\n")
    return tmp_path


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(folder: Path, flag: str) -> None:
    """The help shows the groups and examples, and ends well."""
    done = run(flag, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    for title in ("job:", "nodes:", "elasticity:", "workers:", "logs:", "examples:"):
        assert f"\n{title}\n" in done.stdout


def test_version(folder: Path) -> None:
    """The version is one line."""
    done = run("--version", cwd=folder)
    assert done.returncode == 0
    assert done.stdout.startswith("elastic-launch ")


def test_quick_answers_import_little(folder: Path) -> None:
    """The help needs neither asyncio nor gRPC nor subprocess nor logging nor a framework."""
    code = "import sys; from elastic_adapter.launchers.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"asyncio", "grpc", "subprocess", "logging", "torch", "ctypes", "importlib.metadata"}


def test_dry_run(folder: Path) -> None:
    """A dry run shows settings, origins, environments and commands, and runs nothing."""
    done = run(
        "--dry-run", "--framework", "torch", "--nproc_per_node=2", "train.py", "--lr", "0.1", cwd=folder, PET_ROLE="r"
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["nproc-per-node", "2", "flag", "--nproc-per-node"] in lines
    assert ["role", "r", "variable", "PET_ROLE"] in lines
    assert ["nnodes", "1:1", "default"] in lines
    assert lines.count([sys.executable, "-u", "train.py", "--lr", "0.1"]) == 2
    assert [line for line in lines if line and line[0].startswith("RANK=")] == [["RANK=0"], ["RANK=1"]]


def test_dry_run_of_several_nodes(folder: Path) -> None:
    """This machine knows its own address and whether the endpoint is its own; the password is nowhere."""
    words = ("--dry-run", "--framework=plain", "--nnodes=2:4", "--rdzv-id=j", "--rdzv-endpoint=localhost:7", "train.py")
    hosting = run("--rdzv-backend=c10d", *words, cwd=folder)
    assert (hosting.returncode, hosting.stderr) == (0, "")
    lines = [line.split() for line in hosting.stdout.splitlines()]
    assert ["local-addr", "localhost", "default,", "the", "endpoint's", "host"] in lines
    assert "  the job's etcd runs on localhost: the job survives the loss of any node but that one" in (
        hosting.stdout.splitlines()
    )
    etcd = run(
        *("--rdzv-backend=etcdv3", "--rdzv-endpoint=127.0.0.1", "--etcd-user=ann", *words[:-2], words[-1]),
        cwd=folder,
        ELASTIC_ETCD_PASSWORD="geheim",
    )
    assert (etcd.returncode, etcd.stderr) == (0, "")
    lines = [line.split() for line in etcd.stdout.splitlines()]
    assert ["rdzv-endpoint", "127.0.0.1:2379", "flag", "--rdzv-endpoint"] in lines
    assert ["local-addr", "127.0.0.1", "default,", "the", "way", "to", "127.0.0.1"] in lines
    assert ["etcd-password", "***", "variable", "ELASTIC_ETCD_PASSWORD"] in lines
    assert "geheim" not in etcd.stdout


@pytest.mark.parametrize(
    ("words", "changes", "parts"),
    [
        ([], {}, ["no script"]),
        (["missing.py"], {}, ["script not found", "missing.py"]),
        (["--framework", "jax", "train.py"], {}, ["jax", "torch, paddle, plain"]),
        (["--framework", "paddle", "--run_mode", "ps", "train.py"], {}, ["--run_mode ps", "paddle.distributed.launch"]),
        (["--framework", "paddle", "--no-python", "true"], {"PADDLE_LOG_DIR": "/proc/logs"}, ["PADDLE_LOG_DIR"]),
        (["--framework", "paddle", "--nnodes", "2", "train.py"], {}, ["--master etcd://HOST:2379"]),
        (["--master", "a:1", "train.py"], {}, ["--master a:1", "--framework paddle"]),
        (["--nnodes=3:1", "train.py"], {}, ["--nnodes", "'3:1'"]),
        (["--summary-file", "/tmp", "train.py"], {}, ["--summary-file /tmp", "expected a file"]),
        (["--nnodes=2:3", "train.py"], {}, ["fixed number", "--rdzv-backend c10d"]),
        (["--rdzv-backend=etcd", "train.py"], {}, ["--rdzv-endpoint HOST:PORT"]),
        (["train.py"], {"PET_RDZV_BACKEND": "etcd", "PET_RDZV_ENDPOINT": "localhost"}, ["--rdzv-id NAME is missing"]),
        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:0", "train.py"], {}, ["port 0"]),
        (["--nproc-per-node", "0", "train.py"], {}, ["--nproc-per-node", "'0'"]),
        (["--nproc-per-node", "gpu", "train.py"], {"CUDA_VISIBLE_DEVICES": ""}, ["no GPU"]),
        (["--fault-tolerance-level=0", "--max-restarts=1", "train.py"], {}, ["contradicts"]),
        (["--start-method=fork", "train.py"], {}, ["--start-method"]),
        (["--logs-specs=x", "train.py"], {}, ["--logs-specs"]),
        (["--no-such-option", "train.py"], {}, ["unknown option"]),
        (["--nnodes"], {}, ["expected a value"]),
        (["--role", "a\nb", "--nnodes", "a\nb", "train.py"], {}, ["--nnodes"]),
        (["line\nbreak.py"], {}, ["script not found"]),
        (["train.py"], {"PET_NNODES": "1", "ELASTIC_NNODES": "2"}, ["PET_NNODES", "ELASTIC_NNODES"]),
        (["train.py"], {"PET_STANDALONE": "yes"}, ["PET_STANDALONE", "0 or 1"]),
        (["-m", "no_such_module"], {}, ["no_such_module"]),
        (["--log-dir", "/proc/logs", "train.py"], {}, ["--log-dir"]),
        (["--master-addr", "no such host", "train.py"], {}, ["--master-addr"]),
    ],
)
def test_misuse(folder: Path, words: list[str], changes: dict[str, str], parts: list[str]) -> None:
    """Misuse ends with code 2 and exactly one line on stderr."""
    done = run(*(["--framework", "torch", *words] if "--framework" not in words else words), cwd=folder, **changes)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("elastic-launch: error: ")
    assert "Traceback" not in line
    assert all(part in line for part in parts)


def test_other_systems(folder: Path) -> None:
    """On another system than Linux one line says so; the help still works there."""
    code = "import sys; sys.platform = 'darwin'; from elastic_adapter.launchers.cli import main; sys.exit(main({}))"
    refused = subprocess.run(
        [sys.executable, "-c", code.format("['train.py']")], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (refused.returncode, refused.stderr) == (
        2,
        "elastic-launch: error: elastic-launch runs on Linux only, this is darwin\n",
    )
    subprocess.run([sys.executable, "-c", code.format("['--help']")], cwd=folder, capture_output=True, check=True)


def test_every_flag_of_torchrun(folder: Path) -> None:
    """Every flag of the installed torchrun is accepted in both spellings, with its default and its PET_ variable."""
    code = """
import json
from torch.distributed.run import get_args_parser
print(json.dumps([
    [action.option_strings, action.dest, action.default, type(action).__name__]
    for action in get_args_parser()._actions if action.option_strings and action.dest != "help"
]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environ(), capture_output=True, text=True, check=True
    )
    ours = {flag: setting for setting in SETTINGS for flag in setting.flags}
    deliberate = {"shutdown_timeout": "30", "max_restarts": None, "rdzv_id": None}
    for flags, name, default, action in json.loads(done.stdout):
        for flag in flags:
            setting = ours[flag.replace("_", "-")]
            assert setting.name == name.replace("_", "-")
            assert setting.switch == (action == "check_env")
            assert (f"PET_{name.upper()}" in setting.variables) == (action in ("env", "check_env"))
            assert setting.default == deliberate.get(name, as_text(default))


def as_text(default: object) -> str | None:
    """A default of torchrun's parser as our table writes it."""
    if isinstance(default, bool):
        return "1" if default else "0"
    if isinstance(default, list):
        return ",".join(default)
    return None if default is None else str(default)


@pytest.mark.timeout(120)
def test_environment_is_torchruns(folder: Path) -> None:
    """The workers of torchrun and ours are told the same, but for what is ours to choose."""
    (folder / "tell.py").write_text(
        "import json, os\nopen(f'told.{os.environ[\"RANK\"]}', 'w').write(json.dumps(dict(os.environ)))\n"
    )
    flags = ["--nproc-per-node=2", "--master-port=29471", "--rdzv-id=job", "--max-restarts=2", "--role=trainer"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *flags, "tell.py"]
    subprocess.run(torchrun, cwd=folder, env=environ(), capture_output=True, check=True)
    ours = run("--dry-run", "--framework=torch", *flags, "tell.py", cwd=folder).stdout.split("\nworker ")
    # The store is rank 0's here, and the error file has its own place in every run.
    different = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
    for rank in range(2):
        told = json.loads((folder / f"told.{rank}").read_text())
        theirs = {name: value for name, value in told.items() if environ().get(name) != value}
        listed, _, _ = ours[rank + 1].partition("  command\n")
        pairs = [line.strip().partition("=") for line in listed.splitlines() if line.startswith("    ")]
        mine = {name: value for name, _, value in pairs if not name.startswith("ELASTIC_")}
        assert mine.keys() == theirs.keys()
        assert {name for name in mine if mine[name] != theirs[name]} == different
