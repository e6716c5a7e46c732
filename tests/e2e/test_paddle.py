"""Paddle's scripts, unmodified, on one node and as pods that are configured by variables alone."""

import importlib.util
import os
import re
import signal

import pytest

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="paddle is not installed"),
]
PADDLE = ("--framework", "paddle", "--nproc_per_node", 2)

# What the guides of paddle show: fleet, its data parallel model and optimizer.
FLEET = """
import os
import paddle
from paddle.distributed import fleet

fleet.init(is_collective=True)
size = int(os.environ["PADDLE_TRAINERS_NUM"])
assert fleet.worker_num() == len(fleet.worker_endpoints()) == size
assert fleet.worker_index() == int(os.environ["PADDLE_TRAINER_ID"])
paddle.seed(7)
model = fleet.distributed_model(paddle.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(0.1, parameters=model.parameters()))
for step in range(5):
    loss = (model(paddle.full([2, 4], float(fleet.worker_index() + 1))) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
total = paddle.to_tensor([float(fleet.worker_index())])
paddle.distributed.all_reduce(total)
weight = ",".join(f"{value:.6f}" for value in model.state_dict()["weight"].flatten().tolist())
print(f"rank {fleet.worker_index()} sum {total.item()} weight {weight}", flush=True)
"""


@pytest.mark.parametrize("size", [2, 3, 4])
def test_fleet(launch, script, size):
    """A training of fleet runs as it is: all ranks see each other, in all its groups, and end with the same weights."""
    job = launch("--framework", "paddle", "--nproc_per_node", size, "--max_restart", 0, script(FLEET))
    assert job.finish() == 0, job.text
    total = sum(range(size))
    weights = {job.seen(rf"rank {rank} sum {total}.0 weight (\S+)")[1] for rank in range(size)}
    assert len(weights) == 1


STEPS = """
import os, sys, time
import paddle
import paddle.distributed as dist

dist.init_parallel_env()
rank, generation = dist.get_rank(), os.environ["ELASTIC_GENERATION"]
count = os.environ["ELASTIC_RESTART_COUNT"]
print(f"generation {generation} restarts {count} rank {rank} pid {os.getpid()}", flush=True)
while True:
    one = paddle.ones([1])
    dist.all_reduce(one)
    assert one.item() == 2.0
    print(f"generation {generation} rank {rank} step", flush=True)
    # then
    time.sleep(0.05)
"""


def test_killed_worker_without_etcd(launch, script):
    """kill -9 of a worker: both ranks go on in the next generation, which paddle's own launcher does not reach."""
    job = launch(*PADDLE, "--max_restart", 1, script(STEPS.replace("# then", "if generation == '2': break")))
    pid = int(job.seen(r"generation 1 restarts 0 rank 1 pid (\d+)")[1])
    job.seen("generation 1 rank 0 step")
    os.kill(pid, signal.SIGKILL)
    for rank in (0, 1):
        job.seen(rf"generation 2 rank {rank} step")
    assert job.finish() == 0
    job.seen("rank 1 on .* was killed by SIGKILL; restart 1 of 1")


@pytest.mark.parametrize("code", [101, 102])
def test_codes_that_ask_for_a_restart(launch, script, code):
    """They are followed, with no restart allowed, and not counted: the third generation still has restart count 0."""
    last = f"if generation == '3': break\n    if rank == 1: sys.exit({code})"
    job = launch(*PADDLE, "--max-restarts", 0, script(STEPS.replace("# then", last)))
    job.seen("generation 3 restarts 0 rank 0")
    assert job.finish() == 0, job.text
    job.seen(f"exited with code {code}, by which it asks to be started again; not charged", times=2)


def test_worker_logs(launch, script, tmp_path):
    """A file per local rank in the folder itself, with both streams, appended to by each generation and each run."""
    text = "import os, sys; print('out', os.environ['PADDLE_GLOBAL_RANK']); print('err', file=sys.stderr)\n"
    text += "assert os.environ['PADDLE_LOG_DIR'] == os.path.abspath('log')\n"
    for words in (1, 2):
        assert launch(*PADDLE, "--log_dir", "log", script(text)).finish() == 0
        for rank in (0, 1):
            written = (tmp_path / "log" / f"workerlog.{rank}").read_text()
            assert written.count(f"out {rank}") == written.count("err") == words
    assert launch(*PADDLE, "--log_dir", "log", "--log_overwrite", "true", script(text)).finish() == 0
    assert (tmp_path / "log" / "workerlog.0").read_text().count("out 0") == 1
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["workerlog.0", "workerlog.1"]


