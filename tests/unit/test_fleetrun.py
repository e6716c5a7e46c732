"""What the words of Paddle's launchers mean, and the line that each mistake in them gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic_adapter.adapters.paddlepaddle.launch import create
from elastic_adapter.adapters.registry import Options
from elastic_adapter.core.config import ClusterConfig
from elastic_adapter.core.errors import UserError
from elastic_adapter.core.model import Assignment, Endpoint, Peer, Seat
from elastic_adapter.launchers.command_line import parse
from elastic_adapter.launchers.devices import Gpu, Machine
from elastic_adapter.launchers.fleetrun import WORKER_VARIABLES, Translated, translate
from elastic_adapter.launchers.plan import LaunchPlan
from elastic_adapter.launchers.resolve import resolve
from elastic_adapter.launchers.settings import SETTINGS, read

MACHINE = Machine(
    gpus=lambda: (),
    amd_gpus=lambda: 0,
    xpus=lambda python: 0,
    cpus=lambda: frozenset({0, 1, 2}),
    installed=lambda module: True,
    resolvable=lambda host: host != "nowhere",
    local=lambda host: host in ("here", "too"),
    address_towards=lambda host, port: "10.0.0.7",
    roots=lambda: None,
    new_id=lambda: "random-id",
    host_name="box",
    python="/usr/bin/python3",
)
GPUS = replace(MACHINE, gpus=lambda: tuple(Gpu(f"0000:0{n}:00.0", f"GPU-{n}") for n in range(4)))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(line: str, machine: Machine = MACHINE, framework: str = "--framework paddle", **environ: str) -> LaunchPlan:
    command = parse(f"{framework} {line} train.py".split())
    environ = {"PATH": "/usr/bin:/bin", **environ}
    return resolve(read(command.options, environ), command.words, environ, machine)


def told(line: str, machine: Machine = MACHINE, **environ: str) -> Translated:
    return translate(read(parse(line.split()).options, environ), environ, machine)


def origins(made: LaunchPlan) -> dict[str, tuple[str, str]]:
    return {source.name: (source.value, source.origin) for source in made.sources}


def cluster(made: LaunchPlan) -> ClusterConfig:
    assert made.cluster is not None
    return made.cluster


@pytest.mark.parametrize(
    ("line", "environ", "name", "text", "origin"),
    [
        ("--nnodes 1", {}, "nnodes", "1", "flag --nnodes"),
        ("", {"PADDLE_NNODES": "1:1"}, "nnodes", "1:1", "variable PADDLE_NNODES"),
        ("--np 1", {}, "nnodes", "1", "flag --np"),
        ("", {"PADDLE_ELASTIC_NP": "1"}, "nnodes", "1", "variable PADDLE_ELASTIC_NP"),
        ("--nproc_per_node 2", {}, "nproc-per-node", "2", "flag --nproc-per-node"),
        ("", {"PADDLE_NPROC_PER_NODE": "2"}, "nproc-per-node", "2", "variable PADDLE_NPROC_PER_NODE"),
        ("--job_id j", {}, "rdzv-id", "j", "flag --rdzv-id"),
        ("", {"PADDLE_JOB_ID": "j"}, "rdzv-id", "j", "variable PADDLE_JOB_ID"),
        ("", {"PADDLE_ELASTIC_JOB_ID": "j"}, "rdzv-id", "j", "variable PADDLE_ELASTIC_JOB_ID"),
        ("--max_restart 5", {}, "max-restarts", "5", "flag --max_restart"),
        ("", {"PADDLE_MAX_RESTART": "5"}, "max-restarts", "5", "variable PADDLE_MAX_RESTART"),
        ("", {}, "max-restarts", "3", "default"),
        ("--elastic_timeout 30", {}, "quiet-time", "30", "flag --elastic_timeout"),
        ("", {"PADDLE_ELASTIC_TIMEOUT": "30"}, "quiet-time", "30", "variable PADDLE_ELASTIC_TIMEOUT"),
        ("", {"PADDLE_ELASTIC_TTL": "60"}, "lease-ttl", "60", "variable PADDLE_ELASTIC_TTL"),
        ("--log_dir logs", {}, "log-dir", "logs", "flag --log-dir"),
        ("", {"PADDLE_LOG_DIR": "logs"}, "log-dir", "logs", "variable PADDLE_LOG_DIR"),
        ("--log_level DEBUG", {}, "log-level", "DEBUG", "flag --log_level"),
        ("", {"PADDLE_LOG_LEVEL": "DEBUG"}, "log-level", "DEBUG", "variable PADDLE_LOG_LEVEL"),
        ("", {"PADDLE_LOG_LEVEL": "DEBUG", "LOGLEVEL": "INFO"}, "log-level", "DEBUG", "variable PADDLE_LOG_LEVEL"),
        ("--log_level DEBUG", {"LOGLEVEL": "INFO"}, "log-level", "DEBUG", "flag --log_level"),
        ("--host h", {}, "local-addr", "h", "flag --host"),
        ("--run_mode collective", {"TRAINING_ROLE": "TRAINER"}, "nnodes", "1:1", "default"),
        ("--log_dir d --log_overwrite True", {}, "log_overwrite", "True", "flag --log_overwrite"),
        ("--max_restart 2", {"ELASTIC_MAX_RESTARTS": "7"}, "max-restarts", "2", "flag --max_restart"),
        ("", {"ELASTIC_NNODES": "1", "PADDLE_NNODES": "1:1"}, "nnodes", "1:1", "variable PADDLE_NNODES"),
        ("", {"PADDLE_NNODES": ""}, "nnodes", "1:1", "default"),
    ],
)
def test_words(line: str, environ: dict[str, str], name: str, text: str, origin: str) -> None:
    """Each of Paddle's words becomes the setting of ours that it stands for, and is named as what the user wrote."""
    assert origins(plan(line, **environ))[name] == (text, origin)


