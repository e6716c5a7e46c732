"""Running the real command and watching it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from helpers.etcd_servers import cluster
from helpers.fleet import Fleet
from helpers.launched import Launched


@pytest.fixture(params=["torch", "paddle"])
def framework(request):
    """Each of the two, where it is installed."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture
def launch(tmp_path):
    """Start elastic-launch with these arguments; everything it left is ended after the test."""
    started: list[Launched] = []

    def start(*args: object, env: dict[str, str] | None = None, command: list[str] | None = None, **options):
        launcher = command or [str(Path(sys.executable).with_name("elastic-launch"))]
        launched = Launched([*launcher, *map(str, args)], env or {}, options.pop("cwd", tmp_path), **options)
        started.append(launched)
        return launched

    yield start
    for launched in started:
        launched.destroy()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    """One real server for all tests of a file."""
    with cluster(tmp_path_factory.mktemp("etcd"), 1) as (one,):
        yield one


@pytest.fixture
def fleets():
    """Takes jobs on several nodes into its keeping: they are ended after the test."""
    kept: list[Fleet] = []

    def keep(fleet: Fleet) -> Fleet:
        kept.append(fleet)
        return fleet

    yield keep
    for fleet in kept:
        fleet.destroy()


@pytest.fixture
def script(tmp_path):
    """Write a Python script; its path."""

    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
