"""A training step of `SampledSoftmaxLoss` on several processes."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lshkit.sampling import SampledSoftmaxLoss

N_CLASSES, N_FEATURES, ROWS = 50, 6, 8


class Classifier(nn.Module):
    """All classes are in the sample: the loss is exact, on any tables."""

    def __init__(self, sparse):
        super().__init__()
        self.body = nn.Linear(N_FEATURES, N_FEATURES)
        self.embedding = nn.Embedding(N_CLASSES, N_FEATURES, sparse=sparse)
        options = {"n_samples": N_CLASSES, "rehash_every": 1, "sparse": sparse}
        self.loss = SampledSoftmaxLoss(
            N_FEATURES, N_CLASSES, weight=self.embedding.weight, **options
        )

    def forward(self, rows, target):
        return self.loss(self.body(rows), target)


def steps(group, wrap, sparse):
    """Losses of two steps and the weights after them, of this rank's half of each batch."""
    torch.manual_seed(0)
    rows = torch.randn(2, ROWS, N_FEATURES)
    target = torch.randint(N_CLASSES, (2, ROWS))
    model = Classifier(sparse)
    if wrap == "ddp":
        model = DistributedDataParallel(model, process_group=group)
    elif wrap == "fsdp":
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    if group is not None:
        rank = torch.distributed.get_rank(group)
        rows, target = (x.chunk(group.size(), 1)[rank] for x in (rows, target))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x, y in zip(rows, target, strict=True):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in model.parameters())
    return losses, [x.detach().clone() for x in weights]
