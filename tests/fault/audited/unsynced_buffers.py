"""Gradients are correct, but the running observation statistics are not synchronized."""

import torch
import torch.distributed as dist
from torch import nn


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.head = nn.Linear(4, 2)

    def forward(self, obs):
        self.mean.lerp_(obs.mean(0), 0.1)
        return self.head(obs - self.mean)


dist.init_process_group("gloo")
torch.manual_seed(0)
agent = nn.parallel.DistributedDataParallel(Normalised(), broadcast_buffers=False)
optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(10):
    optimizer.zero_grad()
    agent(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