def test_the_store_is_reached_without_losing_time(launch, script):
    """Rank 1 is there long before rank 0: paddle's client is not refused, and so does not sleep; nor does Nagle wait."""
    text = """
import os, socket, time
import paddle
import paddle.distributed as dist
if os.environ["PADDLE_TRAINER_ID"] == "0":
    time.sleep(2)
dist.init_parallel_env()
one = paddle.ones([1])
dist.all_reduce(one)
print(f"sum {one.item()}", flush=True)
port, found = int(os.environ["PADDLE_MASTER"].rpartition(":")[2]), []
for fd in os.listdir("/proc/self/fd"):
    try:
        with socket.socket(fileno=os.dup(int(fd))) as each:
            if each.family == socket.AF_INET and port in (each.getsockname()[1], each.getpeername()[1]):
                found.append(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0)
    except OSError:
        continue
print(f"connections {len(found)} quick {all(found)}", flush=True)
"""
    job = launch(*PADDLE, script(text))
    assert job.finish() == 0, job.text
    job.seen("sum 2.0", times=2)
    # Rank 0 has both ends of its own and one of rank 1's.
    job.seen("connections 3 quick True")
    job.seen("connections 1 quick True")
    job.seen("Successfully connected", times=2)
    assert "Retry to connect" not in job.text


@pytest.mark.quiet
def test_only_rank_0_logs_for_all(launch, script):
    """What paddle decides by the rank while it is imported is the same in woken standbys, which have none then."""
    text = """
import logging, os, time
import paddle
if os.environ["ELASTIC_GENERATION"] == "1":
    print("up", os.getpid(), flush=True)
    time.sleep(600)
print(f"rank {os.environ['PADDLE_TRAINER_ID']} handlers {len(logging.getLogger('hapi').handlers)}", flush=True)
"""
    job = launch(*PADDLE, script(text))
    job.seen("standbys are ready")
    os.kill(int(job.seen(r"up (\d+)")[1]), signal.SIGKILL)
    assert job.finish() == 0, job.text
    job.seen("2 of them from standby")
    job.seen("rank 0 handlers 1")
    job.seen("rank 1 handlers 0")


POD = """
import os, sys, time
folder = os.environ["WORK"]
assert not [name for name in os.environ if name.startswith("PET_")]
print("place", os.environ["PADDLE_TRAINER_ID"], "of", os.environ["PADDLE_TRAINERS_NUM"], flush=True)
while not os.path.exists(os.path.join(folder, "stop")):
    time.sleep(0.05)
"""


@pytest.fixture
def pod(launch, script, tmp_path, etcd):
    """Start the pod of this number with nothing but the script on its command line."""

    def start(number, **env):
        common = {
            "WORK": str(tmp_path),
            "PADDLE_ELASTIC_SERVER": etcd.endpoint,
            "PADDLE_ELASTIC_JOB_ID": f"pods-{os.getpid()}-{tmp_path.name}",
            "POD_IP": f"127.0.0.{number}",
            "POD_NAME": f"pod-{number}",
        }
        return launch(script(POD), env={**common, **env})

    return start


def kill(pod):
    for pid in (pod.process.pid, *pod.family()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_pods_configured_by_variables_alone(pod, tmp_path):
    """Three pods meet, one is killed, the others go on."""
    env = {"PADDLE_ELASTIC_NP": "2:3", "PADDLE_ELASTIC_TIMEOUT": "5"}
    three = [pod(number, **env) for number in (1, 2, 3)]
    assert sorted(each.seen(r"place (\d) of 3")[1] for each in three) == ["0", "1", "2"]
    kill(three.pop())
    for each in three:
        each.seen(r"place [01] of 2")
    (tmp_path / "stop").touch()
    assert [each.finish() for each in three] == [0, 0]


@pytest.mark.parametrize("name", ["PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL", "PADDLE_ELASTIC_FAULT_TOLERANCE_LEVEL"])
def test_pods_that_hold_until_the_replacement_comes(pod, tmp_path, name):
    """Level 1, in paddle's spelling and in the right one: the other pod waits for the new one, which has its rank."""
    env = {"PADDLE_ELASTIC_NP": "2", name: "1"}
    one, two = pod(1, **env), pod(2, **env)
    before = [each.seen(r"place (\d) of 2")[1] for each in (one, two)]
    kill(two)
    one.seen("workers are stopped until the next world: node pod-2 is lost")
    again = pod(2, **env)
    assert [one.seen(r"place (\d) of 2", times=2)[1], again.seen(r"place (\d) of 2")[1]] == before
    (tmp_path / "stop").touch()
    assert [each.finish() for each in (one, again)] == [0, 0]


def test_both_command_lines_of_paddle(launch, script, tmp_path, etcd):
    """The launcher's own line with an etcd master and the documented elastic one bring two nodes into one world."""
    host, _, port = etcd.endpoint.rpartition(":")
    text = script(re.sub(r"while.*\n.*\n", "", POD))
    lines = {
        "new": ("--master", f"etcd://{etcd.endpoint}", "--nnodes", "2:2", "--max_restart", "3", "--elastic_level", "1"),
        "old": (f"--elastic_server={host}:{port}", "--np=2"),
    }
    for name, line in lines.items():
        both = [
            launch("--framework", "paddle", *line, "--job_id", f"{name}-{os.getpid()}", "--host", f"127.0.0.{n}", text,
                   env={"WORK": str(tmp_path), "POD_NAME": f"pod-{n}"})
            for n in (1, 2)
        ]  # fmt: skip
        assert [each.finish() for each in both] == [0, 0], both[0].text + both[1].text
        assert sorted(each.seen(r"place (\d) of 2")[1] for each in both) == ["0", "1"]