@pytest.mark.parametrize(
    ("line", "environ", "name", "text", "parts"),
    [
        ("--nnodes 2", {"PADDLE_NNODES": "1"}, "nnodes", "1", ["PADDLE_NNODES='1' wins over --nnodes 2"]),
        (
            "--max_restart 2",
            {"PADDLE_MAX_RESTART": "5"},
            "max-restarts",
            "5",
            ["PADDLE_MAX_RESTART='5'", "--max_restart 2"],
        ),
        ("--max-restarts 2", {"PADDLE_MAX_RESTART": "5"}, "max-restarts", "5", ["wins over --max-restarts 2"]),
        ("--host a", {"POD_IP": "b"}, "local-addr", "b", ["POD_IP='b' wins over --host a"]),
        ("--np 2", {"PADDLE_NNODES": "1"}, "nnodes", "1", ["PADDLE_NNODES='1' wins over --np 2"]),
        ("--nnodes 1:1", {"PADDLE_NNODES": "1"}, "nnodes", "1", []),
        ("--max_restart 5", {"PADDLE_MAX_RESTART": "5"}, "max-restarts", "5", []),
    ],
)
def test_variables_win(line: str, environ: dict[str, str], name: str, text: str, parts: list[str]) -> None:
    """As in Paddle its variables win over the flags, and where that changes something a note says so."""
    made = plan(line, **environ)
    assert origins(made)[name][0] == text
    assert [note for note in made.notes if "wins over" in note] == list(made.notes)
    assert len(made.notes) == (1 if parts else 0)
    assert all(part in made.notes[0] for part in parts)


def test_own_flag_wins_over_own_variable() -> None:
    """What holds for our names is not changed by the framework."""
    assert plan("--max-restarts 2", ELASTIC_MAX_RESTARTS="5").job.policy.max_restarts == 2
    made = plan("--master etcd://e --nnodes 2 --local-addr a", POD_IP="b")
    assert origins(made)["local-addr"] == ("a", "flag --local-addr")


@pytest.mark.parametrize(
    ("line", "environ", "endpoints", "named_by"),
    [
        ("--nnodes 2:4 --master etcd://e:1", {}, ("e:1",), "--master"),
        ("--nnodes 2:4 --master etcd://e:1,f:2/", {}, ("e:1", "f:2"), "--master"),
        ("--nnodes 2:4 --master etcd://e,etcd://[fd00::1]:2", {}, ("e:2379", "[fd00::1]:2"), "--master"),
        ("--nnodes 2:4", {"PADDLE_MASTER": "etcd://e:1"}, ("e:1",), "PADDLE_MASTER"),
        ("--np 2:4 --elastic_server e:1", {}, ("e:1",), "--elastic_server"),
        ("", {"PADDLE_ELASTIC_SERVER": "e:1", "PADDLE_ELASTIC_NP": "2:4"}, ("e:1",), "PADDLE_ELASTIC_SERVER"),
        (
            "--np 2:4",
            {"PADDLE_ELASTIC_ETCD_SERVICE_HOST": "e", "PADDLE_ELASTIC_ETCD_SERVICE_PORT": "1"},
            ("e:1",),
            "PADDLE_ELASTIC_ETCD_SERVICE_HOST",
        ),
        (
            "--np 2:4 --elastic_server f:1",
            {"PADDLE_ELASTIC_ETCD_SERVICE_HOST": "e", "PADDLE_ELASTIC_ETCD_SERVICE_PORT": "1"},
            ("f:1",),
            "--elastic_server",
        ),
        ("--np 2:4 --master etcd://e:1 --elastic_server e:1", {}, ("e:1",), "--master"),
        ("--np 2:4 --master etcd://f:1", {"PADDLE_ELASTIC_SERVER": "e:1"}, ("e:1",), "PADDLE_ELASTIC_SERVER"),
        (
            "--np 2:4 --rdzv-backend etcd --rdzv-endpoint e:1",
            {"PADDLE_MASTER": "etcd://e:1"},
            ("e:1",),
            "PADDLE_MASTER",
        ),
        ("--np 2:4 --rdzv-backend etcd --master etcd://e:1", {}, ("e:1",), "--master"),
        ("--np 2:4 --rdzv-endpoint e:1 --elastic_server e:1", {}, ("e:1",), "--elastic_server"),
        ("--np 2:4 --rdzv-backend etcd --rdzv-endpoint e:1", {"PADDLE_TRAINERS": "a,b"}, ("e:1",), "--rdzv-endpoint"),
    ],
)
def test_etcd(line: str, environ: dict[str, str], endpoints: tuple[str, ...], named_by: str) -> None:
    """All ways to name an etcd lead to it, and the job is called "default" where it has no name."""
    made = plan(line, **environ)
    assert (cluster(made).endpoints, cluster(made).named_by, cluster(made).embedded) == (endpoints, named_by, False)
    assert (made.job.min_nodes, made.job.max_nodes, made.job.job_id) == (2, 4, "default")
    assert made.node.place is None


