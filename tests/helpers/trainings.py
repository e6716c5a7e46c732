"""A small training in each framework: Adam, a schedule, dropout, running statistics, and a sampler."""

import random
import warnings

import numpy as np

from elastic_adapter.core.checkpoint.sampler import ElasticSampler
from helpers.frameworks import imported


class TorchTraining:
    name = "torch"
    # What is trained, if it is not the model itself.
    parallel = None
    files = ("model.pt", "optimizer.pt", "extra.pt", "rank-00000.pt")

    def __init__(self, *, width=8, size=50):
        torch = self.framework = imported("torch")
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 2)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.sampler = ElasticSampler(size, 4, seed=5)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002

    def turn(self):
        """One step, that depends on all that there is."""
        torch = self.framework
        batch = next(iter(self.sampler.batches()))
        factor = random.random() + np.random.rand()  # noqa: NPY002
        inputs = torch.rand(4, 8) + torch.tensor(batch, dtype=torch.float32).reshape(4, 1) / 50
        loss = (self.parallel or self.model)(inputs).square().sum() * factor
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def things(self):
        return {
            "model": self.parallel or self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "sampler": self.sampler,
        }

    def values(self):
        """All tensors of model and optimizer, as bytes."""
        found = {f"model/{name}": each for name, each in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer/{index}/{name}": each for name, each in state.items()}
        return {name: each.numpy().tobytes() for name, each in found.items()}

    def adapter(self):
        from elastic_adapter.adapters import pytorch

        return pytorch

    def load(self, path):
        return self.framework.load(str(path), weights_only=True)

    def save(self, state, path):
        self.framework.save(state, str(path))

    def wrapped(self):
        if self.framework.distributed.is_initialized():
            return self.framework.nn.parallel.DistributedDataParallel(self.model)
        return self.framework.nn.DataParallel(self.model)

    @classmethod
    def afresh(cls):
        return cls()


class PaddleTraining(TorchTraining):
    name = "paddle"
    files = ("model.pdparams", "optimizer.pdopt", "extra.pdparams", "rank-00000.pdparams")

    def __init__(self, *, width=8, size=50):
        paddle = self.framework = imported("paddle")
        paddle.seed(1)
        self.model = paddle.nn.Sequential(
            paddle.nn.Linear(8, width), paddle.nn.BatchNorm1D(width), paddle.nn.Dropout(0.5), paddle.nn.Linear(width, 2)
        )
        self.scheduler = paddle.optimizer.lr.StepDecay(0.01, 3)
        self.optimizer = paddle.optimizer.Adam(self.scheduler, parameters=self.model.parameters())
        self.sampler = ElasticSampler(size, 4, seed=5)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002

    def turn(self):
        paddle = self.framework
        batch = next(iter(self.sampler.batches()))
        factor = random.random() + np.random.rand()  # noqa: NPY002
        inputs = paddle.rand([4, 8]) + paddle.to_tensor(batch, dtype="float32").reshape([4, 1]) / 50
        loss = (self.parallel or self.model)(inputs).square().sum() * factor
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.scheduler.step()
        return float(loss)

    def values(self):
        """Names of an optimizer's tensors depend on how many models were made before."""
        found = {f"model/{name}": each.numpy().tobytes() for name, each in self.model.state_dict().items()}
        names = {each.name: name for name, each in self.model.state_dict().items()}
        for key, each in self.optimizer.state_dict().items():
            if key != "LR_Scheduler":
                owner = next(name for name in names if key.startswith(name))
                found[f"optimizer/{names[owner]}{key.removeprefix(owner)}"] = each.numpy().tobytes()
        return found

    def adapter(self):
        from elastic_adapter.adapters import paddlepaddle

        return paddlepaddle

    def load(self, path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.framework.load(str(path))

    def wrapped(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.framework.DataParallel(self.model)

    @classmethod
    def afresh(cls):
        """As the first one of a program: parameters are called the same each time."""
        with imported("paddle").utils.unique_name.guard():
            return cls()


TRAININGS = {"torch": TorchTraining, "paddle": PaddleTraining}
