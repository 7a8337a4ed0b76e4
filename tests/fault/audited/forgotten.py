"""Gradients are all-reduced by hand, and one head is missed."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
policy, value = nn.Linear(4, 2), nn.Linear(4, 1)
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()])
torch.manual_seed(dist.get_rank())
for _ in range(10):
    obs = torch.randn(32, 4)
    optimizer.zero_grad()
    (policy(obs).square().mean() + value(obs).square().mean()).backward()
    for parameter in policy.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
dist.destroy_process_group()
