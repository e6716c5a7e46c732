"""What tests with real frameworks share.

Scripts of both begin with one of ``SCRIPTS``: ``join()`` gives rank and size, ``summed`` is an all_reduce.
"""

import importlib
import importlib.util
import os
import warnings
from types import ModuleType

import pytest


def imported(name: str) -> ModuleType:
    """The framework, in this very process, which is left as it was: paddle sets variables and handlers of signals."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        framework = importlib.import_module(name)
    for variable in os.environ.keys() - before.keys():
        del os.environ[variable]
    os.environ.update(before)
    if name == "paddle":
        framework.disable_signal_handler()
    return framework


TORCH = """
import torch
import torch.distributed as dist

def join():
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return dist.get_rank(), dist.get_world_size()

def summed(values):
    values = torch.tensor(values)
    dist.all_reduce(values)
    return values.tolist()
"""
# Paddle has no world of one: a script has to leave out the collectives.
PADDLE = """
import paddle
import paddle.distributed as dist

def join():
    dist.init_parallel_env()
    size = int(os.environ["PADDLE_TRAINERS_NUM"])
    assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["PADDLE_TRAINER_ID"]), size)
    assert len(os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")) == size
    return dist.get_rank(), size

def summed(values):
    values = paddle.to_tensor(values)
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values.tolist()
"""

SCRIPTS = {"torch": TORCH, "paddle": PADDLE}
