"""What a plan made on one process predicts for 2 and 4 processes of this machine, beside what they then do.

python benchmarks/plan_check.py

Processes share the machine's cores, and the plan knows it. All are taken in turns, round by round.
"""

import json
import statistics
import subprocess
import sys

SETTINGS = [
    "--preset",
    "small",
    "task.num_envs=64",
    "algo.horizon=128",
    "algo.batch_size=2048",
    "algo.epochs=1",
    "run.precision=bf16",
]


def lockstep(*words):
    command = [sys.executable, "-m", "lockstep", *words]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(rounds=3):
    predicted, measured = {1: [], 2: [], 4: []}, {1: [], 2: [], 4: []}
    for number in range(rounds):
        plan = lockstep("plan", "snake-ppo", *SETTINGS, "--gpus", "1", "2", "4", "--network", "here", "--json")
        for row in plan["fixed_batch"]:
            predicted[row["processes"]].append(row["steps_per_second"])
        bench = lockstep("bench", "snake-ppo", *SETTINGS, "--scaling", "1,2,4", "--seconds", "12", "--json")
        for report in bench["scaling"]:
            measured[report["processes"]].append(report["steps_per_second"])
        print(f"round {number + 1} of {rounds}", flush=True)
    for processes in predicted:
        said, done = statistics.median(predicted[processes]), statistics.median(measured[processes])
        print(f"{processes} processes: predicted {said:,.0f} steps/s, measured {done:,.0f}: {said / done - 1:+.0%}")


if __name__ == "__main__":
    main()
