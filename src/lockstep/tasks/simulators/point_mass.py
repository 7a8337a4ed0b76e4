"""Point masses that are pushed to a target, in pure torch: the example of a simulator in the form of rsl_rl.

Copy this file to write a simulator of your own: `lockstep train sim-ppo --task.make my_sim.py:make_env`. It needs
nothing but torch. A step reads no value on the host, so a GPU is never waited for.

Shapes: E environments.
"""

from typing import Any

import torch
from torch import Tensor

FIELD = 2.0
"""Half the side of the field. A mass that leaves it ends its episode."""
IMAGE_SIDE = 48
RATIOS = tuple(1.1347241384015194 ** -(power + 1) for power in range(6))
"""Steps of a low-discrepancy sequence in six dimensions, from which the start of every episode is taken."""


def make_env(num_envs: int, device: str = "cpu", seed: int = 0, max_episode_length: int = 32) -> "PointMass":
    """Make the simulator. Lockstep calls this once per lane, and passes `task.env_kwargs` as further arguments."""
    return PointMass(num_envs, torch.device(device), seed, max_episode_length)


class PointMass:
    """E masses with a force as action. The policy sees target and velocity, the critic also wind and time."""

    num_actions = 2

    def __init__(self, num_envs: int, device: torch.device, seed: int, max_episode_length: int) -> None:
        self.num_envs, self.device, self.max_episode_length = num_envs, device, max_episode_length
        # All randomness is drawn here, from a generator of this instance: lanes must not share one.
        draws = torch.rand(num_envs, len(RATIOS), generator=torch.Generator().manual_seed(seed))
        self._ratios = torch.tensor(RATIOS, device=device)
        zeros = torch.zeros(num_envs, 2, device=device)
        steps = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._state = {"draws": draws.to(device), "position": zeros, "velocity": zeros, "steps": steps}
        self._restart(torch.ones(num_envs, dtype=torch.bool, device=device))

    def get_observations(self) -> dict[str, Tensor]:
        """Return observation groups [E, ...]."""
        state, (_, target, wind) = self._state, self._drawn()
        seen = torch.cat([target - state["position"], state["velocity"]], dim=1)
        time = state["steps"].unsqueeze(1) / self.max_episode_length
        return {"policy": seen, "critic": torch.cat([wind, time, state["position"]], dim=1)}

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        """Take a step in every environment. Where an episode ends, start the next one."""
        state, (_, target, wind) = self._state, self._drawn()
        # Physics
        force = actions.clamp(-1.0, 1.0) + wind
        velocity = 0.8 * state["velocity"] + 0.2 * force
        position = state["position"] + 0.2 * velocity
        steps = state["steps"] + 1
        self._state = state | {"position": position, "velocity": velocity, "steps": steps}
        # Rewards and ends
        distance = (target - position).square().sum(1)
        left = (position.abs() > FIELD).any(1)
        time_outs = (steps >= self.max_episode_length) & ~left
        reward = 1.0 - distance - 10.0 * left
        extras = {
            "time_outs": time_outs,
            "final_obs": self.get_observations(),  # before the next episode starts
            "log": {"success": (distance < 0.01).float()},
        }
        self._restart(left | time_outs)
        return self.get_observations(), reward, left | time_outs, extras

    def get_state(self) -> dict[str, Tensor]:
        """Return everything that decides how the simulation continues."""
        return self._state

    def set_state(self, state: dict[str, Tensor]) -> None:
        self._state = {name: tensor.clone() for name, tensor in state.items()}

    def render(self) -> Tensor:
        """Return images of all environments, uint8 [E, height, width, 3]: the target is green, the mass white."""
        axis = torch.linspace(-FIELD, FIELD, IMAGE_SIDE, device=self.device)
        pixels = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1).view(1, -1, 2)
        target, mass = (
            (pixels - place.unsqueeze(1)).square().sum(2) for place in (self._drawn()[1], self._state["position"])
        )
        background = torch.full_like(mass, 30.0)
        green = torch.where(target < 0.04, 160.0, background)
        white = torch.where(mass < 0.02, 255.0, background)
        image = torch.stack([white, torch.maximum(white, green), white], dim=-1)
        return image.to(torch.uint8).view(self.num_envs, IMAGE_SIDE, IMAGE_SIDE, 3)

    def _drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return start, target and wind of the current episodes, [E, 2] each."""
        start, target, wind = self._state["draws"].mul(2.0).sub(1.0).chunk(3, dim=1)
        return start, target, 0.5 * wind

    def _restart(self, ended: Tensor) -> None:
        """Start the next episode where one ended, [E]."""
        rows, state = ended.unsqueeze(1), self._state
        draws = (state["draws"] + self._ratios).frac()
        self._state = state | {"draws": torch.where(rows, draws, state["draws"])}
        start = self._drawn()[0]
        self._state |= {
            "position": torch.where(rows, start, state["position"]),
            "velocity": torch.where(rows, 0.0, state["velocity"]),
            "steps": torch.where(ended, 0, state["steps"]),
        }
