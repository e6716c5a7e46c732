"""A Link that a test plays: it does what it is told, and remembers what it was asked for."""

from pathlib import Path

from elastic_adapter.core.checkpoint.link import NotRestored, Post
from elastic_adapter.core.checkpoint.saver import publish, put_together, save


class PlayedLink:
    """What is staged is written at once, in this process, unless the test wants to do that itself."""

    def __init__(self, folder, *, rank=0, world_size=1, generation=3, token="run1", busy=(), resume=None, writes=True):
        self.post = Post(rank, world_size, generation, Path(folder), "slot-0", token, "job", "7", frozenset(busy))
        self.named = resume
        self.writes = writes
        # By the number of steps that are done.
        self.asks = {}
        # What went wrong, once what was staged is written: by the number of steps.
        self.fails = {}
        self.calls = []
        self.buffers = []
        self.told = []

    def open(self, root):
        self.calls.append("open")
        return self.post

    def resume(self, find):
        if self.named is not None:
            return self.named
        self.found = find()
        return next(iter(self.found.names), None)

    def not_restored(self, name, why):
        self.calls.append(("not_restored", name, why))
        return NotRestored(f"{name}: {why}")

    def attend(self):
        self.calls.append("attend")

    def asked(self, done):
        return self.asks.get(done)

    def want(self, reason):
        self.calls.append(("want", reason))

    def note(self, words):
        self.calls.append(("note", words))

    def staged(self, buffer, root, step, finishing):
        self.calls.append(("staged", step))
        self.buffers.append(buffer)
        if (trouble := self.fails.pop(step, None)) is not None:
            save(buffer)
            self.told.append(trouble)
        elif self.writes:
            save(buffer)
            which = {"root": root, "step": step, "generation": self.post.generation, "token": self.post.token}
            put_together(**which, world_size=self.post.world_size, verify=finishing.verify, md5=finishing.md5)
            publish(**which, keep_last=finishing.keep_last, keep_every=finishing.keep_every)

    def missed(self, step, why):
        self.calls.append(("missed", step, why))

    def hold(self, seconds):
        self.calls.append("hold")

    def settled(self, seconds=None):
        return True

    def troubles(self):
        told, self.told = tuple(self.told), []
        return told

    def close(self):
        self.calls.append("close")
