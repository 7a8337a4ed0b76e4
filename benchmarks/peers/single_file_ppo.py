"""A single-file PPO loop in CleanRL's form: buffers of tensors, a loop over steps, a loop over epochs.

Its environments are a Gymnasium vector environment, such as `SyncVectorEnv` or EnvPool's.
"""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, MAX_NORM, RATE = 0.99, 0.95, 0.2, 0.01, 0.5, 0.5, 2.5e-4


def layer(linear, gain=2**0.5):
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class MLPAgent(nn.Module):
    """Two layers of 64 units each for policy and value."""

    def __init__(self, inputs, actions):
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(
                layer(nn.Linear(inputs, 64)),
                nn.Tanh(),
                layer(nn.Linear(64, 64)),
                nn.Tanh(),
                layer(nn.Linear(64, outputs), gain),
            )
            for outputs, gain in ((actions, 0.01), (1, 1.0))
        )

    def forward(self, obs):
        return self.policy(obs), self.value(obs).flatten()


class NatureAgent(nn.Module):
    """The convolutions of Mnih et al. (2015), shared by policy and value."""

    def __init__(self, actions):
        super().__init__()
        self.trunk = nn.Sequential(
            *(layer(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU()),
            *(layer(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU()),
            *(layer(nn.Conv2d(64, 64, 3)), nn.ReLU(), nn.Flatten()),
            *(layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()),
        )
        self.policy, self.value = layer(nn.Linear(512, actions), 0.01), layer(nn.Linear(512, 1), 1.0)

    def forward(self, obs):
        seen = self.trunk(obs / 255.0)
        return self.policy(seen), self.value(seen).flatten()


class SingleFilePPO:
    """PPO whose environments start the next episode in the step after an end."""

    def __init__(self, envs, agent, num_envs, num_steps, batch_size, epochs):
        self.envs, self.agent = envs, agent
        self.num_envs, self.num_steps, self.batch_size, self.epochs = num_envs, num_steps, batch_size, epochs
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=RATE, eps=1e-5)
        self.shape = envs.single_observation_space.shape
        self.next_obs = torch.as_tensor(envs.reset()[0], dtype=torch.float32)
        self.next_done = torch.zeros(num_envs)

    def iterate(self):
        # Rollout
        shape = (self.num_steps, self.num_envs)
        obs, actions = torch.zeros((*shape, *self.shape)), torch.zeros(shape, dtype=torch.int64)
        logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))
        for step in range(self.num_steps):
            obs[step], dones[step] = self.next_obs, self.next_done
            with torch.no_grad():
                logits, values[step] = self.agent(self.next_obs)
                policy = Categorical(logits=logits)
                actions[step] = policy.sample()
                logprobs[step] = policy.log_prob(actions[step])
            seen, reward, terminated, truncated, _ = self.envs.step(actions[step].numpy())
            rewards[step] = torch.as_tensor(reward, dtype=torch.float32)
            self.next_obs = torch.as_tensor(seen, dtype=torch.float32)
            self.next_done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)

        # GAE
        with torch.no_grad():
            following, ended, last = self.agent(self.next_obs)[1], self.next_done, torch.zeros(self.num_envs)
            advantages = torch.zeros_like(rewards)
            for step in reversed(range(self.num_steps)):
                delta = rewards[step] + GAMMA * following * (1 - ended) - values[step]
                advantages[step] = last = delta + GAMMA * LAMBDA * (1 - ended) * last
                following, ended = values[step], dones[step]
            returns = advantages + values

        # Updates
        obs, actions, logprobs, advantages, returns = (
            x.flatten(0, 1) for x in (obs, actions, logprobs, advantages, returns)
        )
        for _ in range(self.epochs):
            for chosen in torch.randperm(len(obs)).split(self.batch_size):
                logits, value = self.agent(obs[chosen])
                policy = Categorical(logits=logits)
                ratio = (policy.log_prob(actions[chosen]) - logprobs[chosen]).exp()
                advantage = advantages[chosen]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                value_loss = (value - returns[chosen]).square().mean()
                loss = policy_loss + VALUE * value_loss - ENTROPY * policy.entropy().mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_NORM)
                self.optimizer.step()
