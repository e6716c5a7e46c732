"""Checkpoints without our launcher: who is asked, and what ranks tell each other by files and by their group."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_adapter.core import frames
from elastic_adapter.core.checkpoint import own_link
from elastic_adapter.core.checkpoint.buffers import beside
from elastic_adapter.core.checkpoint.connect import connect
from elastic_adapter.core.checkpoint.link import Asked, Finishing, Found, NotRestored
from elastic_adapter.core.checkpoint.own_link import OwnLink
from elastic_adapter.core.checkpoint.shared_folder import sweep
from elastic_adapter.core.checkpoint.store import Store
from elastic_adapter.core.checkpoint.writers import is_in_use, own_token, still_runs
from elastic_adapter.core.errors import UserError


class Groups:
    """A world of threads: each rank has its group, and rank 0's values reach all."""

    def __init__(self, size):
        self.size = size
        self.values = [None]
        self.barrier = threading.Barrier(size)

    def of(self, rank):
        def broadcast(value):
            if rank == 0:
                self.values = [value]
            self.barrier.wait(10)
            found = self.values[0]
            self.barrier.wait(10)
            return found

        return SimpleNamespace(place=lambda: (rank, self.size), broadcast=broadcast)


def in_all(size, work):
    """What each rank's work gives, or raises."""
    results = [None] * size

    def run(rank):
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.fixture
def links(tmp_path):
    groups = Groups(2)
    links = [OwnLink(groups.of(rank), polled=True, memory=tmp_path) for rank in range(2)]
    posts = in_all(2, lambda rank: links[rank].open(str(tmp_path / "root")))
    yield links, posts
    in_all(2, lambda rank: links[rank].close())


def test_places(links):
    """Each has its own, and one token is everybody's."""
    _, posts = links
    assert [(post.rank, post.world_size, post.generation) for post in posts] == [(0, 2, 0), (1, 2, 0)]
    assert posts[0].token == posts[1].token
    assert posts[0].folder != posts[1].folder


def test_what_rank_0_finds_is_everybody_s(links):
    """A name, nothing, or its error."""
    links, _ = links

    def not_asked():
        raise AssertionError("only rank 0 looks")

    def failing():
        raise NotRestored("none is whole")

    for find, expected in ((lambda: Found(("b", "a")), "b"), (Found, None)):
        assert in_all(2, lambda rank, find=find: links[rank].resume(not_asked if rank else find)) == [expected] * 2
    own, other = in_all(2, lambda rank: links[rank].resume(not_asked if rank else failing))
    assert str(own) == "none is whole"
    assert isinstance(other, NotRestored)
    assert str(other) == "rank 0 did not restore: NotRestored: none is whole"


def test_they_agree_on_the_step(links):
    """Rank 0 wants to save, and all do so at the same step."""
    links, _ = links

    def steps(rank):
        found = []
        for done in range(1, 6):
            if (rank, done) == (0, 2):
                links[0].want("it is time")
            # What would come about every two seconds comes with every step.
            links[rank]._checked = None
            found.append(links[rank].asked(done))
        return found

    first, second = in_all(2, steps)
    assert first == second == [None, Asked("it is time"), None, None, None]


def test_a_part_that_will_not_come(links, tmp_path):
    """Rank 0 learns of it, and does not wait for it."""
    links, posts = links
    links[1].missed(5, "it has no memory")
    draft = Store(tmp_path / "root").begun(5, 0, posts[0].token)
    assert os.listdir(draft.path) == ["missed.1"]
    # A buffer that is none: what matters is that the answer comes.
    links[0]._saver.ask = lambda requests: [{"saved": {}} for _ in requests]
    links[0].staged(tmp_path / "buffer", str(tmp_path / "root"), 5, Finishing())
    assert links[0].settled(30)
    assert links[0].troubles() == ("step 5 is not saved: rank 1: it has no memory",)
    assert links[0].troubles() == ()


