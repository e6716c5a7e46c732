"""The real data loaders of both frameworks, with processes that read ahead, over an elastic sampler."""

import importlib.util
import json
import subprocess
import sys

import pytest

TORCH = """
from torch.utils.data import DataLoader, Dataset

def loader(sampler, watched, lists):
    options = {"batch_sampler": watched} if lists else {"sampler": watched, "batch_size": 4}
    return DataLoader(Numbers(), num_workers=2, prefetch_factor=3, persistent_workers=True, **options)
"""
PADDLE = """
from paddle.io import DataLoader, Dataset

def loader(sampler, watched, lists):
    return DataLoader(Numbers(), batch_sampler=watched, num_workers=2, prefetch_factor=3, persistent_workers=True)
"""
# Three generations of 1, 3 and 2 ranks: each is left in the middle, and the next one goes on from what was saved last.
STORY = """
import json, sys
from elastic_adapter.core.checkpoint.sampler import ElasticSampler

SIZE = 53

class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index

class Watched:
    def __init__(self, source):
        self.source, self.read = source, 0

    def __iter__(self):
        for each in self.source:
            self.read += 1
            yield each

    def __len__(self):
        return len(self.source)

def live(world_size, state, used, steps, save_after, last, lists):
    samplers = [ElasticSampler(SIZE, 4, rank=rank, world_size=world_size, last=last) for rank in range(world_size)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    sources = [Watched(sampler.batches() if lists else sampler) for sampler in samplers]
    loaders = [loader(sampler, source, lists) for sampler, source in zip(samplers, sources)]
    saved, done = (state, used), 0
    while samplers[0].epoch < 2:
        assert len({len(each) for each in loaders}) == 1
        for batches in zip(*loaders, strict=True):
            epoch = samplers[0].epoch
            used = used + [(epoch, int(index)) for batch in batches for index in batch]
            for sampler in samplers:
                sampler.advance()
            done += 1
            if done == save_after:
                saved = samplers[0].state_dict(), used
            if done == steps:
                ahead = sources[0].read > done * (1 if lists else 4)
                return *saved, ahead
        assert all(sampler.epoch > epoch for sampler in samplers), "a loader's epoch is the sampler's"
    return samplers[0].state_dict(), used, False

if __name__ == "__main__":
    last, lists = sys.argv[1], sys.argv[2] == "lists"
    state, used, ahead = live(1, None, [], 5, 3, last, lists)
    state, used, too = live(3, state, used, 6, 5, last, lists)
    state, used, _ = live(2, state, used, None, None, last, lists)
    print("STORY", json.dumps({"state": state, "used": used, "ahead": [ahead, too]}))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("framework", "last", "form"),
    [("torch", "pad", "lists"), ("torch", "drop", "indices"), ("paddle", "pad", "lists"), ("paddle", "drop", "lists")],
)
def test_what_was_read_ahead_is_not_lost(tmp_path, framework, last, form):
    """Every sample once as of the checkpoint, although the loaders had read further when they were left."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    script = tmp_path / "story.py"
    script.write_text((TORCH if framework == "torch" else PADDLE) + STORY)
    argv = [sys.executable, str(script), last, form]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    story = next(line for line in ended.stdout.splitlines() if line.startswith("STORY "))
    told = json.loads(story.removeprefix("STORY "))
    assert told["ahead"] == [True, True]
    # The first epoch ends in the world of 3 with 5 samples left, the second in the world of 2 with 1 (or 5, dropped).
    epochs = [[index for epoch, index in told["used"] if epoch == number] for number in range(2)]
    extra = [len(used) - len(set(used)) for used in epochs]
    missing = [53 - len(set(used)) for used in epochs]
    if last == "pad":
        assert (extra, missing) == ([1, 1], [0, 0])
        assert (told["state"]["padded"], told["state"]["dropped"]) == (2, 0)
    else:
        assert (extra, missing) == ([0, 0], [5, 5])
        assert (told["state"]["padded"], told["state"]["dropped"]) == (0, 10)
