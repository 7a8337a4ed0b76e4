"""Settings that the recipes of TD-MPC2 share."""

from typing import Any

SMALL: dict[str, Any] = {
    "algo": {"learning_rate": 1e-3, "batch_size": 128, "buffer_size": 100_000, "seed_samples": 1_000, "tau": 0.03},
    "algo.plan": {"num_samples": 64, "num_policy_samples": 8, "num_elites": 8, "iterations": 4},
    "algo.model": {"size": 1, "encoder": 64, "width": 64, "latent": 32, "num_q": 2},
    "run": {"total_samples": 20_000, "log_every": 500, "eval_every": 4_000, "eval_episodes": 8},
}
"""Preset that learns the easiest tasks in minutes on one CPU core."""

SMOKE: dict[str, Any] = {
    "algo": {
        "batch_size": 32,
        "seed_samples": 24,
        "buffer_size": 256,
        "updates_per_sample": 0.0625,
        "rollout_steps": 4,
        "plan": {"num_samples": 8, "num_policy_samples": 2, "num_elites": 4, "iterations": 1},
        "model": {"size": 1, "encoder": 16, "width": 16, "latent": 16, "num_q": 3, "bins": 11},
    },
    "run": {"total_samples": 256, "log_every": 64, "eval_every": 128, "eval_episodes": 8, "save_every": 64},
    "run.record_video": False,
}
"""Smoke setting, without that of the task."""