def test_etcd_on_one_node() -> None:
    """An etcd that is named is used even by one node: a spare one may join."""
    made = plan("--master etcd://e:1")
    assert (cluster(made).endpoints, made.job.job_id, made.job.max_nodes) == (("e:1",), "default", 1)
    assert plan("", PADDLE_ELASTIC_ETCD_SERVICE_HOST="e", PADDLE_ELASTIC_ETCD_SERVICE_PORT="1").cluster is None


@pytest.mark.parametrize(
    ("line", "environ", "endpoint", "hosts", "place"),
    [
        ("--nnodes 2 --master far:7 --rank 0", {}, "far:7", True, 0),
        ("--nnodes 2 --master far:7 --rank 1", {}, "far:7", False, 1),
        ("--nnodes 2:2 --master http://far:7 --rank 1", {}, "far:7", False, 1),
        ("--nnodes 2 --master [fd00::1]:7 --rank 1", {}, "[fd00::1]:7", False, 1),
        ("--nnodes 2 --master far:7", {"PADDLE_RANK": "1"}, "far:7", False, 1),
        ("--nnodes 2 --master far:7", {"PADDLE_TRAINER_ID": "1"}, "far:7", False, 1),
        ("--nnodes 2 --master far:7 --node-rank 1", {}, "far:7", False, 1),
        ("--nnodes 2", {"PADDLE_MASTER": "far:7", "PADDLE_RANK": "1"}, "far:7", False, 1),
        ("--nnodes 2 --master here:7", {}, "here:7", True, None),
        ("--nnodes 2 --master far:7", {}, "far:7", False, None),
        ("--nnodes 2 --master far:7 --rank -1", {}, "far:7", False, None),
        ("--nnodes 2:4 --master here:7", {}, "here:7", True, None),
        ("--nnodes 2:4 --master far:7 --rank 1", {}, "far:7", False, None),
    ],
)
def test_master(line: str, environ: dict[str, str], endpoint: str, hosts: bool, place: int | None) -> None:
    """A master is one of the nodes: with ranks the first one runs the etcd, without them the one of that address."""
    made = plan(line, **environ)
    assert (cluster(made).endpoints, cluster(made).hosts_etcd) == ((endpoint,), hosts)
    assert (cluster(made).embedded, made.node.place, made.job.job_id) == (True, place, "default")
    assert any("--rank" in note for note in made.notes) == ("2:4" in line and "--rank 1" in line)


@pytest.mark.parametrize(
    ("line", "environ", "endpoint", "place", "address"),
    [
        ("--ips here,far", {}, "here:6070", 0, "here"),
        ("--ips far,here,b --start_port 7", {}, "far:7", 1, "here"),
        ("--ips far,here --nnodes 2", {}, "far:6070", 1, "here"),
        ("", {"PADDLE_IPS": "far, here", "PADDLE_START_PORT": "7"}, "far:7", 1, "here"),
        ("--ips far,b --rank 1", {}, "far:6070", 1, "b"),
        ("--ips far,b", {"POD_IP": "b"}, "far:6070", 1, "b"),
        ("--ips far,b --host b", {}, "far:6070", 1, "b"),
        ("--ips here,too --host too", {}, "here:6070", 1, "too"),
    ],
)
def test_ips(line: str, environ: dict[str, str], endpoint: str, place: int, address: str) -> None:
    """A list of addresses is a static launch: they meet at the first one, and the place in the list is the rank."""
    made = plan(line, **environ)
    assert (cluster(made).endpoints, made.node.place, made.node.address) == ((endpoint,), place, address)
    assert made.job.min_nodes == made.job.max_nodes == len((environ.get("PADDLE_IPS") or line.split()[1]).split(","))


