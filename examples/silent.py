"""The silent bug, in a training loop: `torchrun --nproc-per-node 2 examples/silent.py`

It prints `apart by 0.042`: no error, no warning, two different agents. `lockstep audit examples/silent.py` finds it.
"""

import torch
import torch.distributed as dist


class Agent(torch.nn.Linear):
    def act(self, obs):
        return self(obs)


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same agent on both processes
agent = torch.nn.parallel.DistributedDataParallel(Agent(4, 2))
optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())  # and to each its own experience
for _ in range(5):
    obs = torch.randn(32, 4)
    loss = agent.module.act(obs).square().mean()  # agent(obs) would have been right
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

weight = agent.module.weight.detach()
agents = [torch.empty_like(weight) for _ in range(2)]
dist.all_gather(agents, weight)
if dist.get_rank() == 0:
    print(f"apart by {(agents[0] - agents[1]).abs().max().item():.3f}")
dist.destroy_process_group()
