"""Toy environments with one special behavior each, in a module that workers can import without the tests."""

import itertools
import os
import signal
import sys
import time

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple


class Diary(gymnasium.Env):
    """Observes its seed and the steps since the reset; only a time limit ends an episode."""

    observation_space = Box(0, 2**31, (2,), np.float64)
    action_space = Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        self.seen = np.array([seed % 1000, 0.0])
        return self.seen, {}

    def step(self, action):
        assert action in (5, 6)
        self.seen = self.seen + np.array([0, 1])
        return self.seen, float(action), False, False, {}


class House(gymnasium.Env):
    """Dict observations with an image, a discrete value and a nested dict; MultiDiscrete actions."""

    observation_space = Dict(
        {
            "room": Discrete(3),
            "camera": Box(0, 255, (2, 2, 3), np.uint8),
            "body": Dict({"joints": Box(-9, 9, (2,), np.float64)}),
        }
    )
    action_space = MultiDiscrete([3, 4])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.room, self.joints = int(self.np_random.integers(3)), self.np_random.normal(size=2)
        return self.look(), {}

    def step(self, action):
        self.room = (self.room + int(action[0])) % 3
        self.joints = self.joints * 0.9 + action[1] / 10
        return self.look(), 0.0, bool(self.np_random.random() < 0.1), False, {}

    def look(self):
        return {
            "room": self.room,
            "camera": np.full((2, 2, 3), 100 + self.room, np.uint8),
            "body": {"joints": self.joints},
        }


class Whim(gymnasium.Env):
    """Not deterministic: each reset and each step returns a new number."""

    observation_space = Box(0, np.inf, (1,), np.float32)
    action_space = Discrete(2)
    numbers = itertools.count()

    def reset(self, *, seed=None, options=None):
        return np.array([next(self.numbers)], np.float32), {}

    def step(self, action):
        return np.array([next(self.numbers)], np.float32), 0.0, False, False, {}


class Spring(gymnasium.Env):
    """Depends on all past actions, and modifies its action array in place."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float64)
    action_space = Box(-1, np.array([0.5]), (1,), np.float64)

    def reset(self, *, seed=None, options=None):
        self.pushes = [0.0]
        return np.array([0.0]), {}

    def step(self, action):
        assert action.dtype == np.float64
        self.pushes.append(float(action[0]))
        action *= 100
        return np.array([sum(0.7**age * push for age, push in enumerate(reversed(self.pushes)))]), 0.0, False, False, {}


class Wall(gymnasium.Env):
    """Constant observations."""

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Trouble(gymnasium.Env):
    """Fails at its third step in the given way."""

    observation_space = Box(0, 9, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, kind):
        self.kind = kind

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        if self.time == 3:
            match self.kind:
                case "error":
                    raise ZeroDivisionError("the moon is full")
                case "exit":
                    print("farewell", file=sys.stderr)
                    os._exit(7)
                case "crash":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "hang":
                    time.sleep(600)
        return np.full(1, self.time, np.float32), 1.0, False, False, {}


class Memory(gymnasium.Env):
    """Observes the previous action, of which it keeps the array without a copy."""

    observation_space = Box(-1, 1, (1,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.kept = np.zeros(1, np.float32)
        return self.kept, {}

    def step(self, action):
        shown, self.kept = self.kept, action
        return shown, 0.0, False, False, {}


class Blind(Memory):
    """Cannot render because a package is missing."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        raise gymnasium.error.DependencyNotInstalled("pip install eyes")


class Goal(gymnasium.Env):
    """Two or three steps; the last `info` says whether the goal was reached, and how far away it is if it was not."""

    observation_space = Box(0, 1, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 4))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= 1
        reached = bool(self.np_random.random() < 0.5)
        info = {"is_success": reached, "name": "goal", "infinite": np.inf, "pair": np.zeros(2)}
        if not reached:
            info["distance"] = self.np_random.random(1)
        return np.zeros(2, np.float32), 1.0, self.left == 0, False, info


