"""TorchRL's PPO at the common work. run.py makes the virtual environment and calls

python benchmarks/peers/torchrl_peer.py --net cnn --steps 32768
"""

import warnings

import torch
import torchrl
import workload
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, Composite, LazyTensorStorage, TensorDictReplayBuffer, Unbounded
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import EnvBase
from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


class Boards(EnvBase):
    """All boards behind one call. They restart by themselves, so a reset only shows what is already there."""

    def __init__(self, task):
        shape = (task.num_envs,)
        super().__init__(device="cpu", batch_size=shape)
        self.task = task
        planes = Bounded(0, 1, (*shape, *task.observation_space.shape), dtype=torch.uint8)
        self.observation_spec = Composite(observation=planes, shape=shape)
        self.action_spec = Categorical(4, shape=shape, dtype=torch.int64)
        self.reward_spec = Unbounded((*shape, 1))
        flag = Categorical(2, shape=(*shape, 1), dtype=torch.bool)
        self.full_done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape)

    def _reset(self, tensordict=None, **kwargs):
        obs = self.task.reset() if tensordict is None else self.task.observations()
        return TensorDict({"observation": obs.clone()}, self.batch_size)

    def _step(self, tensordict):
        step = self.task.step(tensordict["action"])
        ended = step.terminated | step.truncated
        obs = step.obs.clone()  # the kernel writes the next step into the same memory
        if ended.any():
            obs[ended] = step.final_obs[ended]  # TorchRL asks for the next episode's first observation by a reset
        out = {"observation": obs, "reward": step.reward.unsqueeze(1).clone(), "done": ended.unsqueeze(1)}
        out |= {"terminated": step.terminated.unsqueeze(1).clone(), "truncated": step.truncated.unsqueeze(1).clone()}
        return TensorDict(out, self.batch_size)

    def _set_seed(self, seed):
        pass  # the boards were given theirs when they were made


class Trunk(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.layers, self.features = workload.trunk(net)

    def forward(self, planes):
        if planes.ndim == 4:
            return self.layers(planes.float())
        # The advantages are computed on a whole rollout, [environments, time, ...].
        return self.layers(planes.flatten(0, -4).float()).unflatten(0, planes.shape[:-3])


def main():
    args = workload.arguments()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    env, net = Boards(workload.boards()), Trunk(args.net)
    agent = ActorValueOperator(
        TensorDictModule(net, in_keys=["observation"], out_keys=["hidden"]),
        ProbabilisticActor(
            TensorDictModule(nn.Linear(net.features, 4), in_keys=["hidden"], out_keys=["logits"]),
            in_keys=["logits"],
            spec=env.action_spec,
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
        ValueOperator(nn.Linear(net.features, 1), in_keys=["hidden"]),
    )
    # The loss runs the policy first, which leaves the features where the value's head finds them: one trunk, once.
    loss_of = ClipPPOLoss(
        agent.get_policy_operator(),
        agent.get_value_head(),
        clip_epsilon=workload.CLIP,
        entropy_coeff=workload.ENTROPY,
        critic_coeff=workload.VALUE,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    advantages = GAE(
        gamma=workload.GAMMA, lmbda=workload.LAMBDA, value_network=agent.get_value_operator(), shifted=True
    )
    parameters = list(agent.parameters())
    optimizer = torch.optim.Adam(parameters, lr=workload.RATE, eps=workload.EPSILON)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(workload.ITERATION), sampler=SamplerWithoutReplacement(), batch_size=workload.BATCH
    )
    collector = Collector(env, agent.get_policy_operator(), frames_per_batch=workload.ITERATION, total_frames=-1)
    rollouts = iter(collector)

    def train(iterations):
        for _ in range(iterations):
            rollout = next(rollouts)
            with torch.no_grad():
                rollout = advantages(rollout)
            buffer.empty()
            buffer.extend(rollout.reshape(-1))
            for _ in range(workload.EPOCHS):
                for batch in buffer:
                    losses = loss_of(batch)
                    loss = losses["loss_objective"] + losses["loss_entropy"] + losses["loss_critic"]
                    optimizer.zero_grad()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(parameters, workload.MAX_NORM)
                    optimizer.step()

    workload.measure("TorchRL", torchrl.__version__, args, workload.count_parameters(agent), train)
    collector.shutdown()


if __name__ == "__main__":
    main()
