"""What each framework's workers are told, and what their error files say."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from elastic_adapter.adapters import registry
from elastic_adapter.adapters.registry import BUILT_IN, Entry, Options, find, load
from elastic_adapter.core.environment import neutral_env
from elastic_adapter.core.errors import UserError
from elastic_adapter.core.model import Assignment, Endpoint, Peer, Seat
from elastic_adapter.core.ports import Adapter, FailureDetail

SEAT = Seat(
    Assignment(
        generation=3,
        restart_count=2,
        group_rank=1,
        group_size=2,
        rank_offset=4,
        slots=4,
        world_size=8,
        master=Endpoint("10.0.0.1", 29400),
        reason="",
        peers=(Peer("10.0.0.1", 4), Peer("10.0.0.2", 4)),
    ),
    local_rank=1,
    job_id="job",
    node="b",
    max_restarts=5,
    role="trainer",
    error_file="/logs/error.json",
)
OPTIONS = Options(signals=("SIGTERM", "SIGINT"))


def adapter(name: str, options: Options = OPTIONS) -> Adapter:
    return load(find(name), options)


def test_torch_worker() -> None:
    """A torch worker is told what torchrun tells it, and the neutral variables."""
    assert adapter("torch").worker_env(SEAT) == {
        **neutral_env(SEAT),
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "5",
        "ROLE_NAME": "trainer",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
    }


@pytest.mark.parametrize(
    ("slots", "inherited", "env"),
    [
        (1, {}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
        (2, {}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1"}),
        (2, {"OMP_NUM_THREADS": "4", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, {}),
    ],
)
def test_torch_slot(slots: int, inherited: dict[str, str], env: dict[str, str]) -> None:
    """What the user set stays; several workers get one thread each by default."""
    assert adapter("torch").slot_env(0, slots, inherited) == env


@pytest.mark.parametrize(("visible", "device"), [(None, "1"), ("4, 6", "6"), ("GPU-a,GPU-b", "GPU-b")])
def test_virtual_local_rank(visible: str | None, device: str) -> None:
    """Each worker sees one GPU and takes itself for local rank 0."""
    virtual = adapter("torch", Options(virtual_local_rank=True))
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert virtual.slot_env(1, 2, inherited)["CUDA_VISIBLE_DEVICES"] == device
    assert virtual.worker_env(SEAT)["LOCAL_RANK"] == "0"
    assert virtual.worker_env(SEAT)["ELASTIC_LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (
            '{"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1"}}}',
            FailureDetail("ValueError: no", "Traceback"),
        ),
        ('{"message": {"message": "ValueError: no", "errorCode": 1}}', FailureDetail("ValueError: no", "")),
        ('{"message": "killed"}', FailureDetail("killed", "")),
        ("", None),
        ("not json", None),
        ("[1]", None),
        ('{"message": {"message": 5}}', None),
        ('{"other": 1}', None),
    ],
)
def test_torch_error_file(content: str, detail: FailureDetail | None) -> None:
    """The error file of torch's @record is understood; anything else is not an error."""
    assert adapter("torch").read_error_file(content) == detail


def test_paddle_worker() -> None:
    """A paddle worker finds its store and its rank in the variables of paddle's launcher."""
    assert adapter("paddle").worker_env(SEAT) == {
        **neutral_env(SEAT),
        "PADDLE_MASTER": "10.0.0.1:29400",
        "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:29406",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(
            f"10.0.0.{node}:{port}"
            for node, ports in ((1, range(29401, 29405)), (2, range(29405, 29409)))
            for port in ports
        ),
        "PADDLE_TRAINER_ID": "5",
        "PADDLE_TRAINERS_NUM": "8",
        "PADDLE_GLOBAL_RANK": "5",
        "PADDLE_GLOBAL_SIZE": "8",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_LOCAL_SIZE": "4",
        "PADDLE_RANK_IN_NODE": "1",
        "PADDLE_NNODES": "2",
        "PADDLE_AUTO_CLUSTER": "0",
        "POD_NAME": "b",
    }


