"""skrl's PPO at the common work. run.py makes the virtual environment and calls

python benchmarks/peers/skrl_peer.py --net cnn --steps 32768
"""

from importlib.metadata import version

import torch
import workload
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import Wrapper
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer
from torch import nn


class Boards(Wrapper):
    """All boards behind one call; skrl wants flat observations and a column for everything else."""

    def reset(self):
        return self._env.reset().flatten(1).clone(), {}

    def step(self, actions):
        step = self._env.step(actions.view(-1))
        columns = (step.reward, step.terminated, step.truncated)
        # Copies: the kernel writes the next step into the same memory before skrl has stored this one.
        return step.obs.flatten(1).clone(), *(column.unsqueeze(1).clone() for column in columns), {}

    def state(self):
        return None

    def render(self):
        return None

    def close(self):
        self._env.close()


class Net(CategoricalMixin, DeterministicMixin, Model):
    """Policy and value on one trunk, evaluated once for both: the way skrl's manual shows it."""

    def __init__(self, env, net):
        Model.__init__(
            self, observation_space=env.observation_space, action_space=env.action_space, device=torch.device("cpu")
        )
        CategoricalMixin.__init__(self, unnormalized_log_prob=True, role="policy")
        DeterministicMixin.__init__(self, role="value")
        self.trunk, features = workload.trunk(net)
        self.policy_head, self.value_head = nn.Linear(features, 4), nn.Linear(features, 1)
        self.seen = None

    def act(self, inputs, *, role=""):
        mixin = CategoricalMixin if role == "policy" else DeterministicMixin
        return mixin.act(self, inputs, role=role)

    def compute(self, inputs, role=""):
        planes = (-1, 3, workload.SIZE, workload.SIZE)
        if role == "policy":
            self.seen = self.trunk(inputs["observations"].float().view(planes))
            return self.policy_head(self.seen), {}
        seen = self.trunk(inputs["observations"].float().view(planes)) if self.seen is None else self.seen
        self.seen = None
        return self.value_head(seen), {}


def main():
    args = workload.arguments()
    torch.manual_seed(0)
    env = Boards(workload.boards())
    net = Net(env, args.net)
    config = PPO_CFG(
        rollouts=workload.HORIZON,
        learning_epochs=workload.EPOCHS,
        mini_batches=workload.ITERATION // workload.BATCH,
        discount_factor=workload.GAMMA,
        gae_lambda=workload.LAMBDA,
        learning_rate=workload.RATE,
        grad_norm_clip=workload.MAX_NORM,
        ratio_clip=workload.CLIP,
        value_clip=0.0,
        entropy_loss_scale=workload.ENTROPY,
        value_loss_scale=workload.VALUE,
        experiment={"write_interval": 0, "checkpoint_interval": 0},
    )
    agent = PPO(
        models={"policy": net, "value": net},
        memory=RandomMemory(memory_size=workload.HORIZON, num_envs=workload.ENVS, device="cpu"),
        cfg=config,
        observation_space=env.observation_space,
        action_space=env.action_space,
        device="cpu",
    )
    for group in agent.optimizer.param_groups:
        group["eps"] = workload.EPSILON  # skrl has no setting for it
    trainer = SequentialTrainer(
        env=env, agents=agent, cfg={"timesteps": workload.HORIZON, "headless": True, "disable_progressbar": True}
    )

    def train(iterations):
        trainer.cfg.timesteps = iterations * workload.HORIZON
        trainer.train()

    workload.measure("skrl", version("skrl"), args, workload.count_parameters(net), train)


if __name__ == "__main__":
    main()
