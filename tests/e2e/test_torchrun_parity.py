"""What torchrun's users have in their scripts works the same here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DUMP = """
import json, os, sys
with open(f"dump.{os.environ['RANK']}", "w") as file:
    json.dump({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "name": __name__}, file)
"""
# Set by us and meant to be: the neutral variables, and where the worker's channel is.
OURS = ("ELASTIC_",)
# Random by nature: their presence is compared, and what can be said about their form.
RANDOM = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "E2E_MARK"}
# Differences that are meant: rank 0 hosts the store; the address is the same host by another name.
MEANT = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_ADDR": "127.0.0.1"}
TORCH = ("--framework", "torch")
ENV_PYTHON = str(Path(sys.executable))


def dumps(folder: Path, count: int) -> list[dict]:
    return [json.loads((folder / f"dump.{rank}").read_text()) for rank in range(count)]


@pytest.mark.parametrize("flags", [(), ("--role", "trainer", "--max-restarts", "2"), ("--virtual-local-rank",)])
def test_worker_environment_is_torchruns(launch, script, tmp_path, flags):
    """Each worker finds the variables that torchrun would have set, with the same values."""
    path = script(DUMP)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    job = launch(*TORCH, "--nproc-per-node", 2, *flags, path, "--lr", "0.1", cwd=ours)
    assert job.finish() == 0
    torchrun = launch(
        "--nproc-per-node",
        2,
        *flags,
        path,
        "--lr",
        "0.1",
        cwd=theirs,
        command=[ENV_PYTHON, "-m", "torch.distributed.run"],
    )
    assert torchrun.finish() == 0
    for mine, other in zip(dumps(ours, 2), dumps(theirs, 2), strict=True):
        assert mine["argv"] == other["argv"] == [str(path), "--lr", "0.1"]
        assert mine["path"] == other["path"]
        assert mine["name"] == other["name"]
        extra = {name for name in mine["env"] if name not in other["env"]}
        assert {name for name in extra if not name.startswith(OURS)} == set()
        assert {name for name in other["env"] if name not in mine["env"]} == set()
        for name, value in other["env"].items():
            if name in RANDOM or name == "PWD":
                assert mine["env"][name]
            else:
                assert mine["env"][name] == MEANT.get(name, value), name


def test_neutral_variables(launch, script, tmp_path):
    """Every worker, whatever its framework, finds its place in ELASTIC_* variables."""
    job = launch(*TORCH, "--nproc-per-node", 2, "--job-id", "nightly", script(DUMP))
    assert job.finish() == 0
    for rank, dump in enumerate(dumps(tmp_path, 2)):
        env = dump["env"]
        assert env["ELASTIC_RANK"] == env["ELASTIC_LOCAL_RANK"] == str(rank)
        assert env["ELASTIC_WORLD_SIZE"] == env["ELASTIC_LOCAL_WORLD_SIZE"] == "2"
        assert env["ELASTIC_GENERATION"] == "1"
        assert env["ELASTIC_RESTART_COUNT"] == "0"
        assert env["ELASTIC_JOB_ID"] == env["TORCHELASTIC_RUN_ID"] == "nightly"


def test_plain_runs_a_shell_script(launch, tmp_path):
    """Any program is supervised with the neutral variables alone."""
    program = tmp_path / "train.sh"
    program.write_text('#!/bin/sh\necho "rank $ELASTIC_RANK of $ELASTIC_WORLD_SIZE, ${RANK:-none}, $1"\n')
    program.chmod(0o755)
    job = launch("--framework", "plain", "--nproc_per_node=2", program, "--lr")
    assert job.finish() == 0
    for rank in (0, 1):
        job.seen(rf"\[\S+ {rank}\] rank {rank} of 2, none, --lr$")


@pytest.mark.parametrize(
    "flags",
    [
        ("--standalone",),
        ("--nnodes=1",),
        ("--nnodes", "1:1"),
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv_id", "x"),
        ("--master-addr", "127.0.0.1", "--master-port", "29512"),
    ],
)
def test_ways_to_say_one_node(launch, script, tmp_path, flags):
    """All of torchrun's ways to run on one node run on one node."""
    job = launch(*TORCH, *flags, script(DUMP))
    assert job.finish() == 0
    (dump,) = dumps(tmp_path, 1)
    if "--master-port" in flags:
        assert dump["env"]["MASTER_PORT"] == "29512"


