"""The command line's words and the settings' origins."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_adapter.core.environment import neutral_env
from elastic_adapter.core.errors import UserError
from elastic_adapter.core.model import Assignment, CheckpointRef, Endpoint, Seat
from elastic_adapter.launchers.command_line import CommandLine, help_text, parse
from elastic_adapter.launchers.settings import GROUPS, SETTINGS, WORKER_VARIABLES, read


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        ("train.py", {}, "train.py"),
        ("--nproc-per-node 2 train.py --lr 0.1", {"nproc-per-node": "2"}, "train.py --lr 0.1"),
        ("--nproc_per_node=2 train.py", {"nproc-per-node": "2"}, "train.py"),
        ("--nproc 2 train.py", {"nproc-per-node": "2"}, "train.py"),
        ("--max_r 2 train.py", {"max-restarts": "2"}, "train.py"),
        ("--max_restart 2 --max-restarts 3 train.py", {"max_restart": "2", "max-restarts": "3"}, "train.py"),
        ("--max-restart=2 --elastic_l -1 train.py", {"max_restart": "2", "elastic_level": "-1"}, "train.py"),
        ("--t 3 --start spawn train.py", {"tee": "3", "start-method": "spawn"}, "train.py"),
        ("--np 2 --job_id j --log_dir d train.py", {"np": "2", "rdzv-id": "j", "log-dir": "d"}, "train.py"),
        ("--tee 3 -r 1 train.py", {"tee": "3", "redirects": "1"}, "train.py"),
        ("-t3 -r=1 train.py", {"tee": "3", "redirects": "1"}, "train.py"),
        ("-m --standalone package.train -m", {"module": "1", "standalone": "1"}, "package.train -m"),
        ("--job-id a --rdzv-id b train.py", {"rdzv-id": "b"}, "train.py"),
        ("--preload a,b --preload c train.py", {"preload": "a,b,c"}, "train.py"),
        ("--role a --role b train.py", {"role": "b"}, "train.py"),
        ("--max-restarts -1 train.py", {"max-restarts": "-1"}, "train.py"),
        ("--log-prefix=-x train.py", {"log-prefix": "-x"}, "train.py"),
        ("-- train.py --n", {}, "train.py --n"),
        ("train.py --no --l -- --nnodes_ 2", {}, "train.py --no --l -- --nnodes_ 2"),
        ("--no-python - x", {"no-python": "1"}, "- x"),
        ("--dry-run", {"dry-run": "1"}, ""),
        ("", {}, ""),
    ],
)
def test_parse(words: str, options: dict[str, str], rest: str) -> None:
    """Options end at the script, in either spelling, shortened or not; the rest is not looked at."""
    assert parse(words.split()) == CommandLine(options, tuple(rest.split()))


def test_empty_value() -> None:
    """An empty value is a value."""
    assert parse(["--log-prefix", "", "train.py"]).options == {"log-prefix": ""}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--nnode_s 2 train.py", ["unknown option --nnode_s", "did you mean --nnodes?", "--help"]),
        ("--zzz train.py", ["unknown option --zzz", "--help"]),
        ("-x train.py", ["unknown option -x"]),
        ("-mtrain", ["unknown option -mtrain"]),
        ("--n 2 train.py", ["--n could mean", "--nnodes", "--nproc-per-node", "in full"]),
        ("--nnodes", ["--nnodes", "expected a value", "got nothing"]),
        ("--log-dir -r 3 train.py", ["--log-dir", "expected a value (FOLDER)", "'-r'", "--log-dir=-r"]),
        ("--standalone=1 train.py", ["--standalone", "switch", "expected no value", "'1'"]),
    ],
)
def test_parse_errors(words: str, parts: list[str]) -> None:
    """A mistake in the options is one line that names the option and what was expected."""
    with pytest.raises(UserError) as caught:
        parse(words.split())
    assert_line(str(caught.value), parts)


@pytest.mark.parametrize(
    ("options", "environ", "name", "text", "origin"),
    [
        ({}, {}, "nnodes", "1:1", "default"),
        ({}, {}, "max-restarts", None, "default"),
        ({"nnodes": "2"}, {"PET_NNODES": "3"}, "nnodes", "2", "flag --nnodes"),
        ({}, {"PET_NNODES": "3"}, "nnodes", "3", "variable PET_NNODES"),
        ({}, {"ELASTIC_NNODES": "3", "PET_NNODES": "3"}, "nnodes", "3", "variable ELASTIC_NNODES"),
        ({}, {"PET_NNODES": ""}, "nnodes", "1:1", "default"),
        ({}, {"ELASTIC_JOB_ID": "a"}, "rdzv-id", "a", "variable ELASTIC_JOB_ID"),
        ({}, {"PET_STANDALONE": "1"}, "standalone", "1", "variable PET_STANDALONE"),
        ({"standalone": "1"}, {"PET_STANDALONE": "0"}, "standalone", "1", "flag --standalone"),
        ({}, {"ELASTIC_NO_STANDBY": "1"}, "no-standby", "1", "variable ELASTIC_NO_STANDBY"),
        ({}, {"PET_NUMA_BINDING": "node"}, "numa-binding", None, "default"),
        (
            {},
            {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "x"},
            "log-prefix",
            "x",
            "variable TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        ),
        ({}, {"ELASTIC_LOG_PREFIX": ""}, "log-prefix", "", "variable ELASTIC_LOG_PREFIX"),
        (
            {},
            {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"},
            "shutdown-timeout",
            "5",
            "variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        ),
        (
            {},
            {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", "PET_SHUTDOWN_TIMEOUT": "6"},
            "shutdown-timeout",
            "6",
            "variable PET_SHUTDOWN_TIMEOUT",
        ),
        ({}, {"LOGLEVEL": "DEBUG"}, "log-level", "DEBUG", "variable LOGLEVEL"),
        ({}, {}, "quiet-time", "3", "default"),
        ({}, {"ELASTIC_QUIET_TIME": "1"}, "quiet-time", "1", "variable ELASTIC_QUIET_TIME"),
        ({}, {"PET_QUIET_TIME": "1"}, "quiet-time", "3", "default"),
        ({}, {"ELASTIC_ETCD_PASSWORD": "x"}, "etcd-password", "x", "variable ELASTIC_ETCD_PASSWORD"),
        ({}, {"ELASTIC_ETCD_PASSWORD": ""}, "etcd-password", None, "default"),
    ],
)
def test_origin(options: dict[str, str], environ: dict[str, str], name: str, text: str | None, origin: str) -> None:
    """A flag wins over a variable, a variable over the default, and the origin is known."""
    given = read(options, environ)[name]
    assert (given.text, given.origin) == (text, origin)


def test_contradicting_variables() -> None:
    """Two variables of one setting that differ are one line with both names and values; a flag settles it."""
    environ = {"PET_NNODES": "2", "ELASTIC_NNODES": "1"}
    with pytest.raises(UserError) as caught:
        read({}, environ)
    assert_line(str(caught.value), ["PET_NNODES='2'", "ELASTIC_NNODES='1'", "--nnodes"])
    assert read({"nnodes": "1"}, environ)["nnodes"].text == "1"


@pytest.mark.parametrize("value", ["yes", "true", "2", ""])
def test_switch_variables(value: str) -> None:
    """A switch's variable is 0 or 1."""
    with pytest.raises(UserError) as caught:
        read({}, {"PET_STANDALONE": value})
    assert_line(str(caught.value), ["PET_STANDALONE", "expected 0 or 1", repr(value)])


