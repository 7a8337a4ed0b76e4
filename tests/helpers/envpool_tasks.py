"""Tasks of EnvPool, which is no dependency: `--task.id envpool_tasks.py:PoolPong-v0`."""

import envpool
import gymnasium


def make_pong(num_envs, seed=0):
    return envpool.make_gymnasium("Pong-v5", num_envs=num_envs, num_threads=1, seed=seed)


gymnasium.register("PoolPong-v0", vector_entry_point=make_pong)
