"""What a command means as a plan, and the line that each mistake gets."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_adapter.core.config import ClusterConfig, Credentials, JobConfig, OutputConfig
from elastic_adapter.core.errors import UserError
from elastic_adapter.core.model import Level
from elastic_adapter.core.ports import NativeProgram, PythonProgram
from elastic_adapter.launchers.command_line import parse
from elastic_adapter.launchers.devices import Gpu, Machine
from elastic_adapter.launchers.plan import LaunchPlan
from elastic_adapter.launchers.resolve import resolve
from elastic_adapter.launchers.settings import read
from elastic_adapter.launchers.streams import make_folder

MACHINE = Machine(
    gpus=lambda: (),
    amd_gpus=lambda: 0,
    xpus=lambda python: 0,
    cpus=lambda: frozenset({0, 1, 2}),
    installed=lambda module: module == "torch",
    resolvable=lambda host: host != "nowhere",
    local=lambda host: host == "here",
    address_towards=lambda host, port: None if host == "nowhere" else "10.0.0.7",
    roots=lambda: "/system/roots.pem",
    new_id=lambda: "random-id",
    host_name="box",
    python=sys.executable,
)
GPUS = replace(MACHINE, gpus=lambda: (Gpu("0000:01:00.0", "GPU-a"), Gpu("0000:02:00.0", "GPU-b")))
BOTH = replace(MACHINE, installed=lambda module: True)
NONE = replace(MACHINE, installed=lambda module: False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a script, a module, a program and things that are none."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "text.sh").write_text("#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(line: str, machine: Machine = MACHINE, **environ: str) -> LaunchPlan:
    command = parse(line.split())
    environ = {"PATH": "/usr/bin:/bin", **environ}
    return resolve(read(command.options, environ), command.words, environ, machine)


def origins(made: LaunchPlan) -> dict[str, tuple[str, str]]:
    return {source.name: (source.value, source.origin) for source in made.sources}


def test_defaults() -> None:
    """A script and nothing else: one worker on one node, with the only framework that is installed."""
    made = plan("train.py --lr 0.1")
    assert made.program == PythonProgram("script", "train.py", ("--lr", "0.1"), sys.executable)
    assert (made.adapter.name, made.log_level, made.notes) == ("torch", "INFO", ())
    assert (made.job.job_id, made.job.level, made.job.policy.max_restarts) == ("random-id", Level.FAULT_TOLERANT, 0)
    assert (made.node.node, made.node.address, made.node.slots) == ("box", "127.0.0.1", 1)
    assert (made.node.grace_s, made.node.standby, made.node.preload) == (30.0, True, ())
    assert made.node.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert made.node.output == OutputConfig(to_console=(3,), to_file=(0,))
    assert (made.node.master_port, made.node.role, made.node.cpus) == (None, "default", ())


def test_sources() -> None:
    """Each setting is shown with its resolved value and where it came from."""
    shown = origins(plan("--nproc-per-node cpu --standalone train.py", PET_ROLE="eval"))
    assert shown["nproc-per-node"] == ("3 (cpu)", "flag --nproc-per-node")
    assert shown["standalone"] == ("yes", "flag --standalone")
    assert shown["role"] == ("eval", "variable PET_ROLE")
    assert shown["framework"] == ("torch", "variable PET_ROLE")
    assert shown["rdzv-id"] == ("random-id", "default, new for each run")
    assert shown["node-id"] == ("box", "default, the host's name")
    assert shown["max-restarts"] == ("0", "default")
    assert shown["log-level"] == ("INFO", "default")


@pytest.mark.parametrize(
    ("line", "environ", "machine", "name", "origin"),
    [
        ("--framework plain train.py", {"ELASTIC_FRAMEWORK": "torch"}, BOTH, "plain", "flag --framework"),
        ("train.py", {"ELASTIC_FRAMEWORK": "paddle", "PET_NNODES": "1"}, BOTH, "paddle", "variable ELASTIC_FRAMEWORK"),
        ("train.py", {"PET_NNODES": "1"}, BOTH, "torch", "variable PET_NNODES"),
        ("train.py", {"PADDLE_NNODES": "1"}, BOTH, "paddle", "variable PADDLE_NNODES"),
        ("train.py", {}, MACHINE, "torch", "the only one installed"),
        (
            "train.py",
            {},
            replace(MACHINE, installed=lambda module: module == "paddle"),
            "paddle",
            "the only one installed",
        ),
        ("--framework torch --no-python ./run.sh", {}, NONE, "torch", "flag --framework"),
        ("--framework torch train.py", {"PYTHON_EXEC": "/bin/sh"}, NONE, "torch", "flag --framework"),
    ],
)
def test_framework(line: str, environ: dict[str, str], machine: Machine, name: str, origin: str) -> None:
    """The framework is the one named, else the one the variables tell, else the only one installed."""
    made = plan(line, machine, **environ)
    assert made.adapter.name == name
    assert origins(made)["framework"] == (name, origin)


@pytest.mark.parametrize(
    ("line", "environ", "address", "port"),
    [
        ("--standalone", {}, "127.0.0.1", None),
        ("--nnodes=1", {}, "127.0.0.1", None),
        ("--nnodes 1:1 --rdzv-backend=c10d --rdzv-endpoint=localhost:0", {}, "127.0.0.1", None),
        ("--rdzv-backend c10d --rdzv-endpoint head:29400 --rdzv-conf timeout=3,a=b", {}, "127.0.0.1", None),
        ("--rdzv-backend static", {}, "127.0.0.1", None),
        ("--master-addr head --master-port 29501", {}, "head", 29501),
        ("--master-port 29501", {}, "127.0.0.1", 29501),
        ("--master-port 29501 --local-addr 10.0.0.5", {}, "10.0.0.5", 29501),
        ("--master-addr [::1]", {}, "::1", None),
        ("--local-addr 10.0.0.5 --standalone", {}, "10.0.0.5", None),
        ("--rdzv-endpoint head:29501", {}, "head", 29501),
        ("--rdzv-endpoint [::1]:29501", {}, "::1", 29501),
        ("", {"PET_MASTER_PORT": "7"}, "127.0.0.1", 7),
        ("--standalone --rdzv-backend etcd", {}, "127.0.0.1", None),
        ("--standalone --master-port 29501", {}, "127.0.0.1", None),
        ("--rdzv-backend c10d --rdzv-endpoint head:0", {}, "127.0.0.1", None),
        ("--standalone --rdzv-backend etcd --rdzv-endpoint a:1,https://b", {}, "127.0.0.1", None),
        ("--etcd-ca none.pem --etcd-user ann", {"POD_IP": "10.0.0.9"}, "127.0.0.1", None),
    ],
)
def test_one_node(line: str, environ: dict[str, str], address: str, port: int | None) -> None:
    """All the ways to ask for one node run on one; only the static backend takes a port from the user."""
    made = plan(line + " train.py", **environ)
    assert (made.job.min_nodes, made.job.max_nodes, made.cluster) == (1, 1, None)
    assert (made.node.address, made.node.master_port) == (address, port)


@pytest.mark.parametrize(
    ("line", "environ", "machine", "slots"),
    [
        ("--nproc-per-node 7", {}, MACHINE, 7),
        ("--nproc-per-node cpu", {}, GPUS, 3),
        ("--nproc-per-node auto", {}, MACHINE, 3),
        ("--nproc-per-node auto", {}, GPUS, 2),
        ("--nproc-per-node gpu", {}, GPUS, 2),
        ("--nproc-per-node gpu", {}, replace(MACHINE, amd_gpus=lambda: 4), 4),
        ("--nproc-per-node gpu", {"CUDA_VISIBLE_DEVICES": "0,3,5"}, MACHINE, 3),
        ("--nproc-per-node gpu", {"CUDA_VISIBLE_DEVICES": "0,-1,5"}, MACHINE, 1),
        ("--nproc-per-node auto", {"CUDA_VISIBLE_DEVICES": ""}, GPUS, 3),
        ("--nproc-per-node xpu", {}, replace(MACHINE, xpus=lambda python: 6), 6),
        ("", {"PET_NPROC_PER_NODE": "2"}, MACHINE, 2),
    ],
)
def test_workers(line: str, environ: dict[str, str], machine: Machine, slots: int) -> None:
    """The number of workers is given, or counted without importing a framework."""
    assert plan(line + " train.py", machine, **environ).node.slots == slots


@pytest.mark.parametrize(
    ("line", "level", "restarts"),
    [
        ("--framework torch", 1, 0),
        ("--framework plain", 1, 0),
        ("--framework paddle", 1, 3),
        ("--framework torch --max-restarts 5", 1, 5),
        ("--framework torch --fault-tolerance-level 2 --max-restarts 5", 2, 5),
        ("--framework paddle --fault-tolerance-level 0", 0, 0),
        ("--framework paddle --fault-tolerance-level 0 --max-restarts 0", 0, 0),
    ],
)
def test_level_and_budget(line: str, level: int, restarts: int) -> None:
    """The budget's default is the framework's; level 0 means no restarts."""
    job = plan(line + " train.py", BOTH).job
    assert (job.level, job.policy.max_restarts) == (level, restarts)


@pytest.mark.parametrize(
    ("line", "console", "files"),
    [
        ("", (3, 3), (0, 0)),
        ("-r 3", (0, 0), (3, 3)),
        ("-r 1", (2, 2), (1, 1)),
        ("-t 3", (3, 3), (3, 3)),
        ("-r 3 -t 1", (1, 1), (3, 3)),
        ("-r 0:1,1:2", (2, 1), (1, 2)),
        ("-t 1:3", (3, 3), (0, 3)),
        ("-r 7:3", (3, 3), (0, 0)),
        ("--local-ranks-filter 0", (3, 0), (0, 0)),
        ("--local-ranks-filter 1 -t 3", (0, 3), (3, 3)),
        ("--log-dir logs", (3, 3), (3, 3)),
        ("--log-dir logs -r 3", (0, 0), (3, 3)),
        ("--log-dir logs -t 1", (3, 3), (1, 1)),
        ("--log-dir logs -r 0", (3, 3), (0, 0)),
        ("--log-dir /dev/null -r 3", (3, 3), (0, 0)),
    ],
)
def test_output(line: str, console: tuple[int, ...], files: tuple[int, ...]) -> None:
    """Redirects go to the file, tees to both, the rest to the console, as in torchrun; --log-dir alone tees all."""
    output = plan(f"--nproc-per-node 2 {line} train.py").node.output
    assert (output.to_console, output.to_file) == (console, files)
    assert output.log_dir == ("logs" if "--log-dir logs" in line else None)


def test_log_folder(folder: Path) -> None:
    """The folder is made when the job starts; where that fails, one line says why."""
    make_folder("a/b", "flag --log-dir")
    assert (folder / "a" / "b").is_dir()
    with pytest.raises(UserError, match="--log-dir: expected a folder that can be made, got '/proc/logs'"):
        make_folder("/proc/logs", "flag --log-dir")


def test_output_texts() -> None:
    """Filters are a comma list with an escaped comma; the prefix may be empty."""
    line = "--duplicate-stdout-filters a,,b,c --duplicate-stderr-filters err --log-prefix= train.py"
    output = plan(line).node.output
    assert (output.stdout_filters, output.stderr_filters, output.prefix) == (("a,b", "c"), ("err",), "")


@pytest.mark.parametrize(
    ("line", "environ", "program"),
    [
        ("train.py -x", {}, PythonProgram("script", "train.py", ("-x",), sys.executable)),
        ("app", {}, PythonProgram("script", "app", (), sys.executable)),
        ("-m package.train 1", {}, PythonProgram("module", "package.train", ("1",), sys.executable)),
        ("-m json.tool", {}, PythonProgram("module", "json.tool", (), sys.executable)),
        ("--run-path train.py", {}, PythonProgram("path", "train.py", (), sys.executable)),
        ("--run-path --no-python train.py", {}, PythonProgram("path", "train.py", (), sys.executable)),
        ("train.py", {"PYTHON_EXEC": "/bin/sh"}, PythonProgram("script", "train.py", (), "/bin/sh")),
        ("-m elsewhere", {"PYTHON_EXEC": "/bin/sh"}, PythonProgram("module", "elsewhere", (), "/bin/sh")),
        ("--no-python ./run.sh a", {}, NativeProgram(("./run.sh", "a"))),
        ("--no-python sh -c true", {}, NativeProgram(("sh", "-c", "true"))),
        ("--framework plain sh -c true", {}, NativeProgram(("sh", "-c", "true"))),
        ("--framework plain train.py a", {}, PythonProgram("script", "train.py", ("a",), sys.executable)),
        ("--framework plain -m package", {}, PythonProgram("module", "package", (), sys.executable)),
    ],
)
def test_program(line: str, environ: dict[str, str], program: object) -> None:
    """Scripts, modules and paths are Python; --no-python and plain programs are executed as they are."""
    assert plan(line, **environ).program == program


def test_program_in_the_current_folder(folder: Path) -> None:
    """A bare name that is not on PATH is found in the current folder."""
    assert plan("--framework plain run.sh").program == NativeProgram((str(folder / "run.sh"),))


def test_module_on_the_workers_path(folder: Path) -> None:
    """A module may be on PYTHONPATH, which the launcher's own Python need not have read."""
    (folder / "empty" / "far.py").write_text("")
    assert plan("-m far", PYTHONPATH=str(folder / "empty")).program == PythonProgram(
        "module", "far", (), sys.executable
    )


