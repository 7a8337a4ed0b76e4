"""Synthetic run directories for code that only reads them, without training or torch."""

import json
from pathlib import Path

import yaml

CONFIG = {
    "format": 3,
    "lockstep": "0.2.0",
    "recipe": "gym-ppo",
    "task": {"id": "CartPole-v1", "num_envs": 8, "env_kwargs": {}},
    "algo": {"learning_rate": 0.001, "encoder": {"hidden_sizes": [64, 64]}},
    "run": {
        "total_samples": 4000,
        "seed": 0,
        "name": "",
        "runs_dir": "runs",
        "reduction": "fast",
        "replica_check_every": 64,
    },
}


def line(samples, **values):
    """Return one line of a log; `a__b` is the metric a/b."""
    return {"samples": samples, "iteration": samples // 100} | {k.replace("__", "/"): v for k, v in values.items()}


def lines(seed=0, count=40):
    """Return the log of a run of a few iterations."""
    told = []
    for n in range(1, count + 1):
        times = {"time__global_fps": 500.0, "time__env": 0.25, "time__learn": 0.5, "time__evaluate": 0.05}
        losses = {"train__policy_loss": -0.0002 / n, "train__value_loss": 10.0**-n, "train__entropy": 1.0985 + 1e-5 * n}
        told.append(line(100 * n, rollout__ep_return_mean=10.0 * n + seed, **losses, **times, sync__update=64.0 * n))
        if n % 10 == 0:
            scores = {"eval__return_mean": 10.0 * n + 5 * seed, "eval__return_std": 4.0, "eval__length_mean": 20.0}
            told.append(line(100 * n, **scores, eval__episodes=32.0))
    return told


def write_run(
    path: Path, told=None, seed=0, config=None, status=None, claims=({"parent": None, "processes": 2, "began": 1.7e9},)
):
    """Write a run directory that looks like that of a trained run."""
    (path / "checkpoints").mkdir(parents=True)
    settings = CONFIG | {"run": CONFIG["run"] | {"seed": seed, "name": path.name}} if config is None else config
    (path / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in (lines(seed) if told is None else told))
    )
    (path / "status.json").write_text(json.dumps(status or {"state": "finished", "processes": 2, "why": ""}))
    for number, claim in enumerate(claims, 1):
        (path / "checkpoints" / f"attempt-{number:04d}.json").write_text(json.dumps(claim))
    return path