def test_variables_configure_a_job(launch, script, tmp_path):
    """A command without flags is configured by torchrun's variables alone, framework included."""
    job = launch(script(DUMP), env={"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "4", "PET_STANDALONE": "1"})
    assert job.finish() == 0
    assert dumps(tmp_path, 2)[1]["env"]["TORCHELASTIC_MAX_RESTARTS"] == "4"


def test_module(launch, tmp_path):
    """-m runs a module found in the working folder."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    job = launch(*TORCH, "-m", "pkg.train", "--lr", "1")
    assert job.finish() == 0
    job.seen(r"__main__ pkg\.train \['--lr', '1'\]")


def test_no_python_and_run_path(launch, script, tmp_path):
    """--no-python executes the target itself; --run-path runs it through runpy."""
    job = launch(*TORCH, "--no-python", "echo", "just", "echo")
    assert job.finish() == 0
    job.seen("just echo")
    job = launch(*TORCH, "--run-path", script("import sys; print('run', __name__, sys.argv)"), "a")
    assert job.finish() == 0
    job.seen(r"run __main__ \['.*script.py', 'a'\]")


def test_pass_local_rank(launch, script):
    """Scripts of torch.distributed.launch get --local-rank=N before their own arguments."""
    path = script("import sys; print('argv', sys.argv[1:])")
    job = launch(*TORCH, "--nproc-per-node", 2, "--pass-local-rank", path, "--lr", "1")
    assert job.finish() == 0
    for rank in (0, 1):
        job.seen(rf"\[\S+ {rank}\] argv \['--local-rank={rank}', '--lr', '1'\]")


SPEAK = """
import os, sys
print("out", os.environ["RANK"])
print("err", os.environ["RANK"], file=sys.stderr)
"""


def logs(folder: Path) -> dict[str, str]:
    (run,) = folder.iterdir()
    return {str(path.relative_to(run)): path.read_text() for path in run.rglob("*.log")}


def test_log_dir_writes_files_beside_the_console(launch, script, tmp_path):
    """--log-dir alone: each rank's streams are in files and on the console, with a prefix there only."""
    job = launch(*TORCH, "--nproc-per-node", 2, "--log-dir", tmp_path / "logs", "--job-id", "j", script(SPEAK))
    assert job.finish() == 0
    assert logs(tmp_path / "logs") == {
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/0/stderr.log": "err 0\n",
        "attempt_0/1/stdout.log": "out 1\n",
        "attempt_0/1/stderr.log": "err 1\n",
    }
    assert sorted(line.split("] ")[1] for line in job.out) == ["out 0", "out 1"]


def test_redirects_and_tee(launch, script, tmp_path):
    """-r hides from the console what it writes to files, -t shows both, by rank where asked."""
    job = launch(
        *TORCH, "--nproc-per-node", 2, "--log-dir", tmp_path / "logs", "-r", "0:3,1:2", "-t", "1:1", script(SPEAK)
    )
    assert job.finish() == 0
    assert logs(tmp_path / "logs") == {
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/0/stderr.log": "err 0\n",
        "attempt_0/1/stdout.log": "out 1\n",
        "attempt_0/1/stderr.log": "err 1\n",
    }
    assert [line.split("] ")[1] for line in job.out] == ["out 1"]
    assert not re.search(r"^\[.*err", job.text, re.MULTILINE)


def test_local_ranks_filter_and_prefix(launch, script):
    """Only the chosen ranks are shown, each line with the user's own prefix."""
    job = launch(
        *TORCH,
        "--nproc-per-node",
        2,
        "--local-ranks-filter",
        "1",
        "--log-prefix",
        "<${role_name}${local_rank}> ",
        script(SPEAK),
    )
    assert job.finish() == 0
    assert job.out == ["<default1> out 1"]


def test_duplicate_filters(launch, script, tmp_path):
    """Lines that match a filter are written to one file of the attempt as well."""
    job = launch(*TORCH, "--log-dir", tmp_path / "logs", "--duplicate-stdout-filters", "out", script(SPEAK))
    assert job.finish() == 0
    assert "out 0" in logs(tmp_path / "logs")["attempt_0/filtered_stdout.log"]


def test_each_attempt_has_its_own_files(launch, script, tmp_path):
    """A restart keeps the logs of the attempt before."""
    path = script(
        "import os, sys; print('try', os.environ['ELASTIC_GENERATION']); sys.exit(os.environ['ELASTIC_GENERATION'] == '1')"
    )
    job = launch(*TORCH, "--max-restarts", 1, "--no-standby", "--log-dir", tmp_path / "logs", path)
    assert job.finish() == 0
    found = logs(tmp_path / "logs")
    assert found["attempt_0/0/stdout.log"] == "try 1\n"
    assert found["attempt_1/0/stdout.log"] == "try 2\n"


def test_stdin_reaches_the_worker(launch, script):
    """A script that reads its standard input gets the command's."""
    reader, writer = os.pipe()
    os.write(writer, b"from outside\n")
    os.close(writer)
    job = launch(*TORCH, script("print('read', input())"), stdin=reader)
    os.close(reader)
    assert job.finish() == 0
    job.seen("read from outside")


def test_jobs_side_by_side(launch, script):
    """Several real torch jobs on one host do not get into each other's way."""
    text = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(os.environ["JOB"])])
