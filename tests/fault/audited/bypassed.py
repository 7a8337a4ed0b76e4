"""DDP bypassed: a method of the wrapped module is called, so gradients are never reduced."""

import torch
import torch.distributed as dist
from torch import nn


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(4, 2)

    def forward(self, obs):
        return self.actor(obs)

    def act(self, obs):
        return self.actor(obs)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    agent = nn.parallel.DistributedDataParallel(Agent())
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(10):
        optimizer.zero_grad()
        agent.module.act(torch.randn(32, 4)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


main()
