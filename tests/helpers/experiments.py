"""Synthetic experiments for code that only reads them, without training or torch."""

import json

from helpers.run_fixtures import CONFIG, line, write_run


def write_experiment(path, seeds=(0, 1), scores=None, task=None, states=None):
    """Write an experiment with a run for each of `scores`, which are those of its last evaluation."""
    path.mkdir(parents=True)
    config = CONFIG | ({} if task is None else {"task": {"id": task}})
    settings = {key: config[key] for key in ("task", "algo", "run")}
    command = f"lockstep train gym-ppo --seeds {len(seeds)}"
    record = {"format": 1, "lockstep": "0.2.0", "recipe": "gym-ppo", "command": command, "seeds": list(seeds)}
    record |= {"procs": 1, "init_from": None, "settings": settings}
    (path / "experiment.json").write_text(json.dumps(record))
    for seed, score, state in zip(seeds, scores or (), states or ["finished"] * len(scores or ()), strict=False):
        told = [
            line(2000, rollout__ep_return_mean=score / 2, time__global_fps=100.0),
            line(2000, eval__return_mean=score / 2),
            line(4000, rollout__ep_return_mean=score, time__global_fps=100.0),
            line(4000, eval__return_mean=score),
        ]
        run = config["run"] | {"seed": seed, "name": f"seed-{seed}"}
        write_run(path / f"seed-{seed}", told, config=config | {"run": run}, status={"state": state, "processes": 1})
    return path