dist.all_reduce(value)
print(f"sum {value.item():g}", flush=True)
dist.destroy_process_group()
"""
    path = script(text)
    jobs = [
        launch(*TORCH, "--nproc-per-node", 2, "--no-standby", path, env={"JOB": str(10**number)}) for number in range(3)
    ]
    for number, job in enumerate(jobs):
        assert job.finish() == 0
        job.seen(rf"sum {2 * 10**number}$", times=2)


def test_own_log_lines_have_one_form(launch, script):
    """Our lines are ISO time, level, module and message; an error carries node and job."""
    job = launch(*TORCH, "--node-id", "node7", "--job-id", "j1", script("raise SystemExit(4)"))
    assert job.finish() == 4
    ours = [line for line in job.lines if re.match(r"\d{4}-", line)]
    assert ours
    for line in ours:
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) \[\w+\] \S", line)
    (error,) = [line for line in ours if " ERROR " in line]
    assert error.endswith("(node node7, job j1)")


def test_dry_run_tells_the_truth(launch, script, tmp_path):
    """The variables that --dry-run shows are those that the workers get."""
    path = script(DUMP)
    flags = (*TORCH, "--nproc-per-node", 2, "--job-id", "j", "--node-id", "n", path)
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("elastic-launch")), "--dry-run", *map(str, flags)],
        capture_output=True, text=True, timeout=20, check=True, cwd=tmp_path,
    ).stdout  # fmt: skip
    assert launch(*flags).finish() == 0
    env = dumps(tmp_path, 2)[1]["env"]
    for name in ("RANK", "WORLD_SIZE", "ELASTIC_RANK", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"):
        assert re.search(rf"\b{name}={re.escape(env[name])}\b", shown), name


def test_quick_import_leaves_no_trace(launch, script):
    """After torch is imported, the collector runs again, and neither the path of finders nor torch's loader tell of us."""
    text = """
import gc, sys
import torch
print("collector", gc.isenabled(), gc.get_threshold()[0])
print("finders", [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path])
print("loader", sorted(vars(torch.__spec__.loader)), torch.__loader__ is torch.__spec__.loader)
"""
    path = script(text)
    fresh = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True).stdout
    job = launch(*TORCH, "--no-standby", "--log-prefix", "", path)
    assert job.finish() == 0
    assert "\n".join(job.out) + "\n" == fresh