CLOUD = {"PADDLE_TRAINERS": "10.0.0.1,10.0.0.2", "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "1"}


@pytest.mark.parametrize(
    ("environ", "endpoint", "place", "slots"),
    [
        (CLOUD, "10.0.0.1:6170", 1, 1),
        ({**CLOUD, "PADDLE_PORT": "7", "TRAINER_PORTS_NUM": "2"}, "10.0.0.1:7", 1, 2),
        ({**CLOUD, "FLAGS_START_PORT": "8", "TRAINER_PORTS_NUM": "2", "PADDLE_TRAINERS_NUM": "4"}, "10.0.0.1:8", 1, 2),
        ({**CLOUD, "PADDLE_PORT": "7", "FLAGS_START_PORT": "8", "PADDLE_TRAINER_ID": "0"}, "10.0.0.1:7", 0, 1),
        ({**CLOUD, "TRAINER_PORTS_NUM": "2", "PADDLE_NPROC_PER_NODE": "3"}, "10.0.0.1:6170", 1, 3),
        ({**CLOUD, "PADDLE_MASTER": "far:7"}, "far:7", 1, 1),
    ],
)
def test_cloud(environ: dict[str, str], endpoint: str, place: int, slots: int) -> None:
    """A pod without an etcd is part of a static launch, and its variables alone tell that it is Paddle's."""
    made = plan("", framework="", POD_IP="10.0.0.2", **environ)
    assert (cluster(made).endpoints, made.node.place, made.node.slots) == ((endpoint,), place, slots)
    assert (made.job.min_nodes, made.job.max_nodes, made.node.address) == (
        2,
        2,
        "10.0.0.2" if place else made.node.address,
    )
    assert made.adapter.name == "paddle"


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        ({"PADDLE_ELASTIC_SERVER": "e:1"}, (2, 2)),
        ({"PADDLE_ELASTIC_ETCD_SERVICE_HOST": "e", "PADDLE_ELASTIC_ETCD_SERVICE_PORT": "1"}, (2, 2)),
        ({"PADDLE_ELASTIC_SERVER": "e:1", "PADDLE_ELASTIC_NP": "2:4"}, (2, 4)),
    ],
)
def test_cloud_with_etcd(environ: dict[str, str], nodes: tuple[int, int]) -> None:
    """The etcd wins over the list of a pod's trainers, which only counts the nodes where nothing else does."""
    made = plan("", **CLOUD, **environ)
    assert (cluster(made).endpoints, cluster(made).embedded, made.node.place) == (("e:1",), False, None)
    assert (made.job.min_nodes, made.job.max_nodes) == nodes
    assert (made.node.address, made.notes) == ("10.0.0.7", ())


