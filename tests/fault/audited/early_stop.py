"""One process leaves the training loop early because of a rank-local condition."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(10):
    optimizer.zero_grad()
    loss = model(torch.randn(32, 4)).square().mean()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 1 and step == 2:  # as an early stop on a local KL would do
        break