def test_parts_that_never_come(links, tmp_path, monkeypatch, caplog):
    """As where only rank 0 saves: who is missing is named, four drafts are there at most, and the end is not late."""
    links, posts = links
    store = Store(tmp_path / "root")
    answers = {"save": {"saved": {}}, "prepare": {"failed": "rank 1 of 2 wrote nothing"}, "publish": {"failed": "no"}}
    links[0]._saver.ask = lambda requests: [answers[next(iter(each))] for each in requests]
    for step in range(1, 7):
        store.draft(step, 0, posts[0].token)
        links[0].staged(tmp_path / "buffer", str(store.root), step, Finishing())
    told = []
    while len(told) < 2:
        told += links[0].troubles()
    assert told == [f"step {step} is not saved: rank 1 of 2 wrote nothing" for step in (1, 2)]
    assert not links[0].settled(0.2)
    assert sorted(os.listdir(store.root)) == [store.begun(step, 0, posts[0].token).path.name for step in (3, 4, 5, 6)]
    monkeypatch.setattr(own_link, "_LAST_PARTS_S", 0.2)
    monkeypatch.setattr(own_link, "_SILENT_S", 0.1)
    links[0].close()
    assert "waiting for checkpoints that are still being written, or for the parts of other ranks" in caplog.text
    assert len(links[0].troubles()) == 4
    assert os.listdir(store.root) == []


def test_a_step_that_comes_again(links, tmp_path):
    """A training that went back: what a rank told of that step, and wrote for it, the first time does not count."""
    links, posts = links
    draft = Store(tmp_path / "root").draft(5, 0, posts[0].token)
    asked, first, second = [], *(threading.Event() for _ in range(2))

    def of_0(requests):
        asked.extend(name for request in requests for name in request)
        (draft.path / "part.0.json").write_text("the second time")
        return [{"saved": {}} for _ in requests]

    def of_1(requests):
        first.set()
        assert second.wait(30)
        (draft.path / "part.1.json").write_text("the second time")
        return [{"saved": {}} for _ in requests]

    links[0]._saver.ask, links[1]._saver.ask = of_0, of_1
    links[1].missed(5, "it has no memory")
    for rank in range(2):
        (draft.path / f"part.{rank}.json").write_text("the first time")
    links[1].staged(tmp_path / "buffer", str(tmp_path / "root"), 5, Finishing())
    assert os.listdir(draft.path) == ["part.0.json"]
    assert first.wait(30)
    links[0].staged(tmp_path / "buffer", str(tmp_path / "root"), 5, Finishing())
    waited = not links[0].settled(0.3)
    second.set()
    assert waited
    assert links[0].settled(30)
    assert links[0].troubles() == ()
    assert asked == ["save", "prepare", "publish"]


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale file handle"), RuntimeError("can't start new thread")])
@pytest.mark.parametrize("where", ["_requests", "_draft"])
def test_an_error_that_nobody_expects(links, tmp_path, monkeypatch, where, error):
    """It is the end of this save, in words, and not of those that come later; nor does anybody wait for it."""
    links, _ = links
    links[0]._saver.ask = lambda requests: [{"saved": {}} for _ in requests]
    real, failures = getattr(links[0], where), [error]

    def failing(*args, **options):
        if failures and threading.current_thread() is not threading.main_thread():
            raise failures.pop()
        return real(*args, **options)

    monkeypatch.setattr(links[0], where, failing)
    links[0].staged(tmp_path / "buffer", str(tmp_path / "root"), 5, Finishing())
    assert links[0].settled(30)
    (told,) = links[0].troubles()
    assert told.startswith("step 5 is not saved: ")
    assert told.endswith(str(error.args[-1]))
    links[1].missed(6, "it has no memory")
    links[0].staged(tmp_path / "buffer", str(tmp_path / "root"), 6, Finishing())
    assert links[0].settled(30)
    assert links[0].troubles() == ("step 6 is not saved: rank 1: it has no memory",)