@pytest.mark.parametrize(
    ("line", "environ", "level"),
    [
        ("", {"PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "0"}, 0),
        ("", {"PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "1"}, 1),
        ("", {"PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "2"}, 2),
        ("", {"PADDLE_ELASTIC_FAULT_TOLERANCE_LEVEL": "2"}, 2),
        ("--elastic_level -1", {}, 0),
        ("--elastic_level 0", {}, 1),
        ("--elastic_level 1", {}, 1),
        ("--elastic_level -1 --master etcd://e --nnodes 2:4", {}, 0),
        ("--elastic_level 0 --master etcd://e --nnodes 2:4", {}, 1),
        ("--elastic_level 1 --master etcd://e --nnodes 2:4", {}, 2),
        ("--master etcd://e --nnodes 2:4", {"PADDLE_ELASTIC_LEVEL": "0"}, 1),
        ("--master etcd://e --nnodes 2:4", {}, 2),
        ("", {}, 1),
        ("", {"PADDLE_ELASTIC_LEVEL": "1", "ELASTIC_FAULT_TOLERANCE_LEVEL": "1"}, 1),
    ],
)
def test_level(line: str, environ: dict[str, str], level: int) -> None:
    """Both of Paddle's scales are translated; where neither is given the level is our default."""
    job = plan(line, **environ).job
    assert (job.level, job.policy.max_restarts) == (level, 3 if level else 0)


@pytest.mark.parametrize(
    ("line", "environ", "where"),
    [
        ("--elastic_level -1 --max_restart 3", {}, "--max_restart"),
        ("--elastic_level -1", {"PADDLE_MAX_RESTART": "3"}, "PADDLE_MAX_RESTART"),
        ("--fault-tolerance-level 0 --max_restart 3", {}, "--max_restart"),
    ],
)
def test_budget_without_effect(line: str, environ: dict[str, str], where: str) -> None:
    """In Paddle's words a budget beside level 0 is no mistake: it is told that it has no effect."""
    made = plan(line, **environ)
    assert (made.job.level, made.job.policy.max_restarts) == (0, 0)
    (note,) = made.notes
    assert note.startswith(f"{where} has no effect")


@pytest.mark.parametrize(
    ("line", "environ", "machine", "chosen", "slots"),
    [
        ("--devices 0,1", {}, GPUS, (("0", "1"), "gpu"), 2),
        ("--gpus 3", {}, GPUS, (("3",), "gpu"), 1),
        ("--gpus 0,1,2 --nproc_per_node 2", {}, GPUS, (("0", "1", "2"), "gpu"), 2),
        ("--gpus 0,1 --nproc_per_node 1", {}, GPUS, (("0", "1"), "gpu"), 1),
        ("--devices 5", {"CUDA_VISIBLE_DEVICES": "4,5"}, MACHINE, (("1",), "gpu"), 1),
        ("", {"PADDLE_DEVICES": "5,4", "CUDA_VISIBLE_DEVICES": "4,5"}, MACHINE, (("1", "0"), "gpu"), 2),
        ("--npus 0,1", {}, MACHINE, (("0", "1"), "npu"), 2),
        ("--xpus 2", {"XPU_VISIBLE_DEVICES": "1,2"}, MACHINE, (("1",), "xpu"), 1),
        ("--devices 2", {"XPULINK_VISIBLE_DEVICES": "1,2"}, MACHINE, (("1",), "xpu"), 1),
        ("--npus 1", {"PADDLE_DEVICES": "1"}, MACHINE, (("1",), "npu"), 1),
        ("--devices 1", {"TRAINER_PORTS_NUM": "4"}, GPUS, (("1",), "gpu"), 1),
        ("", {}, GPUS, ((), "gpu"), 4),
        ("", {"CUDA_VISIBLE_DEVICES": "1,3"}, GPUS, ((), "gpu"), 2),
        ("", {"TRAINER_PORTS_NUM": "3"}, GPUS, ((), "gpu"), 3),
        ("", {}, MACHINE, ((), "gpu"), 1),
    ],
)
def test_devices(line: str, environ: dict[str, str], machine: Machine, chosen: object, slots: int) -> None:
    """Devices are named as the visible ones are, passed on by their place among them, and have a worker each."""
    said = told(line, machine, **environ)
    assert (said.devices, said.device_kind) == chosen
    assert plan(line, machine, **environ).node.slots == slots


def test_options_reach_the_adapter() -> None:
    """The chosen devices, their kind and the folder are told to the adapter."""
    made = plan("--xpus 1,2 --log_dir logs", XPU_VISIBLE_DEVICES="0,1,2")
    assert made.adapter == create(
        Options(
            signals=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"), devices=("1", "2"), device_kind="xpu", log_dir="logs"
        )
    )
    assert made.adapter != create(Options())


@pytest.mark.parametrize(
    ("line", "environ", "log_dir", "worker_logs", "overwrite"),
    [
        ("", {}, None, False, False),
        ("--log_dir logs", {}, "logs", True, False),
        ("--log_dir logs --log_overwrite true", {}, "logs", True, True),
        ("--log_dir logs --log_overwrite 0", {}, "logs", True, False),
        ("", {"PADDLE_LOG_DIR": "logs", "PADDLE_LOG_OVERWRITE": "1"}, "logs", True, True),
        ("", {"ELASTIC_LOG_DIR": "logs"}, "logs", True, False),
        ("--log_dir /dev/null", {}, None, False, False),
    ],
)
def test_logs(line: str, environ: dict[str, str], log_dir: str | None, worker_logs: bool, overwrite: bool) -> None:
    """A folder for logs holds Paddle's files; without one nothing is written."""
    output = plan(line, **environ).node.output
    assert (output.log_dir, output.worker_logs, output.overwrite) == (log_dir, worker_logs, overwrite)
    assert output.to_file == ((3,) if log_dir else (0,))
    assert output.to_console == (3,)


def test_logs_of_other_frameworks() -> None:
    """Paddle's files and variables are Paddle's only."""
    output = plan("--log-dir logs -r 3", framework="--framework torch", PADDLE_LOG_DIR="other").node.output
    assert (output.log_dir, output.worker_logs, output.to_console) == ("logs", False, (0,))
    assert plan("--log_dir logs -r 3").node.output.to_console == (0,)


def test_exit_codes_that_ask_for_a_restart() -> None:
    """The framework's own codes are part of the policy."""
    assert plan("").job.policy.free_codes == (101, 102)
    assert plan("", framework="--framework torch").job.policy.free_codes == ()


@pytest.mark.parametrize(
    ("line", "environ", "note"),
    [
        ("--sort_ip True", {}, "no effect: --sort_ip"),
        ("--legacy 0 --enable_gpu_log 1", {}, "no effect: --legacy, --enable_gpu_log"),
        ("--auto_cluster_config 1", {}, "no effect: --auto_cluster_config"),
        ("--scale 1 --force true", {}, "no effect: --scale, --force"),
        ("", {"PADDLE_ELASTIC_SCALE": "1"}, "no effect: PADDLE_ELASTIC_SCALE"),
        ("--start_port 7", {}, "no effect: --start_port"),
        ("--log_overwrite 1", {}, "no effect: --log_overwrite"),
        ("--rank 1", {}, "no effect: --rank"),
        ("--master etcd://e --nnodes 2 --ips a,b --start_port 7", {}, "no effect: --start_port, --ips"),
        ("--master far:7", {}, "--master has no effect on one node: --nnodes says how many there are"),
        ("--nnodes 1", {"PADDLE_MASTER": "far:7"}, "PADDLE_MASTER has no effect on one node: --nnodes says how many"),
        ("--standalone --master etcd://e", {}, "--master has no effect on one node: --nnodes says how many"),
        ("--elastic_timeout 30", {}, "--elastic_timeout is how long to wait for further nodes at the start"),
    ],
)
def test_notes(line: str, environ: dict[str, str], note: str) -> None:
    """What has no effect, or another one than in Paddle, is said once."""
    (said,) = plan(line, **environ).notes
    assert said == note if note.startswith("no effect") else said.startswith(note)


@pytest.mark.parametrize(
    "environ", [{}, {"PADDLE_NNODES": "1"}, {"PADDLE_TRAINER_ID": "0"}, {"PADDLE_RUN_MODE": "collective"}]
)
def test_no_notes(environ: dict[str, str]) -> None:
    """Nothing is said about what works as in Paddle."""
    assert plan("", **environ).notes == ()


@pytest.mark.parametrize("name", ["PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID", "TRAINER_PORTS_NUM", "PADDLE_JOB_ID"])
def test_variables_choose_the_framework(name: str) -> None:
    """One variable of Paddle's launchers or of its cloud tells that Paddle is meant."""
    made = plan("", framework="", **{name: "1"})
    assert origins(made)["framework"] == ("paddle", f"variable {name}")


@pytest.mark.parametrize("name", ["POD_IP", "FLAGS_START_PORT", "TRAINING_ROLE", "PADDLE_NUM_THREADS"])
def test_variables_that_choose_no_framework(name: str) -> None:
    """What other programs read, too, or a library of Paddle's, tells nothing of the launcher."""
    with pytest.raises(UserError, match="which framework is meant"):
        plan("", framework="", **{name: "1"})


def test_launcher_inside_a_worker() -> None:
    """What a worker is told of its place is neither a setting of a launcher that it starts nor a choice."""
    assignment = Assignment(1, 0, 0, 1, 0, 1, 1, Endpoint("h", 1), "", peers=(Peer("h", 1),))
    adapter = create(Options(log_dir="logs"))
    env = {**adapter.slot_env(0, 1, {}), **adapter.worker_env(Seat(assignment, 0, "job", "node", 3))}
    assert {name for name in env if name.startswith("PADDLE_")} <= WORKER_VARIABLES
    env |= dict.fromkeys(WORKER_VARIABLES, "3")
    made = plan("--max_restart 2", **env)
    assert (made.job.max_nodes, made.node.output.log_dir, made.notes) == (1, None, ())
    assert made.job.policy.max_restarts == 2
    torch = replace(MACHINE, installed=lambda module: module == "torch")
    assert plan("", torch, framework="", **env).adapter.name == "torch"
    assert plan("", PADDLE_LOG_DIR="logs").node.output.log_dir == "logs"


@pytest.mark.parametrize("framework", ["torch", "plain"])
def test_np_of_torchrun(framework: str) -> None:
    """For the others --np stays the short form of --nproc-per-node."""
    assert plan("--np 2", framework=f"--framework {framework}").node.slots == 2
    assert plan("--np 2", framework=f"--framework {framework}", ELASTIC_NPROC_PER_NODE="3").node.slots == 2


PADDLE_FLAGS = [setting.flags[0] for setting in SETTINGS if setting.group == "paddle" and setting.name != "np"]


@pytest.mark.parametrize("flag", PADDLE_FLAGS)
def test_flags_with_another_framework(flag: str) -> None:
    """A flag of Paddle's launchers is a mistake elsewhere, and one line says so."""
    with pytest.raises(UserError) as caught:
        plan(f"{flag} 1", framework="--framework torch")
    assert_line(caught.value, [f"{flag} 1 is for --framework paddle, got torch (flag --framework)"])


ELSEWHERE = "python -m paddle.distributed.launch"

MISTAKES: list[tuple[str, dict[str, str], list[str]]] = [
    ("", {"ELASTIC_NNODES": "2", "PADDLE_NNODES": "1"}, ["ELASTIC_NNODES='2' and PADDLE_NNODES='1'", "unset one"]),
    ("--nnodes 1", {"ELASTIC_NNODES": "2", "PADDLE_NNODES": "1"}, ["ELASTIC_NNODES='2'", "PADDLE_NNODES='1'"]),
    ("", {"PET_NNODES": "2", "PADDLE_NNODES": "1"}, ["PET_NNODES='2' and PADDLE_NNODES='1'"]),
    (
        "",
        {"ELASTIC_MAX_RESTARTS": "2", "PADDLE_MAX_RESTART": "1"},
        ["ELASTIC_MAX_RESTARTS='2'", "PADDLE_MAX_RESTART='1'"],
    ),
    (
        "",
        {"ELASTIC_FAULT_TOLERANCE_LEVEL": "0", "PADDLE_ELASTIC_LEVEL": "0"},
        ["LEVEL='0' and PADDLE_ELASTIC_LEVEL='0'"],
    ),
    ("", {"ELASTIC_LOG_DIR": "a", "PADDLE_LOG_DIR": "b"}, ["ELASTIC_LOG_DIR='a'", "PADDLE_LOG_DIR='b'"]),
    ("", {"PADDLE_NNODES": "1", "PADDLE_ELASTIC_NP": "2"}, ["PADDLE_NNODES='1' and PADDLE_ELASTIC_NP='2'"]),
    ("", {"PADDLE_JOB_ID": "a", "PADDLE_ELASTIC_JOB_ID": "b"}, ["PADDLE_JOB_ID='a'", "PADDLE_ELASTIC_JOB_ID='b'"]),
    ("--np 2 --nnodes 3", {}, ["--nnodes 3 and --np 2 contradict", "leave out one"]),
    ("--max_restart 2 --max-restarts 3", {}, ["--max-restarts 3 and --max_restart 2"]),
    ("--gpus 1 --npus 2", {}, ["--gpus 1 and --npus 2"]),
    ("--host a --local-addr b", {}, ["--host a and --local-addr b"]),
    ("--nnodes 2 --master etcd://a --elastic_server b:1", {}, ["--master etcd://a and --elastic_server b:1"]),
    ("--nnodes 2 --master etcd://a --rdzv-endpoint b", {}, ["--master etcd://a and --rdzv-endpoint b"]),
    ("--nnodes 2 --master etcd://a --rdzv-backend c10d", {}, ["--master etcd://a and --rdzv-backend c10d"]),
    ("--nnodes 2 --master a:1 --master-addr b", {}, ["--master a:1 and --master-addr b"]),
    ("--ips here,b --rdzv-endpoint c:1", {}, ["--ips here,b and --rdzv-endpoint c:1"]),
    ("--nnodes 2", {}, ["--nnodes 2", "place to meet", "--master etcd://HOST:2379"]),
    ("", {"PADDLE_NNODES": "2:4"}, ["PADDLE_NNODES='2:4'", "--master etcd://HOST:2379"]),
    ("", {"PADDLE_TRAINERS_NUM": "2"}, ["PADDLE_TRAINERS_NUM='2'", "--master etcd://HOST:2379"]),
    ("--np 2x", {}, ["--np", "expected a number of nodes, or MIN:MAX", "'2x'"]),
    ("--nnodes 2 --master zk://a:1", {}, ["--master", "expected etcd://HOST:PORT or HOST:PORT", "'zk://a:1'"]),
    ("--nnodes 2 --master etcd://", {}, ["--master", "expected the etcd's HOST:PORT", "'etcd://'"]),
    ("--nnodes 2 --elastic_server a:0", {}, ["--elastic_server", "HOST:PORT", "'a:0'"]),
    ("--nnodes 2 --master a:1 --rank 2", {}, ["--rank", "from 0 to 1", "'2'"]),
    ("--nnodes 2 --master a:1 --rank x", {}, ["--rank", "whole number", "'x'"]),
    ("--nnodes 2 --master a:0 --rank 0", {}, ["--master", "can't find port 0"]),
    ("--ips a,b", {}, ["--ips", "one address of this machine", "'a,b'", "none of them is", "--rank N"]),
    ("--ips here,too", {}, ["--ips", "one address of this machine", "several of them are", "--rank N"]),
    ("--ips a,here --nnodes 3", {}, ["--nnodes 3 contradicts --ips a,here, which names 2"]),
    ("--ips a,here --nnodes 1", {}, ["--nnodes 1 contradicts --ips a,here"]),
    ("--ips a,b --rank 2", {}, ["--rank", "from 0 to 1", "'2'"]),
    ("--ips ,", {}, ["--ips", "expected a list of addresses", "','"]),
    ("--ips here,b --start_port 99999", {}, ["--start_port", "from 1 to 65535", "'99999'"]),
    ("", {**CLOUD, "PADDLE_TRAINER_ID": ""}, ["PADDLE_TRAINERS='10.0.0.1,10.0.0.2'", "set PADDLE_TRAINER_ID"]),
    ("", {**CLOUD, "PADDLE_TRAINER_ID": "2"}, ["PADDLE_TRAINER_ID", "from 0 to 1", "'2'"]),
    ("", {**CLOUD, "PADDLE_TRAINERS_NUM": "3"}, ["PADDLE_TRAINERS_NUM", "expected 2", "'3'", "PADDLE_TRAINERS"]),
    ("", {**CLOUD, "PADDLE_PORT": "x"}, ["PADDLE_PORT", "whole number", "'x'"]),
    ("", {**CLOUD, "PADDLE_NNODES": "3"}, ["PADDLE_NNODES='3' contradicts PADDLE_TRAINERS="]),
    ("", {"TRAINER_PORTS_NUM": "x"}, ["TRAINER_PORTS_NUM", "a number of 1 or more", "'x'"]),
    ("--elastic_level 2", {}, ["--elastic_level", "expected -1 (off), 0 (fault-tolerant) or 1 (elastic)", "'2'"]),
    ("", {"PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "3"}, ["PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL", "0 (off)", "'3'"]),
    (
        "--elastic_level -1 --max-restarts 2",
        {},
        ["--max-restarts 2 contradicts --elastic_level, by which the level is 0"],
    ),
    ("--max_restart x", {}, ["--max_restart", "whole number", "'x'"]),
    ("--elastic_timeout x", {}, ["--elastic_timeout", "seconds", "'x'"]),
    ("", {"PADDLE_ELASTIC_TTL": "1"}, ["PADDLE_ELASTIC_TTL", "2 or more", "'1'"]),
    ("--log_level loud", {}, ["--log_level", "expected one of DEBUG", "'loud'"]),
    ("--log_dir d --log_overwrite maybe", {}, ["--log_overwrite", "expected true or false", "'maybe'"]),
    ("--log_dir train.py", {}, ["--log-dir", "expected a folder"]),
    ("", {"PADDLE_LOG_DIR": "train.py"}, ["PADDLE_LOG_DIR", "expected a folder", "'train.py'"]),
    ("--host nowhere", {}, ["--host", "resolved", "'nowhere'"]),
    ("--gpus 0", {}, ["--gpus 0", "no GPU was found", "leave it out"]),
    ("--devices 0", {"CUDA_VISIBLE_DEVICES": "4,5"}, ["--devices", "visible GPUs", "'0' is none of", "'4,5'"]),
    ("--npus x", {}, ["--npus", "expected numbers of visible NPUs", "'x'"]),
    ("--npus ,", {}, ["--npus", "expected numbers of NPUs", "','"]),
    ("--npus 0,1 --nproc_per_node 3", {}, ["--nproc-per-node 3: 3 workers need a device each", "--npus 0,1 names 2"]),
    ("--run_mode ps", {}, ["--run_mode ps", "not supported", ELSEWHERE]),
    ("--run_mode rpc", {}, ["--run_mode rpc", "not supported", ELSEWHERE]),
    ("", {"PADDLE_RUN_MODE": "ps-heter"}, ["PADDLE_RUN_MODE='ps-heter'", "not supported", ELSEWHERE]),
    ("", {"TRAINING_ROLE": "PSERVER"}, ["TRAINING_ROLE='PSERVER'", "not supported", ELSEWHERE]),
    *(
        (f"--{name} 1", {}, [f"--{name} 1", "not supported", ELSEWHERE])
        for name in ("servers", "trainers", "server_num", "trainer_num", "gloo_port", "with_gloo")
    ),
    *(
        ("", {name: "1"}, [f"{name}='1'", "not supported", ELSEWHERE])
        for name in ("PADDLE_SERVERS_ENDPOINTS", "PADDLE_SERVER_NUM", "PADDLE_GLOO_PORT", "PADDLE_AUTO_PARALLEL_CONFIG")
    ),
    *(
        (f"--{name} a", {}, [f"--{name} a", "not supported", ELSEWHERE])
        for name in ("auto_tuner_json", "auto_parallel_config", "elastic_pre_hook")
    ),
]


@pytest.mark.parametrize(("line", "environ", "parts"), MISTAKES)
def test_mistakes(line: str, environ: dict[str, str], parts: list[str]) -> None:
    """Each mistake is one line that says what is wrong, what was expected, what was given and what to do."""
    with pytest.raises(UserError) as caught:
        plan(line, **environ)
    assert_line(caught.value, parts)


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        ("--nnodes 2 --master etcd://ann:geheim@e:1", {}),
        ("--nnodes 2", {"PADDLE_MASTER": "http://ann:geheim@e:1"}),
        ("--nnodes 2 --elastic_server ann:geheim@e:1", {"PADDLE_ELASTIC_SERVER": "e:1"}),
    ],
)
def test_passwords_are_in_no_message(line: str, environ: dict[str, str]) -> None:
    """A password inside an address is refused and not repeated."""
    with pytest.raises(UserError, match="without a user; give it by --etcd-user") as caught:
        plan(line, **environ)
    assert "geheim" not in str(caught.value)


def test_np_that_contradicts() -> None:
    """For torch, the short form and the full one must agree."""
    with pytest.raises(UserError, match="--np 2 and --nproc-per-node 3 contradict each other"):
        plan("--np 2 --nproc-per-node 3", framework="--framework torch")


def assert_line(error: UserError, parts: list[str]) -> None:
    message = str(error)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_pods_that_know_all_endpoints() -> None:
    """Where nothing else says who the nodes are, their list of workers does: hosts, workers on each, where to meet."""
    environ = {"PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.1:6171,far:6170,far:6171", "PADDLE_TRAINER_ID": "1"}
    made = plan("", **environ)
    assert (made.job.min_nodes, made.job.max_nodes, made.node.slots, made.node.place) == (2, 2, 2, 1)
    assert cluster(made).endpoints == ("10.0.0.1:6170",)
    alone = plan("", PADDLE_TRAINER_ENDPOINTS="10.0.0.1:6170,10.0.0.1:6171")
    assert (alone.cluster, alone.node.slots) == (None, 1)
    at_etcd = plan("--np 2:4 --elastic_server e:1", **environ)
    assert (cluster(at_etcd).endpoints, at_etcd.job.max_nodes) == (("e:1",), 4)


def test_all_gpus_are_visible() -> None:
    """The word that some clouds use is no name of a device."""
    assert plan("", CUDA_VISIBLE_DEVICES="all").node.slots == plan("").node.slots


def test_xpus_that_a_variable_names_are_used() -> None:
    """As in Paddle: a worker for each."""
    made = plan("", XPU_VISIBLE_DEVICES="4,5")
    assert made.node.slots == 2
    assert made.adapter.slot_env(1, 2, {})["FLAGS_selected_xpus"] == "1"