def test_further_settings() -> None:
    """The rest of the settings reaches the plan."""
    made = plan(
        "--node-id n1 --job-id j1 --role eval --shutdown-timeout 2.5 --signals-to-handle USR1,sigterm --no-standby "
        "--preload numpy,package.data --pass-local-rank train.py",
        LOGLEVEL="warn",
    )
    assert (made.node.node, made.job.job_id, made.node.role, made.node.grace_s) == ("n1", "j1", "eval", 2.5)
    assert made.node.signals == (signal.SIGUSR1, signal.SIGTERM)
    assert (made.node.standby, made.node.preload) == (False, ("numpy", "package.data"))
    assert (made.node.pass_local_rank, made.log_level) == (True, "WARNING")
    assert plan("--use-env train.py").node.pass_local_rank is False
    assert plan("train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").node.grace_s == 7


@pytest.mark.parametrize(
    ("line", "environ", "parts"),
    [
        ("--nproc-per-node 2", {}, ["OMP_NUM_THREADS", "set to 1", "2 workers"]),
        ("--monitor-interval 5", {}, ["--monitor-interval", "no effect"]),
        ("--event-log-handler console", {}, ["--event-log-handler", "no effect"]),
        ("--standalone --master-port 29501", {}, ["--master-port", "no effect"]),
        ("--local-ranks-filter 5", {}, ["--local-ranks-filter", "no output"]),
        ("", {"TORCHELASTIC_HEALTH_CHECK_PORT": "80"}, ["TORCHELASTIC_HEALTH_CHECK_PORT", "not used"]),
    ],
)
def test_notes(line: str, environ: dict[str, str], parts: list[str]) -> None:
    """What has no effect, or is set for the user, is said once."""
    (note,) = plan(line + " train.py", **environ).notes
    assert all(part in note for part in parts)


