"""Vector environments (`gymnasium.vector.VectorEnv`) with the methods of `SyncEnvs`: one instance per lane.

An environment that ends starts its next episode in the same step, whatever the autoreset mode of its instance.

Shapes: B environments; E environments per instance.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from lockstep.config import ConfigError
from lockstep.space_layout import ACTION_MASK
from lockstep.tasks.gym.obs_encoding import encode_obs
from lockstep.tasks.gym.packages import install_hint
from lockstep.tasks.gym.sync_envs import SharedArrays, copy_row, to_number
from lockstep.tasks.gym.vector_maker import VectorMaker
from lockstep.tasks.gym.vector_masks import legal_actions
from lockstep.tasks.gym.vector_obs import encode_batch, image_of, select_row
from lockstep.tasks.gym.vector_plan import VectorPlan, reset_rows
from lockstep.tasks.rendering.image import frame_image
from lockstep.tasks.rendering.opengl import convert_opengl_errors


class VectorEnvs:
    """Vector instances that are stepped one after another, each with consecutive rows of the table."""

    def __init__(self, maker: VectorMaker, plan: VectorPlan, table: SharedArrays) -> None:
        self._maker, self._plan, self.table = maker, plan, table
        size, count = plan.instance_envs, len(table.seed)
        self._rows = [range(start, start + size) for start in range(0, count, size)]
        self.envs = [maker(size) for _ in self._rows]
        self._seeds, self._steps = np.zeros(count, np.int64), np.zeros(count, np.int64)  # last seed, steps since then
        self.reseeded = np.zeros(count, bool)
        """Rows that were seeded again in the last step."""
        self.shared_seed = plan.shared_seed

    def begin(self, seeds: Mapping[int, int]) -> None:
        """Start an episode in some rows, each with its seed. With a shared seed: in all rows of an instance."""
        for instance, rows in enumerate(self._rows):
            chosen = [row for row in rows if row in seeds]
            if chosen:
                self._seeds[chosen] = [seeds[row] for row in chosen]
                self._start(instance, chosen)

    def step(self) -> None:
        """Take the actions in the table. An environment that ends starts its next episode at once."""
        table = self.table
        batches = [table.action[rows.start : rows.stop].copy() for rows in self._rows]  # an instance may keep them
        if self._maker.is_atari:  # the threads of all instances work at the same time
            for env, batch in zip(self.envs, batches, strict=True):
                env.send(batch)
            results = [env.recv() for env in self.envs]
        else:
            results = [env.step(batch) for env, batch in zip(self.envs, batches, strict=True)]
        self._steps += 1
        self.reseeded[:] = False
        for instance, (rows, result) in enumerate(zip(self._rows, results, strict=True)):
            part = slice(rows.start, rows.stop)
            obs, table.reward[part], table.terminated[part], table.truncated[part], info = result
            encode_batch(self._maker.observation_space, obs, table.obs, rows)
            table.total[part] += table.reward[part]
            ended = [row for row in rows if table.terminated[row] or table.truncated[row]]
            if ended:
                self._store_ends(instance, ended, obs, info)
            self._start_next(instance, ended)

    def replay(self, episodes: Mapping[int, np.ndarray]) -> set[int]:
        """Replay the actions since their last seed in rows that were just seeded. Return the rows that allowed it."""
        replayed: set[int] = set()
        for instance, rows in enumerate(self._rows):
            local = {row: episodes[row] for row in rows if row in episodes}
            if local:
                replayed |= self._replay(instance, local)
        return replayed

    def render_text(self, row: int) -> str:
        raise ConfigError(f"{self._maker.id} does not render as text.", "Render it as an image.")

    def render(self, row: int) -> np.ndarray:
        """Render an environment, or show its observation if that is an image. uint8 [height, width, 3]."""
        if not self._maker.renders:
            return image_of(self.table.obs[row])
        instance, index = divmod(row, self._plan.instance_envs)
        try:
            with convert_opengl_errors(self._maker.id):
                return frame_image(self.envs[instance].render()[index])
        except gymnasium.error.DependencyNotInstalled as error:
            fix = install_hint(error, self._maker.id)
            raise ConfigError(f"{self._maker.id} needs a package to render images.", fix) from error

    def close(self) -> None:
        for env in self.envs:
            env.close()
        self.envs.clear()  # ale_py prints a list of leaks if an environment still exists when Python exits

    # Episodes

    def _start(self, instance: int, rows: Sequence[int]) -> None:
        """Reset some rows of an instance with their seeds."""
        env, plan, all_rows = self.envs[instance], self._plan, self._rows[instance]
        seeds = [max(1, int(self._seeds[row])) for row in rows]  # ALE ignores a seed of 0
        if plan.seed_form is not None:
            obs = reset_rows(env, np.isin(all_rows, rows), seeds, plan.seed_form)
        elif plan.seeds_constructor:
            env.close()
            self.envs[instance] = self._maker(len(all_rows), seeds[0])
            obs, _ = self.envs[instance].reset()
        else:
            obs, _ = env.reset(seed=seeds[0])
        self._take_first_obs(instance, rows, obs)
        self._steps[rows] = 0

    def _restart(self, instance: int, rows: Sequence[int]) -> None:
        """Start the next episode of rows that ended, without a seed, if the instance did not do so itself."""
        if self._maker.autoreset_mode is AutoresetMode.SAME_STEP:
            self.table.total[rows] = 0.0
            return
        all_rows = self._rows[instance]
        options = None if len(all_rows) == 1 else {"reset_mask": np.isin(all_rows, rows)}
        obs, _ = self.envs[instance].reset(options=options)
        self._take_first_obs(instance, rows, obs)

    def _take_first_obs(self, instance: int, rows: Sequence[int], obs: Any) -> None:
        space, first = self._maker.observation_space, self._rows[instance].start
        for row in rows:
            encode_obs(space, select_row(space, obs, row - first), self.table.obs, row)
            self.table.total[row] = 0.0

    def _store_ends(self, instance: int, rows: Sequence[int], obs: Any, info: Mapping[str, Any]) -> None:
        """Store the last observations and metrics of episodes that ended."""
        table, space, first = self.table, self._maker.observation_space, self._rows[instance].start
        if self._maker.autoreset_mode is AutoresetMode.SAME_STEP:
            if "final_obs" not in info:
                raise ConfigError(
                    f"{self._maker.id} resets environments in the step that ends their episode, and does not return "
                    "their last observation.",
                    "Return it in info['final_obs'], or use another autoreset mode.",
                )
            obs, info = info["final_obs"], info.get("final_info", info)
        for row in rows:
            encode_obs(space, select_row(space, obs, row - first), table.final_obs, row)
            for key, values in table.info.items():
                values[row] = to_number(_info_value(info, key, row - first))

    def _start_next(self, instance: int, ended: Sequence[int]) -> None:
        """Start the next episodes of rows that ended, with a new seed where one is due."""
        table, rows = self.table, self._rows[instance]
        due = [row for row in ended if self._steps[row] >= self._plan.reseed_steps]
        if self.shared_seed and self._steps[rows.start] >= self._plan.reseed_steps:
            # The actions since the last seed can no longer be kept: truncate the other episodes of the instance.
            due = [*rows]
            for row in set(rows) - set(ended):
                table.truncated[row] = True
                copy_row(table.obs, table.final_obs, row)
        unseeded = [row for row in ended if row not in due]
        if unseeded:
            self._restart(instance, unseeded)
        if due:
            self.reseeded[due] = True
            self._seeds[due] = table.seed[due]
            self._start(instance, due)

    def _replay(self, instance: int, actions: Mapping[int, np.ndarray]) -> set[int]:
        """Replay the rows of an instance so that all of them end with their last action, at the same time."""
        rows, table = self._rows[instance], self.table
        steps = {row: len(actions.get(row, ())) for row in rows}
        longest = max(steps.values())
        if self.shared_seed and min(steps.values()) < longest:
            return set()  # they were stepped together since their seed
        failed: set[int] = set()
        idle: Any = next(taken[0] for row, taken in actions.items() if steps[row] == longest) if longest else None
        for time in range(longest):
            waiting = {row: longest - steps[row] - time for row in rows}  # steps until the row's first action
            starting = [row for row in rows if waiting[row] == 0 and time > 0]
            if starting:
                self._start(instance, starting)
            others = self._idle_actions(instance, idle)
            batch = [others[row - rows.start] if waiting[row] > 0 else actions[row][-waiting[row]] for row in rows]
            obs, reward, terminated, truncated, _ = self.envs[instance].step(np.stack(batch))
            encode_batch(self._maker.observation_space, obs, table.obs, rows)
            table.total[rows.start : rows.stop] += np.asarray(reward, np.float32)
            self._steps[rows.start : rows.stop] += 1
            ended = [row for row in rows if terminated[row - rows.start] or truncated[row - rows.start]]
            if ended:
                if self._plan.reseed_steps == 0:
                    failed |= {row for row in ended if waiting[row] <= 0}  # the episode did not end then
                self._restart(instance, ended)
        unplayed = [row for row in rows if steps[row] == 0]
        if unplayed and longest:
            self._start(instance, unplayed)  # they took actions meanwhile
        return {*actions} - failed

    def _idle_actions(self, instance: int, action: Any) -> Any:
        """Return actions for rows of an instance that wait for the start of their replay: any that is legal."""
        rows = self._rows[instance]
        if not self._maker.has_mask:
            return [action] * len(rows)
        masks = self.table.obs[ACTION_MASK][rows.start : rows.stop]
        return legal_actions(self._maker.action_space, masks, np.ones(masks.shape))


def _info_value(info: Mapping[str, Any], key: str, index: int) -> Any:
    """Return the value of one environment in the `info` of an instance, or None."""
    present = info.get(f"_{key}")  # mask of the environments that report the key
    if key not in info or (present is not None and not present[index]):
        return None
    return info[key][index]
