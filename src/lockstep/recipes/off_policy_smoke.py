"""Smoke setting that the recipes of DDPG and SAC on Gymnasium environments share."""

from typing import Any

SMOKE: dict[str, Any] = {
    "algo": {
        "batch_size": 32,
        "rollout_steps": 8,
        "learning_starts": 32,
        "buffer_size": 256,
        "updates_per_sample": 0.25,
    },
    "algo.encoder.hidden_sizes": [16],
    "run": {"total_samples": 512, "log_every": 128, "eval_every": 256, "eval_episodes": 8, "save_every": 128},
    "run.record_video": False,
}