def test_no_note_where_threads_are_chosen() -> None:
    """Nothing is said about OMP_NUM_THREADS where the user set it, or where the framework does not care."""
    assert plan("--nproc-per-node 2 train.py", OMP_NUM_THREADS="4").notes == ()
    assert plan("--nproc-per-node 2 --framework plain train.py").notes == ()


ETCD = "--nnodes 2:4 --rdzv-id j --rdzv-backend etcdv3"
C10D = "--nnodes 2:4 --rdzv-id j --rdzv-backend c10d"
EMBEDDED = "--nnodes 1 --rdzv-id j --rdzv-backend embedded"


def cluster(made: LaunchPlan) -> ClusterConfig:
    assert made.cluster is not None
    return made.cluster


@pytest.mark.parametrize(
    ("given", "endpoints", "ca"),
    [
        ("a", ("a:2379",), None),
        ("a:1, b ,10.0.0.1:3", ("a:1", "b:2379", "10.0.0.1:3"), None),
        ("[fd00::1]:1,[::1]", ("[fd00::1]:1", "[::1]:2379"), None),
        ("http://a:1,http://b/", ("a:1", "b:2379"), None),
        ("https://a:1", ("a:1",), "/system/roots.pem"),
        ("https://a,https://[::1]:1/", ("a:2379", "[::1]:1"), "/system/roots.pem"),
    ],
)
def test_etcd_endpoints(given: str, endpoints: tuple[str, ...], ca: str | None) -> None:
    """A list of hosts with or without scheme and port; https trusts what the system trusts."""
    command = parse(ETCD.split())
    values = read({**command.options, "rdzv-endpoint": given}, {})
    met = cluster(resolve(values, ("train.py",), {}, MACHINE))
    assert (met.endpoints, met.credentials) == (endpoints, Credentials(ca=ca))
    assert (met.embedded, met.hosts_etcd) == (False, False)


@pytest.mark.parametrize(
    ("line", "environ", "credentials"),
    [
        ("--etcd-ca run.sh", {}, Credentials(ca="run.sh")),
        (
            "--etcd-ca run.sh --etcd-cert train.py --etcd-key text.sh",
            {},
            Credentials(None, None, "run.sh", "train.py", "text.sh"),
        ),
        (
            "--etcd-cert train.py --etcd-key text.sh",
            {},
            Credentials(None, None, "/system/roots.pem", "train.py", "text.sh"),
        ),
        ("--etcd-user ann", {"ELASTIC_ETCD_PASSWORD": "pw"}, Credentials("ann", "pw")),
        ("", {"ELASTIC_ETCD_USER": "ann", "ELASTIC_ETCD_PASSWORD": "pw"}, Credentials("ann", "pw")),
        ("--rdzv-conf protocol=https", {}, Credentials(ca="/system/roots.pem")),
        ("--rdzv-conf protocol=http", {}, Credentials()),
        (
            "--rdzv-conf cacert=run.sh,cert=train.py,key=text.sh",
            {},
            Credentials(None, None, "run.sh", "train.py", "text.sh"),
        ),
        (
            "--rdzv-conf ca_cert=run.sh,ssl_cert=train.py,ssl_cert_key=text.sh",
            {},
            Credentials(None, None, "run.sh", "train.py", "text.sh"),
        ),
        ("--rdzv-conf cacert=none.pem --etcd-ca run.sh", {}, Credentials(ca="run.sh")),
        ("", {"ELASTIC_ETCD_CA": "run.sh"}, Credentials(ca="run.sh")),
    ],
)
def test_etcd_credentials(line: str, environ: dict[str, str], credentials: Credentials) -> None:
    """Certificates and the user come from flags, variables or torchrun's --rdzv-conf; the password from its variable."""
    assert cluster(plan(f"{ETCD} --rdzv-endpoint a {line} train.py", **environ)).credentials == credentials


