"""Count the files and lines that a reader opens to understand PPO end to end: task, collection, loss, update, loop.

python .ci/count_ppo.py            print the table; exit code 1 if it exceeds the limits
"""

import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "lockstep"
FILES = (
    "training_loop.py",  # the loop
    "base/vec_env.py",  # what a task implements
    "base/algorithm.py",  # what an algorithm implements
    "protocols.py",  # what they exchange
    "tasks/recall/env.py",  # a task
    "algorithms/ppo.py",  # setup, update, loss
    "data/collector.py",  # rollouts and GAE
    "data/rollout.py",  # buffers and minibatches
    "ops/functional.py",  # GAE, PPO loss, schedules
    "nn/actor_critic.py",  # the network
    "distributed/optimizer.py",  # gradients, all-reduce, step
)
MAX_FILES, MAX_LINES = 12, 1800


def main() -> int:
    lines = {name: len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in FILES}
    for name, count in lines.items():
        sys.stdout.write(f"{count:6,}  {name}\n")
    total = sum(lines.values())
    sys.stdout.write(f"{total:6,}  lines in {len(lines)} files; limits: {MAX_LINES:,} in {MAX_FILES}\n")
    return int(total > MAX_LINES or len(lines) > MAX_FILES)


if __name__ == "__main__":
    sys.exit(main())
