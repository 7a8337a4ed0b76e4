"""Presets of PPO by family of environments, with published settings. `env_presets.py` maps ids to them.

Sources: `mujoco` is Tianshou's benchmark (examples/mujoco). `atari` is CleanRL's, `minatar` that of pgx with a quarter
of its samples and minibatches. The others are those of RL Baselines3 Zoo (hyperparams/ppo.yml), whose value loss has no
factor of one half: `value_coef` is twice its `vf_coef`.
"""

from typing import Any

_CONSTANT = {"schedule": "constant", "clip_coef_schedule": "constant"}

MUJOCO: dict[str, Any] = {
    "algo": {
        "learning_rate": 3e-4,
        "clip_coef_schedule": "constant",
        "rollout_steps": 256,
        "batch_size": 64,
        "epochs": 10,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "normalize_obs": True,
        "normalize_rewards": True,
        "log_std_init": -0.5,
    },
    "run": {"total_samples": 1_000_000, "log_every": 20_480, "eval_every": 102_400},
}

ATARI: dict[str, Any] = {
    "algo": {
        "learning_rate": 2.5e-4,
        "clip_coef": 0.1,
        "clip_coef_schedule": "constant",
        "value_clip_coef": 0.1,
        "rollout_steps": 128,
        "batch_size": 256,
        "epochs": 4,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "entropy_coef": 0.01,
        "encoder": {"kind": "nature", "out_features": 512},
    },
    "run": {"total_samples": 10_000_000, "log_every": 20_480, "eval_every": 1_024_000},
}

MINATAR: dict[str, Any] = {
    "task.num_envs": 128,
    "algo": {
        **_CONSTANT,
        "learning_rate": 3e-4,
        "rollout_steps": 64,
        "batch_size": 1024,
        "epochs": 3,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "entropy_coef": 0.01,
        "encoder": {"hidden_sizes": [32], "num_layers": 1, "out_features": 64},
    },
    "run": {"total_samples": 5_000_000, "log_every": 81_920, "eval_every": 491_520},
}

MINIGRID: dict[str, Any] = {
    "task.float_obs": True,
    "algo": {
        **_CONSTANT,
        "learning_rate": 2.5e-4,
        "rollout_steps": 128,
        "batch_size": 64,
        "epochs": 10,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "value_coef": 1.0,
        "normalize_obs": True,
        "normalize_rewards": True,
        "encoder": {"kind": "mlp"},  # cells are numbers of objects and colors
    },
    "run": {"total_samples": 100_000, "log_every": 5_120, "eval_every": 51_200},
}

ACROBOT: dict[str, Any] = {
    "task.num_envs": 16,
    "algo": {
        **_CONSTANT,
        "learning_rate": 3e-4,
        "rollout_steps": 256,
        "batch_size": 64,
        "epochs": 4,
        "gamma": 0.99,
        "gae_lambda": 0.94,
        "value_coef": 1.0,
        "normalize_obs": True,
        "normalize_rewards": True,
    },
    "run": {"total_samples": 1_000_000, "log_every": 20_480, "eval_every": 102_400},
}

MOUNTAIN_CAR: dict[str, Any] = {
    **ACROBOT,
    "algo": {**ACROBOT["algo"], "rollout_steps": 16, "gae_lambda": 0.98},
}

LUNAR_LANDER: dict[str, Any] = {
    "task.num_envs": 16,
    "algo": {
        **_CONSTANT,
        "learning_rate": 3e-4,
        "rollout_steps": 1024,
        "batch_size": 64,
        "epochs": 4,
        "gamma": 0.999,
        "gae_lambda": 0.98,
        "entropy_coef": 0.01,
        "value_coef": 1.0,
    },
    "run": {"total_samples": 1_000_000, "log_every": 16_384, "eval_every": 131_072},
}

BIPEDAL_WALKER: dict[str, Any] = {
    "task.num_envs": 32,
    "algo": {
        **_CONSTANT,
        "learning_rate": 3e-4,
        "rollout_steps": 2048,
        "batch_size": 64,
        "epochs": 10,
        "gamma": 0.999,
        "gae_lambda": 0.95,
        "clip_coef": 0.18,
        "value_coef": 1.0,
        "normalize_obs": True,
        "normalize_rewards": True,
    },
    "run": {"total_samples": 5_000_000, "log_every": 65_536, "eval_every": 524_288},
}

PENDULUM: dict[str, Any] = {
    "task.id": "Pendulum-v1",
    "algo": {
        "learning_rate": 1e-3,
        "rollout_steps": 512,
        "batch_size": 64,
        "epochs": 10,
        "gamma": 0.9,
        "gae_lambda": 0.95,
        "normalize_rewards": True,  # not observations: their spread grows while the pendulum learns to swing
    },
}

FAMILIES: dict[str, dict[str, Any]] = {
    "continuous": PENDULUM,
    "mujoco": MUJOCO,
    "atari": ATARI,
    "minatar": MINATAR,
    "minigrid": MINIGRID,
    "acrobot": ACROBOT,
    "mountain-car": MOUNTAIN_CAR,
    "lunar-lander": LUNAR_LANDER,
    "bipedal-walker": BIPEDAL_WALKER,
}
"""Presets of `gym-ppo` by name."""