def test_an_answer_that_is_none(tmp_path, monkeypatch):
    """What comes after it is not taken for the answer to something else: another saver is asked."""
    link = OwnLink(None, memory=tmp_path)
    link.open(str(tmp_path / "root"))
    link.attend()
    wait_until(lambda: link._saver.pid is not None)
    first, read = link._saver.pid, frames.read
    with monkeypatch.context() as patched:
        patched.setattr(frames, "read", lambda _: json.loads("no json"))
        with pytest.raises(ValueError, match="Expecting value"):
            link._saver.ask([{"save": "/one"}])
    assert frames.read is read
    (answer,) = link._saver.ask([{"save": "/another"}])
    assert answer["path"] == "/another"
    assert link._saver.pid != first
    link.close()


@pytest.mark.parametrize(
    ("variable", "call"), [("WORLD_SIZE", "init_process_group"), ("PADDLE_TRAINERS_NUM", "init_parallel_env")]
)
def test_a_group_that_is_not_there_yet(monkeypatch, tmp_path, variable, call):
    """Each rank would take itself for the only one: that is an error."""
    monkeypatch.setenv(variable, "4")
    with pytest.raises(
        UserError, match=rf"{variable} is 4, and there is no group of 4 ranks yet: call .*{call}\(\) before"
    ):
        OwnLink(SimpleNamespace(place=lambda: None), memory=tmp_path).open(str(tmp_path))


PROGRAM = """
import os, sys, time
from pathlib import Path
from elastic_adapter.core.checkpoint.buffers import beside
from elastic_adapter.core.checkpoint.own_link import OwnLink
link = OwnLink(None, memory=Path(sys.argv[1]))
post = link.open(sys.argv[2])
link.attend()
(post.folder / "buffer").write_bytes(b"x")
for path in beside(Path(sys.argv[2]), post.slot, post.token):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
while link._saver.pid is None:
    time.sleep(0.01)
print(post.folder, link._saver.pid, flush=True)
time.sleep(60 if sys.argv[3] == "stays" else 0)
"""


def program(tmp_path, how, *before):
    """One that runs without our launcher, and what it says: its folder, and its saver."""
    argv = [*before, sys.executable, "-c", PROGRAM, str(tmp_path), str(tmp_path / "root"), how]
    started = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    folder, saver = started.stdout.readline().split()
    return started, Path(folder), int(saver)


def wait_until(is_so):
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def apart():
    """What a command begins with whose processes are to know no others, and be known by no others by their numbers."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*command, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("processes can't be hidden from each other here")
    return command


def test_processes_that_do_not_see_each_other(apart):
    """Containers may share the name of their machine: what can't be seen is not said to be gone."""
    script = f"from {still_runs.__module__} import still_runs, own_token\n"
    script += f"print(still_runs({own_token()!r}), still_runs(own_token()), own_token())"
    argv = [*apart, sys.executable, "-c", script]
    seen, itself, name = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert (seen, itself) == ("None", "True")
    assert still_runs(name) is None


