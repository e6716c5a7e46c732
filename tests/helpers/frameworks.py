"""Scripts of both frameworks begin with one of these: ``join()`` gives rank and size, ``summed`` is an all_reduce."""

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