class Cliff(gymnasium.Env):
    """Moves on a line by its action; beyond 1 the episode terminates. The observation has the given form."""

    def __init__(self, form="vector", actions=(1,)):
        self.form = form
        self.action_space = Box(-2.0, 1.0, actions, np.float32)
        self.observation_space = {
            "vector": Box(-np.inf, np.inf, (2,), np.float64),
            "dict": Dict({"at": Box(-9, 9, (1,), np.float32), "goal": Box(-9, 9, (1,), np.float32)}),
            "image": Box(0, 255, (44, 48, 3), np.uint8),
            "matrix": Box(-9, 9, (2, 2), np.float32),
        }[form]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = float(self.np_random.uniform(-1, 0))
        return self.look(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.at += 0.5 * float(np.sum(action)) + 0.2
        return self.look(), -abs(self.at), bool(self.at > 1), False, {}

    def look(self):
        at, goal = np.array([self.at], np.float32), np.ones(1, np.float32)
        if self.form == "image":
            image = np.zeros((44, 48, 3), np.uint8)
            image[:, : int(np.clip(24 + 8 * self.at, 0, 48))] = 255
            return image
        if self.form == "matrix":
            return np.full((2, 2), self.at, np.float32)
        return {"at": at, "goal": goal} if self.form == "dict" else np.concatenate([at, goal]).astype(np.float64)


class Vault(gymnasium.Env):
    """Three steps. Each has a code, a number of legal actions that include it, and a reward of 1 for naming it.

    The code of the first step is observed (`recall=False`: that of every step), and the last one is the same again.
    Illegal actions end the episode, or are an error (`strict`). `where` is the place of the mask: info, obs, or none.
    """

    steps = 3

    def __init__(self, where="info", choices=6, legal=3, recall=True, strict=True, parts=1):
        self.where, self.choices, self.legal, self.recall, self.strict = where, choices, legal, recall, strict
        self.parts = parts
        sight = Box(0, 1, (choices + 1,), np.float32)
        mask = Box(0, 1, (parts * choices,), np.int8)
        self.observation_space = Dict({"action_mask": mask, "sight": sight}) if where == "obs" else sight
        self.action_space = Discrete(choices, start=2) if parts == 1 else MultiDiscrete([choices] * parts)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.codes = 0, self.np_random.integers(self.choices, size=self.steps)
        if self.recall:
            self.codes[-1] = self.codes[0]
        return self.look()

    def step(self, action):
        choices = np.atleast_1d(action) - (2 if self.parts == 1 else 0)
        legal = all(mask[choice] for mask, choice in zip(self.mask.reshape(self.parts, -1), choices, strict=True))
        assert legal or not self.strict, f"{action} is illegal"
        reward = float(legal and (choices == self.codes[self.time]).all())
        self.time += 1
        ended = self.time == self.steps or not legal
        if ended:
            self.mask = np.zeros(self.parts * self.choices, np.int8)  # no action is legal after the end
            return self.seen(), reward, True, False, {"action_mask": self.mask} if self.where == "info" else {}
        obs, info = self.look()
        return obs, reward, False, False, info

    def look(self):
        self.mask = np.zeros((self.parts, self.choices), np.int8)
        for mask in self.mask:
            mask[self.np_random.permutation(self.choices)[: self.legal - 1]] = 1
            mask[self.codes[self.time]] = 1
        self.mask = self.mask.reshape(-1)
        return self.seen(), {"action_mask": self.mask} if self.where == "info" else {}

    def seen(self):
        sight = np.zeros(self.choices + 1, np.float32)
        sight[-1] = self.time == self.steps - 1
        if self.time < self.steps and (self.time == 0 or not self.recall):
            sight[self.codes[self.time]] = 1
        return {"action_mask": self.mask, "sight": sight} if self.where == "obs" else sight


class Sealed(Wall):
    """From the second step on, no action is legal."""

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {"action_mask": np.ones(2, np.int8)}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {"action_mask": np.zeros(2, np.int8)}


class Workshop(gymnasium.Env):
    """One step with mixed actions. The best action is a function of the order, and its reward is 3."""

    observation_space = Discrete(3)
    action_space = Dict(
        [  # pairs, which keep their order
            ("push", Box(np.array([-1.0, -2.0]), 2.0, (2,), np.float64)),
            ("tool", Discrete(3, start=1)),
            ("rest", Tuple([MultiBinary((2, 1)), MultiDiscrete([2, 3])])),
        ]
    )
    targets = np.array([[-0.5, 0.0], [0.5, 1.0], [0.0, -1.0]])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.order = int(self.np_random.integers(3))
        return self.order, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        assert isinstance(action["tool"], int)
        lamps, settings = action["rest"]
        right = [action["tool"] == self.order + 1, lamps[0, 0] == (self.order == 0), lamps[1, 0] == 1]
        right += [settings[0] == (self.order == 2), settings[1] == self.order]
        distance = np.square(action["push"] - self.targets[self.order]).sum()
        return self.order, float(np.mean(right) * 3 - min(distance, 3.0)), True, False, {}


class Film(gymnasium.Env):
    """Observes the time, as a vector, an image of the given form, or a dict with an action mask or a text."""

    action_space = Discrete(2)

    def __init__(self, form="vector"):
        shapes = {
            "vector": (2,),
            "gray": (9, 8),
            "color": (9, 8, 3),
            "planes": (3, 5, 6),
            "dict": (2,),
            "text": (7, 7, 3),
        }
        self.form, self.shape = form, shapes.get(form)
        box = Box(0, 255, self.shape, np.uint8) if form != "vector" else Box(0, 255, (2,), np.float32)
        self.observation_space = Dict({"film": box, "action_mask": MultiBinary(2)}) if form == "dict" else box
        if form == "number":
            self.observation_space = Discrete(200)
        if form == "text":
            self.observation_space = Dict({"film": box, "mission": Text(10)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = int(self.np_random.integers(1, 100))
        return self.look(), {}

    def step(self, action):
        self.time += 1
        return self.look(), 0.0, bool(self.np_random.random() < 0.2), False, {}

    def look(self):
        if self.form == "number":
            return self.time
        self.frame = np.full(self.shape, self.time, self.observation_space.dtype if self.form == "vector" else np.uint8)
        if self.form == "text":
            return {"film": self.frame, "mission": "watch"}
        mask = np.array([1, self.time % 2], np.int8)
        return {"film": self.frame, "action_mask": mask} if self.form == "dict" else self.frame


class Hint(gymnasium.Env):
    """One step. The critic sees the number that the reward depends on, the policy sees noise."""

    observation_space = Dict([("noise", Box(-9, 9, (2,), np.float32)), ("critic", Box(-9, 9, (3,), np.float32))])
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = self.np_random.normal(size=5).astype(np.float32)
        return self.look(), {}

    def step(self, action):
        return self.look(), float(self.seen[2]), True, False, {}

    def look(self):
        return {"noise": self.seen[:2], "critic": self.seen[2:]}


gymnasium.register("LockstepCliff-v0", Cliff, max_episode_steps=20)
gymnasium.register("LockstepEndlessCliff-v0", Cliff)
for env in (Diary, House, Whim, Spring, Wall, Trouble, Memory, Blind, Goal, Vault, Sealed, Workshop, Film, Hint):
    gymnasium.register(f"Lockstep{env.__name__}-v0", env, max_episode_steps=5 if env is Diary else None)