def test_programs_that_do_not_see_each_other(tmp_path, apart):
    """Containers may share memory, and not know each other's processes: nobody's buffers are removed for that."""
    one, folder, _ = program(tmp_path, "stays")
    with one:
        other, _, _ = program(tmp_path, "ends", *apart)
        with other:
            code = other.wait(30)
        still_there = (folder / "buffer").exists()
        one.kill()
    assert (code, still_there) == (0, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_is_killed_leaves_no_buffers(tmp_path, number):
    """Its saver does what it was asked for, and then takes the buffers away; nobody else does so before."""
    one, folder, saver = program(tmp_path, "stays")
    with one:
        os.kill(saver, signal.SIGSTOP)
        one.send_signal(number)
        one.wait(30)
        # As the next program does.
        sweep(tmp_path)
        still_there = (folder / "buffer").exists(), len(os.listdir(tmp_path / "root"))
        os.kill(saver, signal.SIGCONT)
    assert still_there == (True, 2)
    wait_until(lambda: not folder.exists() and not os.listdir(tmp_path / "root"))


def test_whose_a_buffer_beside_checkpoints_is(tmp_path):
    """An agent's of this machine, as long as that runs; on other machines it is this run's, or has to grow old."""
    me = own_token()
    gone, elsewhere = f"{me.rpartition('-')[0]}-1", f"x{me}"
    for owner, token, age_s, used in (
        (me, "run1", 9999, True),
        (me, "run2", 9999, True),
        (gone, "run1", 0, False),
        (gone, "run-2-7", 0, False),
        (elsewhere, "run1", 9999, True),
        (elsewhere, "run2", 0, True),
        (elsewhere, "run2", 9999, False),
    ):
        path = beside(tmp_path, f"slot-0-12ab34cd@{owner}", token)[0]
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
        assert is_in_use(path, 3, "run1") is used, path


def test_who_only_restores_needs_no_saver(tmp_path):
    """It would take the CPUs from the restore."""
    link = OwnLink(None, memory=tmp_path)
    folder = link.open(str(tmp_path / "root")).folder
    assert link.resume(lambda: Found(())) is None
    link.close()
    assert (link._saver.pid, folder.exists()) == (None, False)


def test_a_saver_that_is_cut_off_leaves_the_buffers(tmp_path):
    """As long as the program lives: another one is to write them."""
    link = OwnLink(None, memory=tmp_path)
    folder = link.open(str(tmp_path / "root")).folder
    link.attend()
    wait_until(lambda: link._saver.pid is not None)
    link._saver.close()
    assert folder.exists()
    link.close()
    assert not folder.exists()


class TestWhoIsAsked:
    """The agent, by its worker; by nobody else."""

    @pytest.fixture(autouse=True)
    def agent(self, monkeypatch, tmp_path):
        monkeypatch.setitem(
            sys.modules,
            "elastic_adapter.core.checkpoint.agent_link",
            SimpleNamespace(AgentLink=lambda group: "the agent's"),
        )
        monkeypatch.setenv("ELASTIC_NOTICES", f"{tmp_path}/socket")
        monkeypatch.setenv("ELASTIC_GENERATION", "2")
        monkeypatch.setenv("ELASTIC_SAVE_PAGE", "/some/page")
        monkeypatch.setenv("ELASTIC_PROGRESS", str(tmp_path / "progress"))

    @pytest.mark.parametrize("owner", [0, os.getpid()], ids=["nobody", "this one"])
    def test_a_worker(self, tmp_path, owner):
        (tmp_path / "progress").write_bytes(struct.pack("qqqq", 1, 0, 0, owner))
        assert connect(SimpleNamespace(), "/checkpoints") == "the agent's"

    def test_a_second_folder(self, tmp_path, caplog):
        """The launcher goes on from one checkpoint, and so has one folder: the others are told that they are not it."""
        for root, served in (("/a", True), ("/b", False), ("/a", True), ("/b", False)):
            assert (connect(SimpleNamespace(), root) == "the agent's") is served
        assert "the launcher keeps the checkpoints of /a; those of /b are saved and restored as without" in caplog.text

    def test_a_child_of_a_worker(self, tmp_path):
        """It is no rank, although its variables say so."""
        (tmp_path / "progress").write_bytes(struct.pack("qqqq", 1, 0, 0, os.getppid()))
        link = connect(SimpleNamespace(place=lambda: (3, 8)), str(tmp_path))
        post = link.open(str(tmp_path))
        link.close()
        assert (post.rank, post.world_size) == (0, 1)

    def test_without_the_launcher(self, monkeypatch):
        monkeypatch.delenv("ELASTIC_SAVE_PAGE")
        assert isinstance(connect(SimpleNamespace(), "/checkpoints"), OwnLink)