def test_no_system_roots() -> None:
    """Where the system has no list of certificates, https needs one from the user."""
    with pytest.raises(UserError, match=r"https.*--etcd-ca PATH"):
        plan(f"{ETCD} --rdzv-endpoint https://a train.py", replace(MACHINE, roots=lambda: None))


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        (f"{ETCD} --rdzv-endpoint http://ann:geheim@a:1", {}),
        (f"{ETCD} --rdzv-endpoint a", {"ELASTIC_ETCD_PASSWORD": "geheim"}),
        (f"{ETCD} --rdzv-endpoint a --etcd-user ann --etcd-ca none.pem", {"ELASTIC_ETCD_PASSWORD": "geheim"}),
    ],
)
def test_passwords_are_in_no_message(line: str, environ: dict[str, str]) -> None:
    """A mistake around the password says what to do and does not repeat it."""
    with pytest.raises(UserError, match="--etcd-") as caught:
        plan(line + " train.py", **environ)
    assert "geheim" not in str(caught.value)


def test_password_is_not_shown() -> None:
    """Neither the table of settings nor the plan's own text holds the password."""
    made = plan(f"{ETCD} --rdzv-endpoint a --etcd-user ann train.py", ELASTIC_ETCD_PASSWORD="geheim")
    assert origins(made)["etcd-password"] == ("***", "variable ELASTIC_ETCD_PASSWORD")
    assert "geheim" not in repr(made)
    alone = plan("train.py", ELASTIC_ETCD_PASSWORD="geheim")
    assert origins(alone)["etcd-password"][0] == "***"


@pytest.mark.parametrize(
    ("line", "endpoint", "hosts", "address", "place"),
    [
        (f"{C10D} --rdzv-endpoint here:7", "here:7", True, "here", None),
        (f"{C10D} --rdzv-endpoint here", "here:29400", True, "here", None),
        (f"{C10D} --rdzv-endpoint far", "far:29400", False, "10.0.0.7", None),
        (f"{C10D} --rdzv-endpoint [fd00::1]:7", "[fd00::1]:7", False, "10.0.0.7", None),
        (f"{C10D} --rdzv-endpoint far --rdzv-conf is_host=true", "far:29400", True, "far", None),
        (f"{C10D} --rdzv-endpoint here --rdzv-conf is_host=0", "here:29400", False, "10.0.0.7", None),
        (f"{C10D} --rdzv-endpoint here --local-addr 10.0.0.5", "here:29400", True, "10.0.0.5", None),
        (f"{EMBEDDED} --rdzv-endpoint here", "here:29400", True, "here", None),
        (f"{EMBEDDED} --rdzv-endpoint far:7", "far:7", False, "10.0.0.7", None),
        ("--nnodes 2", "127.0.0.1:29500", True, "127.0.0.1", 0),
        ("--nnodes 2 --master-addr far --master-port 7", "far:7", True, "far", 0),
        ("--nnodes 2 --node-rank 1 --master-addr far --master-port 7", "far:7", False, "10.0.0.7", 1),
        ("--nnodes 3 --node-rank 2 --master-addr [fd00::1]", "[fd00::1]:29500", False, "10.0.0.7", 2),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint far:7 --master-addr other", "far:7", False, "10.0.0.7", 1),
        (
            "--nnodes 2:2 --node-rank 0 --master-addr nowhere --rdzv-conf is_host=no --local-addr b",
            "nowhere:29500",
            False,
            "b",
            0,
        ),
    ],
)
def test_etcd_of_a_node(line: str, endpoint: str, hosts: bool, address: str, place: int | None) -> None:
    """One node runs the etcd at the only endpoint: where the name is its own, where is_host says so, or as rank 0."""
    made = plan(line + " train.py")
    met = cluster(made)
    assert (met.embedded, met.endpoints, met.hosts_etcd) == (True, (endpoint,), hosts)
    assert (made.node.address, met.listen) == (address, address)
    assert (made.node.place, made.node.master_port) == (place, None)
    assert any("survives the loss of any node but that one" in note for note in made.notes)
    assert any("static: nodes meet in an etcd" in note for note in made.notes) == (place is not None)


def test_name_of_a_static_job() -> None:
    """The endpoint tells static jobs apart, so that torchrun's default name will do."""
    made = plan("--nnodes 2 train.py")
    assert (made.job.job_id, origins(made)["rdzv-id"]) == ("none", ("none", "default"))
    assert plan("--nnodes 2 --rdzv-id mine train.py").job.job_id == "mine"


@pytest.mark.parametrize(
    ("line", "environ", "address", "origin", "listen"),
    [
        ("", {}, "10.0.0.7", "default, the way to a", "10.0.0.7"),
        ("", {"POD_IP": "10.1.1.1"}, "10.1.1.1", "variable POD_IP", "10.1.1.1"),
        ("", {"POD_IP": ""}, "10.0.0.7", "default, the way to a", "10.0.0.7"),
        ("--local-addr [fd00::2]", {"POD_IP": "10.1.1.1"}, "fd00::2", "flag --local-addr", "fd00::2"),
        ("", {"PET_LOCAL_ADDR": "b"}, "b", "variable PET_LOCAL_ADDR", "b"),
        ("--listen-address 0.0.0.0", {}, "10.0.0.7", "default, the way to a", "0.0.0.0"),
    ],
)
def test_address(line: str, environ: dict[str, str], address: str, origin: str, listen: str) -> None:
    """The node's address is given, the pod's, or the one by which it reaches the endpoint."""
    made = plan(f"{ETCD} --rdzv-endpoint a {line} train.py", **environ)
    assert (made.node.address, cluster(made).listen) == (address, listen)
    assert origins(made)["local-addr"] == (address, origin)


@pytest.mark.parametrize(
    ("line", "environ", "name", "origin", "guessed"),
    [
        ("--node-id n1", {"POD_NAME": "p"}, "n1", "flag --node-id", False),
        ("", {"ELASTIC_NODE_ID": "n2", "POD_NAME": "p"}, "n2", "variable ELASTIC_NODE_ID", False),
        ("", {"POD_NAME": "p", "SLURMD_NODENAME": "s"}, "p", "variable POD_NAME", False),
        ("", {"POD_NAME": "", "SLURMD_NODENAME": "s"}, "s", "variable SLURMD_NODENAME", False),
    ],
)
def test_node_name(line: str, environ: dict[str, str], name: str, origin: str, guessed: bool) -> None:
    """A node's name is given, or the cluster's; neither is a guess."""
    for several in (f"{ETCD} --rdzv-endpoint a", "--nnodes 2 --node-rank 1"):
        made = plan(f"{several} {line} train.py", **environ)
        assert (made.node.node, cluster(made).node_is_guessed) == (name, guessed)
        assert origins(made)["node-id"] == (name, origin)