def test_paddle_endpoints_are_valid_and_differ() -> None:
    """Each rank has an address of its own, however high the master's port is and however many ranks there are."""
    assignment = replace(SEAT.assignment, master=Endpoint("a", 65530), peers=(Peer("a", 4), Peer("b", 4)))
    env = adapter("paddle").worker_env(replace(SEAT, assignment=assignment))
    endpoints = env["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert len(set(endpoints)) == 8
    assert all(1024 <= int(each.rpartition(":")[2]) <= 65535 for each in endpoints)
    assert env["PADDLE_CURRENT_ENDPOINT"] == endpoints[5]


def test_paddle_log_folder() -> None:
    """Workers that look for the folder of their logs get its full path."""
    assert adapter("paddle", Options(log_dir="log")).worker_env(SEAT)["PADDLE_LOG_DIR"] == os.path.abspath("log")


@pytest.mark.parametrize(
    ("gpus", "inherited", "env"),
    [
        (0, {}, {"PADDLE_DISTRI_BACKEND": "gloo"}),
        (1, {}, {"PADDLE_DISTRI_BACKEND": "gloo"}),
        (2, {}, {"FLAGS_selected_gpus": "1"}),
        (2, {"PADDLE_DISTRI_BACKEND": "nccl"}, {"FLAGS_selected_gpus": "1"}),
        (1, {"PADDLE_DISTRI_BACKEND": "own"}, {}),
    ],
)
def test_paddle_slot(gpus: int, inherited: dict[str, str], env: dict[str, str]) -> None:
    """Workers use a GPU each where there are enough, else gloo; the user's own choice stays."""
    made = adapter("paddle", Options(gpus=gpus)).slot_env(1, 2, {**inherited, "OMP_NUM_THREADS": "4"})
    assert made == env


def test_paddle_threads() -> None:
    """One for each worker, unless the user says otherwise, before anything is imported."""
    assert adapter("paddle").slot_env(0, 1, {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in adapter("paddle").slot_env(0, 1, {"OMP_NUM_THREADS": "4"})


@pytest.mark.parametrize(
    ("kind", "slots", "env"),
    [
        ("gpu", 2, {"FLAGS_selected_gpus": "5"}),
        ("gpu", 1, {"FLAGS_selected_gpus": "3,5"}),
        ("xpu", 2, {"FLAGS_selected_xpus": "5"}),
        ("npu", 2, {"FLAGS_selected_npus": "5", "PADDLE_DISTRI_BACKEND": "xccl", "PADDLE_XCCL_BACKEND": "npu"}),
    ],
)
def test_paddle_devices_that_were_chosen(kind: str, slots: int, env: dict[str, str]) -> None:
    """One for each worker, in the order given; a single worker has them all."""
    chosen = adapter("paddle", Options(devices=("3", "5"), device_kind=kind))
    assert chosen.slot_env(1 if slots > 1 else 0, slots, {"OMP_NUM_THREADS": "1"}) == env


def test_plain_worker() -> None:
    """Any other program is told the neutral variables and nothing else."""
    plain = adapter("plain")
    assert plain.worker_env(SEAT) == neutral_env(SEAT)
    assert (plain.slot_env(0, 2, {}), plain.preload, plain.read_error_file("{}")) == ({}, (), None)


def test_names_and_budgets() -> None:
    """The built-in frameworks are known by name, with the restarts that their users expect."""
    assert {entry.name: entry.max_restarts for entry in BUILT_IN} == {"torch": 0, "paddle": 3, "plain": 0}
    for entry in BUILT_IN:
        made = load(entry, OPTIONS)
        assert made.name == entry.name
        with pytest.raises(FrozenInstanceError):
            made.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("module", [entry.create.partition(":")[0] for entry in BUILT_IN])
def test_launch_side_needs_no_framework(module: str) -> None:
    """An adapter's launch side imports where the frameworks can't be imported."""
    block = f"import sys; sys.modules['torch'] = sys.modules['paddle'] = sys.modules['numpy'] = None; import {module}"
    subprocess.run([sys.executable, "-c", block], check=True)


MINE = Entry("mine", "elastic_adapter.adapters.plain:create", max_restarts=1)


@pytest.fixture
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("mine", "my_adapter:ENTRY", registry.GROUP),
        EntryPoint("broken", "no_such_module_here:ENTRY", registry.GROUP),
        EntryPoint("odd", "json:dumps", registry.GROUP),
    ]
    module = type(sys)("my_adapter")
    module.ENTRY = MINE  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_adapter", module)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: EntryPoints(points))


@pytest.mark.usefixtures("_others")
def test_another_packages_framework() -> None:
    """A package adds a framework by an entry point that names its entry."""
    assert find("mine") == MINE
    assert load(find("mine"), OPTIONS).worker_env(SEAT) == neutral_env(SEAT)


@pytest.mark.usefixtures("_others")
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("jax", ["unknown framework 'jax'", "torch, paddle, plain, broken, mine, odd"]),
        ("broken", ["'broken'", "can't be loaded", "no_such_module_here"]),
        ("odd", ["'odd'", "json:dumps", "not a registry Entry"]),
    ],
)
def test_unknown_and_broken_frameworks(name: str, parts: list[str]) -> None:
    """A framework that is unknown or can't be loaded is one line; the known ones are listed."""
    with pytest.raises(UserError) as caught:
        find(name)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts)
