"""Stable-Baselines3's PPO at the common work. run.py makes the virtual environment and calls

python benchmarks/peers/sb3.py --net cnn --steps 32768
"""

import numpy as np
import stable_baselines3
import torch
import workload
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv

NOTHING = {}  # SB3 only reads the info of an environment that goes on


class Boards(VecEnv):
    """All boards behind one call, as SB3 wants them."""

    def __init__(self, task):
        self.task = task
        super().__init__(task.num_envs, task.observation_space, task.action_space)

    def reset(self):
        return self.task.reset().numpy().copy()

    def step_async(self, actions):
        self.actions = torch.from_numpy(actions)

    def step_wait(self):
        step = self.task.step(self.actions)
        ended = (step.terminated | step.truncated).numpy()
        infos = [NOTHING] * self.num_envs
        for env in np.flatnonzero(ended):
            last = step.final_obs[env].numpy().copy()
            infos[env] = {"terminal_observation": last, "TimeLimit.truncated": bool(step.truncated[env])}
        # Copies: the kernel writes the next step into the same memory, and SB3 adds to the rewards in place.
        return step.obs.numpy().copy(), step.reward.numpy().copy(), ended, infos

    def close(self):
        self.task.close()

    def get_attr(self, name, indices=None):
        return [getattr(self.task, name, None)] * self.num_envs

    def set_attr(self, name, value, indices=None):
        raise NotImplementedError

    def env_method(self, name, *args, indices=None, **kwargs):
        raise NotImplementedError

    def env_is_wrapped(self, wrapper, indices=None):
        return [False] * self.num_envs


class Trunk(BaseFeaturesExtractor):
    """SB3 evaluates a features extractor once for policy and value, in acting and in learning."""

    def __init__(self, space, net):
        layers, features = workload.trunk(net, space.shape[-1])
        super().__init__(space, features)
        self.layers = layers

    def forward(self, planes):
        return self.layers(planes)


def build(task, net, **settings):
    """A PPO whose policy is the trunk and two linear heads. Images are not divided by 255: a board holds 0 and 1."""
    policy = {
        "features_extractor_class": Trunk,
        "features_extractor_kwargs": {"net": net},
        "net_arch": [],
        "normalize_images": False,
    }
    return PPO("CnnPolicy", Boards(task), policy_kwargs=policy, device="cpu", **settings)


def main():
    args = workload.arguments()
    model = build(
        workload.boards(),
        args.net,
        n_steps=workload.HORIZON,
        batch_size=workload.BATCH,
        n_epochs=workload.EPOCHS,
        gamma=workload.GAMMA,
        gae_lambda=workload.LAMBDA,
        clip_range=workload.CLIP,
        ent_coef=workload.ENTROPY,
        vf_coef=workload.VALUE,
        max_grad_norm=workload.MAX_NORM,
        learning_rate=workload.RATE,  # its Adam has the epsilon 1e-5 by default
        seed=0,
    )

    def train(iterations):
        model.learn(iterations * workload.ITERATION, log_interval=None, reset_num_timesteps=False)

    workload.measure(
        "Stable-Baselines3", stable_baselines3.__version__, args, workload.count_parameters(model.policy), train
    )


if __name__ == "__main__":
    main()