@pytest.mark.parametrize(
    ("several", "name", "origin", "guessed"),
    [
        (f"{ETCD} --rdzv-endpoint a", "box", "default, the host's name", True),
        ("--nnodes 2 --node-rank 1", "node-1", "default, the node rank", False),
    ],
)
def test_node_name_left_out(several: str, name: str, origin: str, guessed: bool) -> None:
    """Left out, it is the host's, which is a guess, or that of the node rank, which two nodes can't share."""
    made = plan(f"{several} train.py")
    assert (made.node.node, cluster(made).node_is_guessed) == (name, guessed)
    assert origins(made)["node-id"] == (name, origin)


def test_node_name_on_one_node() -> None:
    """A job on one node does not care what the cluster calls it."""
    assert plan("train.py", POD_NAME="p").node.node == "box"


def test_times_and_leaving() -> None:
    """The settings of a job's changes reach the plan, and are the defaults of the core where they are left out."""
    line = (
        "--quiet-time 1.5 --drain-timeout 0 --hold-timeout 60 --lease-ttl 9 --isolation-timeout 0 --join checkpoint "
        "--checkpoint-wait 0 "
        "--finished-grace 0 --retention 7 --connect-timeout 2.5 --leave-exit-code 0 --leave-signal usr1"
    )
    made = plan(f"{ETCD} --rdzv-endpoint a {line} train.py")
    job, met = made.job, cluster(made)
    assert (job.quiet_s, job.drain_s, job.hold_timeout_s, job.lease_s, job.isolation_s) == (1.5, 0, 60, 9, 0)
    assert (job.join_at_checkpoint, job.save_wait_s) == (True, 0)
    assert (met.finished_grace_s, met.retention_s, met.connect_s) == (0, 7, 2.5)
    assert (made.node.leave_code, made.node.leave_signal) == (0, signal.SIGUSR1)
    plain, core = plan(f"{ETCD} --rdzv-endpoint a train.py"), JobConfig("j", 2, 4, Level.ELASTIC)
    assert plain.job == core
    met, of_core = cluster(plain), ClusterConfig(())
    for name in ("finished_grace_s", "retention_s", "connect_s", "credentials"):
        assert getattr(met, name) == getattr(of_core, name)
    assert (plain.node.leave_code, plain.node.leave_signal, plain.node.place) == (None, None, None)


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("--rdzv-backend embedded --rdzv-endpoint far", 60),
        ("--rdzv-backend c10d --rdzv-endpoint far:29400", 60),
        ("--rdzv-backend embedded --rdzv-endpoint far --connect-timeout 5", 5),
        ("--rdzv-backend embedded --rdzv-endpoint far --rdzv-conf is_host=1", 10),
        ("--rdzv-backend etcd --rdzv-endpoint far", 10),
    ],
)
def test_nodes_wait_longer_for_one_of_their_own(line: str, seconds: float) -> None:
    """The node that runs the job's etcd may be scheduled later than the others; an etcd is there already."""
    assert cluster(plan(f"--nnodes 2 --rdzv-id j {line} train.py")).connect_s == seconds


def test_the_own_address_is_found_by_any_endpoint() -> None:
    """The name of the first may be unknown here, or for the moment."""
    made = plan(f"{ETCD} --rdzv-endpoint nowhere,a train.py")
    assert made.node.address == "10.0.0.7"
    assert origins(made)["local-addr"] == ("10.0.0.7", "default, the way to a")


@pytest.mark.parametrize(
    ("line", "common"),
    [
        (
            "",
            "2:4 1 torch 2 0 none none none 2 30 0 0 none 3 30 immediate 30 none none none 5 600",
        ),
        (
            "--nnodes 2 --nproc-per-node cpu --framework plain --fault-tolerance-level 0",
            "2:2 3 plain 0 0 none none none 2 30 0 0 none 3 30 immediate 30 none none none 5 600",
        ),
        (
            "--quiet-time 3.50 --drain-timeout 1e1 --hold-timeout 60.0 --lease-ttl 07 --isolation-timeout 0.0",
            "2:4 1 torch 2 0 none none none 2 30 0 0 none 3.5 10 immediate 30 60 none none 7 0",
        ),
        (
            "--restart-window 1h --restart-backoff 500ms:1m --on-exit 3=fail --on-exit SIGSEGV=ignore --crash-loop 4",
            "2:4 1 torch 2 0 3600 0.5:60 3=fail,SIGSEGV=ignore 2 30 4 0 none 3 30 immediate 30 none none none 5 600",
        ),
        (
            "--crash-loop 3=exclude-node --exclude-node-after 3 --hang-timeout 10m --start-timeout 1h",
            "2:4 1 torch 2 0 none none none 2 30 3=exclude-node 3 none 3 30 immediate 30 none 600 3600 5 600",
        ),
        (
            "--startup-failures 3 --startup-window 1.50m --max-restarts 9",
            "2:4 1 torch 2 9 none none none 3 90 0 0 none 3 30 immediate 30 none none none 5 600",
        ),
    ],
)
def test_what_nodes_must_agree_on(line: str, common: str) -> None:
    """Settings that must be the same on all nodes have one spelling, however they were written."""
    met = cluster(plan(f"{ETCD} --rdzv-endpoint a {line} train.py"))
    names = (
        "nnodes nproc-per-node framework fault-tolerance-level max-restarts restart-window restart-backoff on-exit "
        "startup-failures startup-window crash-loop exclude-node-after health-check "
        "quiet-time drain-timeout join checkpoint-wait hold-timeout hang-timeout start-timeout lease-ttl isolation-timeout"
    )
    assert met.common == tuple(zip(names.split(), common.split(), strict=True))


@pytest.mark.parametrize("family", ["PET", "ELASTIC"])
@pytest.mark.parametrize(
    "options",
    [
        {"nnodes": "2:4", "rdzv-backend": "etcd", "rdzv-endpoint": "e:2379", "rdzv-id": "j"},
        {"nnodes": "2:4", "rdzv-backend": "c10d", "rdzv-endpoint": "here", "rdzv-id": "j", "rdzv-conf": "timeout=3"},
        {"nnodes": "2", "node-rank": "1", "master-addr": "far", "master-port": "7"},
    ],
)
def test_pods_that_are_configured_by_variables(family: str, options: dict[str, str]) -> None:
    """A command without any flag means what the flags would: only the origins differ."""
    line = " ".join(f"--{name} {value}" for name, value in options.items())
    environ = {f"{family}_{name.upper().replace('-', '_')}": value for name, value in options.items()}
    by_flags, by_variables = plan(f"{line} train.py"), plan("train.py", **environ)
    assert replace(by_variables, sources=(), notes=()) == replace(by_flags, sources=(), notes=())
    assert origins(by_variables)["nnodes"] == (options["nnodes"], f"variable {family}_NNODES")


