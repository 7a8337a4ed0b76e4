"""Correct DDP: called through the wrapper, with different data on each process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 4), torch.randn(256, 2))
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2)))
optimizer = torch.optim.Adam(model.parameters())
for x, y in DataLoader(data, batch_size=16, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
