"""PufferLib's PPO at the common work. run.py makes the virtual environment and calls

python benchmarks/peers/puffer.py --net cnn --steps 32768
"""

import os
from importlib.metadata import version

import pufferlib
import torch
import workload
from pufferlib import pufferl
from torch import nn

pufferl.ADVANTAGE_CUDA = False  # it believes in a GPU wherever it finds nvcc, and run.py built it without


class Boards(pufferlib.PufferEnv):
    """All boards behind one call; PufferLib reads the kernel's own memory, so nothing is copied on the way."""

    def __init__(self, task):
        self.task, self.num_agents = task, task.num_envs
        self.single_observation_space, self.single_action_space = task.observation_space, task.action_space
        step = task.step(torch.zeros(task.num_envs, dtype=torch.int64))
        super().__init__(None)
        self.observations, self.rewards = step.obs.numpy(), step.reward.numpy()
        self.terminals, self.truncations = step.terminated.numpy(), step.truncated.numpy()

    def reset(self, seed=None):
        self.task.reset()
        return self.observations, []

    def step(self, actions):
        self.task.step(torch.from_numpy(actions))
        return self.observations, self.rewards, self.terminals, self.truncations, []

    def close(self):
        self.task.close()


class Net(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.trunk, features = workload.trunk(net)
        self.policy_head, self.value_head = nn.Linear(features, 4), nn.Linear(features, 1)

    def forward(self, planes, state=None):
        seen = self.trunk(planes.float())
        return self.policy_head(seen), self.value_head(seen)

    forward_eval = forward


class Quiet(pufferl.PuffeRL):
    """Without the dashboard, which it draws four times a second."""

    def print_dashboard(self, *args, **kwargs):
        pass


def main():
    args = workload.arguments()
    torch.manual_seed(0)
    net = Net(args.net)
    settings = {
        "env": "snake",
        "seed": 0,
        "torch_deterministic": True,
        "cpu_offload": False,
        "device": "cpu",
        "optimizer": "adam",
        "anneal_lr": False,
        "precision": "float32",
        "total_timesteps": 10**12,
        "learning_rate": workload.RATE,
        "gamma": workload.GAMMA,
        "gae_lambda": workload.LAMBDA,
        "update_epochs": workload.EPOCHS,
        "clip_coef": workload.CLIP,
        "vf_coef": 2 * workload.VALUE,  # it halves the squared error once more
        "vf_clip_coef": 0.2,
        "max_grad_norm": workload.MAX_NORM,
        "ent_coef": workload.ENTROPY,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": workload.EPSILON,
        "data_dir": os.devnull,
        "checkpoint_interval": 10**9,
        "batch_size": workload.ITERATION,
        "minibatch_size": workload.BATCH,
        "max_minibatch_size": workload.BATCH,
        "bptt_horizon": workload.HORIZON,
        "compile": False,
        "vtrace_rho_clip": 1.0,
        "vtrace_c_clip": 1.0,
        "prio_alpha": 0.0,  # every segment as likely as the others, which is PPO
        "prio_beta0": 1.0,
        "use_rnn": False,
    }
    agent = Quiet(settings, Boards(workload.boards()), net)

    def train(iterations):
        for _ in range(iterations):
            agent.evaluate()
            agent.train()

    workload.measure("PufferLib", version("pufferlib"), args, workload.count_parameters(net), train)
    agent.utilization.stop()


if __name__ == "__main__":
    main()