@pytest.mark.parametrize("name", ["RDZV_ENDPOINT", "RDZV_BACKEND", "RDZV_ID", "NNODES"])
def test_variables_of_equal_standing(name: str) -> None:
    """Two variables of one setting that differ are one line that names both."""
    with pytest.raises(UserError) as caught:
        plan("train.py", **{f"PET_{name}": "1", f"ELASTIC_{name}": "2"})
    assert f"PET_{name}='1'" in str(caught.value)
    assert f"ELASTIC_{name}='2'" in str(caught.value)


V3 = "means etcd's v3 API here: no --enable-v2 is needed"


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        (f"{ETCD} --rdzv-endpoint a", []),
        (f"{ETCD} --rdzv-backend etcd --rdzv-endpoint a", [f"--rdzv-backend etcd {V3}"]),
        (f"{ETCD} --rdzv-backend etcd-v2 --rdzv-endpoint a", [f"--rdzv-backend etcd-v2 {V3}"]),
        (
            f"{ETCD} --rdzv-endpoint a --node-rank 1 --master-port 7",
            ["no effect: --master-port, --node-rank; only --rdzv-backend static without --standalone uses them"],
        ),
        (f"{ETCD} --rdzv-endpoint a --rdzv-conf last_call_timeout=5,is_host=1,protocol=http", []),
        (
            f"{ETCD} --rdzv-endpoint a --rdzv-conf join_timeout=3,last_call_timeout=5,speed=9 --quiet-time 1",
            ["no effect in --rdzv-conf: join_timeout, last_call_timeout", "not used: speed in --rdzv-conf"],
        ),
        (
            f"{C10D} --rdzv-endpoint a --etcd-user ann",
            [
                "the job's etcd runs on a: the job survives the loss of any node but that one",
                "no effect: --etcd-user; the job's own etcd asks for no credentials",
            ],
        ),
        (
            "--nnodes 2 --master-addr a --master-port 7",
            [
                "--rdzv-backend static: nodes meet in an etcd at a:7; each generation gets a fresh master port",
                "the job's etcd runs on a: the job survives the loss of any node but that one",
            ],
        ),
    ],
)
def test_notes_of_several_nodes(line: str, notes: list[str]) -> None:
    """What the rendezvous means differently here, or not at all, is said once."""
    assert list(plan(line + " train.py").notes) == notes


@pytest.mark.parametrize(
    ("line", "quiet", "origin"),
    [
        ("--rdzv-conf last_call_timeout=30", 30, "flag --rdzv-conf"),
        ("--rdzv-conf last_call_timeout=30 --quiet-time 3", 3, "flag --quiet-time"),
        ("--rdzv-conf timeout=30", 3, "default"),
    ],
)
def test_last_call(line: str, quiet: float, origin: str) -> None:
    """torchrun's last_call_timeout is the quiet time, unless that is given itself."""
    made = plan(f"{ETCD} --rdzv-endpoint a {line} train.py")
    assert made.job.quiet_s == quiet
    assert origins(made)["quiet-time"] == (f"{quiet:g}", origin)