def test_launcher_inside_a_worker() -> None:
    """What a worker is told about its place does not become a setting of a launcher that the worker starts."""
    assignment = Assignment(1, 0, 0, 1, 0, 1, 1, Endpoint("h", 1), "", CheckpointRef(1, 1, "u"))
    told = neutral_env(Seat(assignment, 0, "job", "node", 3))
    assert {name for setting in SETTINGS for name in setting.variables} & told.keys() == WORKER_VARIABLES
    values = read({}, {**told, "ELASTIC_NPROC_PER_NODE": "2"})
    assert {value.name for value in values.values() if value.explicit} == {"nproc-per-node"}


def test_password_has_no_flag() -> None:
    """A password on the command line would be seen by everybody on the machine."""
    with pytest.raises(UserError, match="unknown option --etcd-password"):
        parse(["--etcd-password", "x", "train.py"])


def test_table() -> None:
    """Names, flags and variables are unique, and each group has settings."""
    for column in ("name", "flags", "variables"):
        entries = [getattr(setting, column) for setting in SETTINGS]
        flat = [entry for each in entries for entry in (each if isinstance(each, tuple) else (each,))]
        assert len(flat) == len(set(flat))
    assert {setting.group for setting in SETTINGS} == set(GROUPS)


def test_help() -> None:
    """The help names every flag, has the groups and shows examples."""
    text = help_text()
    assert all(flag in text for setting in SETTINGS for flag in setting.flags)
    assert all(f"\n{group}:\n" in text for group in (*GROUPS, "examples"))


def test_migrating_guide() -> None:
    """The guide for users of torchrun says a word about every flag but Paddle's own."""
    guide = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    settings = [setting for setting in SETTINGS if setting.group != "paddle"]
    flags = {flag for setting in settings for flag in setting.flags} - {"-h", "--help"}
    assert {flag for flag in flags if f"`{flag}`" not in guide} == set()


def test_guide_for_paddle() -> None:
    """The guide for users of Paddle says a word about each of its flags and variables."""
    guide = (Path(__file__).parents[2] / "docs" / "paddle.md").read_text()
    flags = {flag for setting in SETTINGS if setting.group == "paddle" for flag in setting.flags}
    variables = {name for setting in SETTINGS for name in setting.paddle}
    assert {name for name in flags | variables if f"`{name}`" not in guide} == set()


def assert_line(message: str, parts: list[str]) -> None:
    assert "\n" not in message
    for part in parts:
        assert part in message
