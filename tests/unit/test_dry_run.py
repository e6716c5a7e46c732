"""What a dry run shows, and what it hides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_adapter.adapters.registry import Options, find, load
from elastic_adapter.core.config import ClusterConfig, JobConfig, NodeConfig, OutputConfig
from elastic_adapter.core.ports import NativeProgram, PythonProgram
from elastic_adapter.launchers.dry_run import describe, masked, masked_arguments
from elastic_adapter.launchers.plan import LaunchPlan, Source

PLAN = LaunchPlan(
    job=JobConfig("job"),
    node=NodeConfig("box", "127.0.0.1", 2, OutputConfig((3, 3), (0, 0))),
    program=PythonProgram("script", "train.py", ("--name", "a b"), "python3"),
    adapter=load(find("plain"), Options()),
    log_level="INFO",
    sources=(Source("nnodes", "1:1", "default"), Source("log-dir", "", "default"), Source("tee", "3", "flag --tee")),
    notes=("something to know",),
)


def test_whole_text() -> None:
    """Settings with their origins, each worker's environment and command, and the notes."""
    worker = """\
worker {0}
  environment, besides what it inherits
    ELASTIC_GENERATION=1
    ELASTIC_JOB_ID=job
    ELASTIC_LOCAL_RANK={0}
    ELASTIC_LOCAL_WORLD_SIZE=2
    ELASTIC_MASTER_ADDR=127.0.0.1
    ELASTIC_MASTER_PORT=<free port>
    ELASTIC_MAX_RESTARTS=0
    ELASTIC_NODE=box
    ELASTIC_NODES=1
    ELASTIC_NODE_RANK=0
    ELASTIC_RANK={0}
    ELASTIC_RESTART_COUNT=0
    ELASTIC_WORLD_SIZE=2
  command
    python3 -u train.py --name 'a b'
"""
    settings = """\
settings
  nnodes   1:1  default
  log-dir  -    default
  tee      3    flag --tee
"""
    parts = (settings, worker.format(0), worker.format(1), "notes\n  something to know\n")
    assert describe(PLAN, {}) == "\n".join(parts)


@pytest.mark.parametrize(
    ("place", "number", "ranks", "master"),
    [
        (None, 1, ("0", "1"), "10.0.0.7"),
        (0, 1, ("0", "1"), "10.0.0.7"),
        (2, 3, ("4", "5"), "<address of the first node>"),
    ],
)
def test_several_nodes(place: int | None, number: int, ranks: tuple[str, str], master: str) -> None:
    """Beside other nodes a worker is shown as if all came, with what is not known yet said to be so."""
    node = replace(PLAN.node, address="10.0.0.7", place=place)
    made = replace(PLAN, job=JobConfig("job", 2, 3), node=node, cluster=ClusterConfig(("e:2379",)))
    text = describe(made, {})
    for local_rank, rank in enumerate(ranks):
        assert f"worker {local_rank}, if this node is number {number} of 3\n" in text
        assert f"    ELASTIC_RANK={rank}\n" in text
    assert text.count("    ELASTIC_WORLD_SIZE=6\n") == text.count(f"    ELASTIC_MASTER_ADDR={master}\n") == 2


def test_fixed_port() -> None:
    """A port that the user chose is shown."""
    assert "ELASTIC_MASTER_PORT=29500\n" in describe(replace(PLAN, node=replace(PLAN.node, master_port=29500)), {})


def test_paddle_master() -> None:
    """The port that is not known yet is not shown as a number, even inside an address."""
    text = describe(replace(PLAN, adapter=load(find("paddle"), Options())), {})
    assert "PADDLE_MASTER=127.0.0.1:<free port>\n" in text
    assert "PADDLE_TRAINER_ENDPOINTS=127.0.0.1:<free port>,127.0.0.1:<free port>\n" in text


def test_local_rank_and_cpus() -> None:
    """The local rank is the first argument where it is passed, and bound CPUs are listed."""
    cpus = (frozenset({0, 1}), frozenset({2}))
    text = describe(replace(PLAN, node=replace(PLAN.node, pass_local_rank=True, cpus=cpus)), {})
    assert "    python3 -u train.py --local-rank=1 --name 'a b'\n" in text
    assert "  CPUs 0,1\n" in text
    assert "  CPUs 2\n" in text


def test_other_program() -> None:
    """A program that is not Python is shown as it is run."""
    text = describe(replace(PLAN, program=NativeProgram(("./run.sh", "--api-key", "k1"))), {})
    assert "    ./run.sh --api-key '******'\n" in text


@pytest.mark.parametrize(
    "name",
    [
        "PASSWORD",
        "DB_PASS",
        "db-passwd",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "apiKey",
        "accessToken",
        "my.credentials",
    ],
)
def test_secret_names(name: str) -> None:
    """What such a name holds is not shown."""
    assert masked(name, "value") == "******"


@pytest.mark.parametrize("name", ["ROLE_NAME", "tokenizer", "max-tokens", "author", "keyboard", "TORCHELASTIC_RUN_ID"])
def test_ordinary_names(name: str) -> None:
    """Names that only resemble secret ones are no secrets."""
    assert masked(name, "value") == "value"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("user=ann,password=x,ttl=3", "user=ann,password=******,ttl=3"),
        ("http://ann:x@host/path", "http://ann:******@host/path"),
        ("http://host:80/path", "http://host:80/path"),
        ("", ""),
    ],
)
def test_secrets_inside_values(value: str, shown: str) -> None:
    """Pairs and addresses hide their secret part."""
    assert masked("conf", value) == shown


def test_secret_arguments() -> None:
    """A secret argument is hidden in both of its forms, and nothing else is."""
    words = ["train.py", "--token=x", "--token", "x", "--token", "--lr", "1", "secret"]
    assert list(masked_arguments(words)) == [
        "train.py",
        "--token=******",
        "--token",
        "******",
        "--token",
        "--lr",
        "1",
        "secret",
    ]