MISTAKES: list[tuple[str, dict[str, str], list[str]]] = [
    ("--nnodes 3:1 train.py", {}, ["--nnodes", "expected MIN:MAX", "'3:1'"]),
    ("--nnodes 0 train.py", {}, ["--nnodes", "expected 1 node or more", "'0'"]),
    ("--nnodes x train.py", {}, ["--nnodes", "expected a number of nodes, or MIN:MAX", "'x'"]),
    ("--nnodes 1:2:3 train.py", {}, ["--nnodes", "MIN:MAX", "'1:2:3'"]),
    ("--nnodes= train.py", {}, ["--nnodes", "expected a number", "''"]),
    ("train.py", {"PET_NNODES": "-1"}, ["PET_NNODES", "expected a number of nodes", "'-1'"]),
    ("--nnodes 1:4 train.py", {}, ["--nnodes 1:4", "fixed number", "use --rdzv-backend c10d"]),
    ("--standalone --nnodes 2 train.py", {}, ["--standalone", "contradicts", "--nnodes 2"]),
    ("--rdzv-backend etcd train.py", {}, ["--rdzv-backend etcd", "--rdzv-endpoint HOST:PORT", "embedded"]),
    ("train.py", {"PET_RDZV_BACKEND": "etcd-v2"}, ["PET_RDZV_BACKEND etcd-v2", "--rdzv-endpoint HOST:PORT"]),
    (f"{ETCD} --rdzv-endpoint ftp://a:1 train.py", {}, ["--rdzv-endpoint", "https://HOST:PORT", "'ftp://a:1'"]),
    (f"{ETCD} --rdzv-endpoint a:1,b:x train.py", {}, ["--rdzv-endpoint", "list of HOST:PORT", "'a:1,b:x'"]),
    (f"{ETCD} --rdzv-endpoint a:0 train.py", {}, ["--rdzv-endpoint", "list of HOST:PORT", "'a:0'"]),
    (f"{ETCD} --rdzv-endpoint http://a,https://b train.py", {}, ["--rdzv-endpoint", "not both"]),
    (f"{ETCD} --rdzv-endpoint a --rdzv-conf protocol=ftp train.py", {}, ["--rdzv-conf", "protocol=https"]),
    (f"{ETCD} --rdzv-endpoint nowhere train.py", {}, ["nowhere", "out of reach", "--local-addr"]),
    (f"{ETCD} --rdzv-endpoint a train.py", {"POD_IP": "nowhere"}, ["POD_IP", "resolved", "'nowhere'"]),
    (f"{ETCD} --rdzv-endpoint a train.py", {"POD_NAME": "a/b"}, ["POD_NAME", "without slashes", "'a/b'"]),
    (f"{ETCD} --rdzv-endpoint a --listen-address nowhere train.py", {}, ["--listen-address", "resolved"]),
    (f"{ETCD} --rdzv-endpoint a --etcd-user ann train.py", {}, ["--etcd-user ann", "ELASTIC_ETCD_PASSWORD"]),
    (f"{ETCD} --rdzv-endpoint a --etcd-ca none.pem train.py", {}, ["--etcd-ca", "file", "'none.pem'"]),
    (f"{ETCD} --rdzv-endpoint a --etcd-ca app train.py", {}, ["--etcd-ca", "file", "'app'"]),
    (f"{ETCD} --rdzv-endpoint a --rdzv-conf cacert=none.pem train.py", {}, ["--rdzv-conf", "file", "'none.pem'"]),
    (f"{ETCD} --rdzv-endpoint a --etcd-cert run.sh train.py", {}, ["--etcd-cert run.sh", "--etcd-key is missing"]),
    (f"{ETCD} --rdzv-endpoint a --etcd-key run.sh train.py", {}, ["--etcd-key run.sh", "--etcd-cert is missing"]),
    (f"{ETCD} --rdzv-endpoint http://a --etcd-ca run.sh train.py", {}, ["--etcd-ca run.sh", "contradicts http://"]),
    ("--connect-timeout 0 train.py", {}, ["--connect-timeout", "above 0", "'0'"]),
    (f"{ETCD} --rdzv-endpoint a --retention 5 train.py", {}, ["--retention", "10 seconds or more", "--finished-grace"]),
    ("--finished-grace x train.py", {}, ["--finished-grace", "seconds", "'x'"]),
    ("--rdzv-backend etcd --rdzv-endpoint a train.py", {}, ["--rdzv-id NAME is missing", "the same one on all"]),
    ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a train.py", {}, ["--rdzv-id NAME is missing"]),
    (f"{C10D} train.py", {}, ["--rdzv-backend c10d", "--rdzv-endpoint HOST:PORT"]),
    (f"{C10D} --rdzv-endpoint localhost:0 train.py", {}, ["--rdzv-endpoint localhost:0", "can't find port 0"]),
    (f"{C10D} --rdzv-endpoint a:1,b:1 train.py", {}, ["--rdzv-endpoint", "expected HOST:PORT", "'a:1,b:1'"]),
    (f"{C10D} --rdzv-endpoint nowhere train.py", {}, ["nowhere", "out of reach", "--local-addr"]),
    (f"{C10D} --rdzv-endpoint a --rdzv-conf is_host=maybe train.py", {}, ["--rdzv-conf", "is_host=true"]),
    ("--nnodes 2 --node-rank 2 train.py", {}, ["--node-rank", "from 0 to 1", "'2'"]),
    ("--nnodes 2 --master-port 0 train.py", {}, ["--master-port 0", "can't find port 0"]),
    ("--nnodes 2 --rdzv-endpoint a:0 train.py", {}, ["--rdzv-endpoint a:0", "can't find port 0"]),
    ("--quiet-time -1 train.py", {}, ["--quiet-time", "0 or more", "'-1'"]),
    ("--drain-timeout x train.py", {}, ["--drain-timeout", "seconds", "'x'"]),
    ("--checkpoint-wait x train.py", {}, ["--checkpoint-wait", "seconds", "'x'"]),
    ("--join later train.py", {}, ["--join", "immediate or checkpoint", "'later'"]),
    ("--hold-timeout 0 train.py", {}, ["--hold-timeout", "above 0", "'0'"]),
    ("--lease-ttl 1 train.py", {}, ["--lease-ttl", "whole number of 2 or more", "'1'"]),
    ("--lease-ttl 2.5 train.py", {}, ["--lease-ttl", "whole number", "'2.5'"]),
    ("--isolation-timeout inf train.py", {}, ["--isolation-timeout", "seconds", "'inf'"]),
    ("--leave-exit-code 256 train.py", {}, ["--leave-exit-code", "from 0 to 255", "'256'"]),
    ("--leave-signal USR3 train.py", {}, ["--leave-signal", "SIGUSR1", "'USR3'"]),
    ("--leave-signal KILL train.py", {}, ["--leave-signal", "SIGKILL can't be"]),
    ("--rdzv-conf last_call_timeout=soon train.py", {}, ["--rdzv-conf", "seconds", "'soon'"]),
    ("--rdzv-backend zk train.py", {}, ["--rdzv-backend", "expected one of static, c10d, etcd", "'zk'"]),
    ("--rdzv-conf a train.py", {}, ["--rdzv-conf", "expected", "key=value", "'a'"]),
    ("--rdzv-conf a=1,=2 train.py", {}, ["--rdzv-conf", "key=value"]),
    ("--rdzv-endpoint host:x train.py", {}, ["--rdzv-endpoint", "expected HOST:PORT", "'host:x'"]),
    ("--rdzv-endpoint host:99999 train.py", {}, ["--rdzv-endpoint", "expected HOST:PORT"]),
    ("--node-rank 1 train.py", {}, ["--node-rank", "expected 0", "'1'"]),
    ("--node-rank x train.py", {}, ["--node-rank", "expected a whole number", "'x'"]),
    ("--master-port 99999 train.py", {}, ["--master-port", "from 0 to 65535", "'99999'"]),
    ("--master-addr nowhere train.py", {}, ["--master-addr", "resolved", "'nowhere'"]),
    ("--local-addr nowhere train.py", {}, ["--local-addr", "resolved", "'nowhere'"]),
    ("--nproc-per-node 0 train.py", {}, ["--nproc-per-node", "expected a number of 1 or more", "'0'"]),
    ("--nproc-per-node many train.py", {}, ["--nproc-per-node", "auto, cpu, gpu or xpu", "'many'"]),
    ("--nproc-per-node -1 train.py", {}, ["--nproc-per-node", "1 or more", "'-1'"]),
    ("--nproc-per-node gpu train.py", {}, ["--nproc-per-node gpu", "no GPU", "give a number"]),
    ("--nproc-per-node gpu train.py", {"CUDA_VISIBLE_DEVICES": "-1"}, ["no GPU", "CUDA_VISIBLE_DEVICES='-1'"]),
    ("--nproc-per-node xpu train.py", {}, ["--nproc-per-node xpu", "no XPU"]),
    ("--framework jax train.py", {}, ["unknown framework 'jax'", "torch, paddle, plain"]),
    ("--framework= train.py", {}, ["unknown framework ''", "torch, paddle, plain"]),
    (
        "train.py",
        {"PET_NNODES": "1", "PADDLE_NNODES": "2"},
        ["PET_NNODES='1'", "PADDLE_NNODES='2'", "--framework torch"],
    ),
    ("--framework paddle train.py", {}, ["paddle", "not installed", "pip install 'elastic-adapter[paddle]'"]),
    ("--max-restarts x train.py", {}, ["--max-restarts", "expected a whole number of 0 or more", "'x'"]),
    ("--max-restarts -1 train.py", {}, ["--max-restarts", "0 or more", "'-1'"]),
    ("--fault-tolerance-level 3 train.py", {}, ["--fault-tolerance-level", "expected 0 (off)", "'3'"]),
    (
        "--fault-tolerance-level 0 train.py",
        {"PET_MAX_RESTARTS": "3"},
        ["PET_MAX_RESTARTS 3", "contradicts --fault-tolerance-level", "level is 0"],
    ),
    ("--start-method fork train.py", {}, ["--start-method fork", "torch inside the launcher"]),
    ("--start-method x train.py", {}, ["--start-method", "expected spawn", "'x'"]),
    ("--logs-specs mine train.py", {}, ["--logs-specs mine", "torch inside the launcher", "--log-dir"]),
    ("--event-log-handler mine train.py", {}, ["--event-log-handler mine", "torch inside the launcher"]),
    ("--monitor-interval x train.py", {}, ["--monitor-interval", "seconds", "'x'"]),
    ("--shutdown-timeout x train.py", {}, ["--shutdown-timeout", "seconds of 0 or more", "'x'"]),
    ("--shutdown-timeout nan train.py", {}, ["--shutdown-timeout", "seconds", "'nan'"]),
    ("train.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "-1"}, ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0 or more", "'-1'"]),
    ("--signals-to-handle FOO train.py", {}, ["--signals-to-handle", "expected names of signals", "'FOO'"]),
    ("--signals-to-handle KILL train.py", {}, ["--signals-to-handle", "SIGKILL can't be"]),
    ("--signals-to-handle= train.py", {}, ["--signals-to-handle", "at least one signal"]),
    ("-r 4 train.py", {}, ["--redirects", "expected 0 to 3", "'4'"]),
    ("-t 0:5 train.py", {}, ["--tee", "0:1,1:3", "'0:5'"]),
    ("--local-ranks-filter a train.py", {}, ["--local-ranks-filter", "expected a list", "'a'"]),
    ("--log-dir train.py train.py", {}, ["--log-dir", "expected a folder", "'train.py'"]),
    ("--log-dir train.py/logs train.py", {}, ["--log-dir", "expected a folder", "is not one"]),
    ("--numa-binding near train.py", {}, ["--numa-binding", "node, socket, exclusive, core-complex", "'near'"]),
    ("--numa-binding node train.py", {}, ["--numa-binding node", "no NVIDIA GPU"]),
    ("--virtual-local-rank --framework plain train.py", {}, ["--virtual-local-rank", "--framework torch", "plain"]),
    (
        "--virtual-local-rank --nproc-per-node 2 train.py",
        {"CUDA_VISIBLE_DEVICES": "3"},
        ["--virtual-local-rank", "2 workers", "CUDA_VISIBLE_DEVICES='3'"],
    ),
    ("--use-env --pass-local-rank train.py", {}, ["--pass-local-rank", "contradicts", "--use-env"]),
    ("--no-python --pass-local-rank ./run.sh", {}, ["--pass-local-rank", "Python scripts", "./run.sh"]),
    ("--preload a-b train.py", {}, ["--preload", "expected names of modules", "'a-b'"]),
    ("--job-id a/b train.py", {}, ["--rdzv-id", "without slashes", "'a/b'"]),
    ("--node-id= train.py", {}, ["--node-id", "expected a name", "''"]),
    ("train.py", {"LOGLEVEL": "loud"}, ["LOGLEVEL", "expected one of DEBUG", "'loud'"]),
    ("train.py", {"PYTHON_EXEC": "/no/python"}, ["PYTHON_EXEC", "Python interpreter", "'/no/python'"]),
    ("", {}, ["no script is given", "elastic-launch [options] script"]),
    ("missing.py", {}, ["script not found", "/missing.py"]),
    ("--standalone 1 train.py", {}, ["script not found", "/1", "option"]),
    ("empty", {}, ["/empty", "folder", "__main__.py"]),
    ("-m --no-python package", {}, ["--module", "contradicts", "--no-python"]),
    ("-m nothere.train", {}, ["module 'nothere.train' not found", "Python's path"]),
    ("-m train.py", {}, ["-m expects a module", "'train.py'", "-m train"]),
    ("--framework plain ./missing", {}, ["program not found", "/missing"]),
    ("--framework plain missing", {}, ["program not found", "'missing'", "PATH"]),
    ("--framework plain ./empty", {}, ["./empty", "folder"]),
    ("--framework plain ./text.sh", {}, ["./text.sh", "not executable", "chmod +x", "sh ./text.sh"]),
    ("--no-python ./text.sh", {}, ["not executable", "chmod +x"]),
    ("--no-python ./missing", {}, ["program not found"]),
]


@pytest.mark.parametrize(("line", "environ", "parts"), MISTAKES)
def test_mistakes(line: str, environ: dict[str, str], parts: list[str]) -> None:
    """Each mistake is one line that says what is wrong, what was expected and what was given."""
    with pytest.raises(UserError) as caught:
        plan(line, **environ)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("machine", "words"), [(BOTH, "torch and paddle are installed"), (NONE, "no framework is installed")]
)
def test_framework_can_not_be_told(machine: Machine, words: str) -> None:
    """Where neither a word nor a variable tells, and not exactly one is installed, the line says what to add."""
    with pytest.raises(UserError) as caught:
        plan("train.py", machine)
    assert words in str(caught.value)
    assert "--framework torch, --framework paddle or --framework plain" in str(caught.value)


def test_options_reach_the_adapter() -> None:
    """The signals' names, the virtual local rank and the GPUs are told to the adapter."""
    adapter = plan("--virtual-local-rank --signals-to-handle TERM train.py", GPUS).adapter
    assert adapter.slot_env(1, 2, {})["CUDA_VISIBLE_DEVICES"] == "1"
    assert adapter == replace(adapter, signals=("SIGTERM",), virtual_local_rank=True)  # type: ignore[type-var]
    paddle = plan(
        "--framework paddle --nproc-per-node 2 train.py", replace(GPUS, installed=lambda module: True)
    ).adapter
    assert paddle.slot_env(1, 2, {"OMP_NUM_THREADS": "2"}) == {"FLAGS_selected_gpus": "1"}
