"""Algorithms on their tasks in one process, for tests of losses, updates and non-finite values."""

import torch

from lockstep.clock import TrainState
from lockstep.config import apply_overrides
from lockstep.distributed import Runtime
from lockstep.registry import find_recipe


class RecipeAgent:
    """An algorithm and its task on one process, without a run directory."""

    def __init__(self, recipe, hosting=None):
        self.recipe, self.runtime = recipe, Runtime.single_process(recipe.run, hosting=hosting)
        self.task = recipe.task.build(self.runtime.lanes, self.runtime.device)
        self.algorithm = recipe.algo.build(self.task, self.runtime)
        self.clock = TrainState(total_samples=recipe.run.total_samples)

    def iterate(self, count=1):
        for _ in range(count):
            self.task.on_iteration_start(self.clock)
            self.algorithm.collect(self.clock)
            metrics = self.algorithm.update(self.clock)
            self.clock.advance(self.algorithm.samples)
        return metrics


class Agent(RecipeAgent):
    """An algorithm on its task with the smoke settings of its recipe."""

    def __init__(self, name, run=None, **algo):
        recipe = apply_overrides(find_recipe(name)(), find_recipe(name).smoke_overrides)
        super().__init__(apply_overrides(recipe, {f"algo.{key}": value for key, value in algo.items()} | (run or {})))


class NonFiniteReward:
    """A task whose reward is non-finite at one step."""

    def __init__(self, task, at):
        self.task, self.at, self.steps = task, at, 0

    def __getattr__(self, name):
        return getattr(self.task, name)

    def step(self, action):
        step = self.task.step(action)
        self.steps += 1
        if self.steps == self.at:
            step.reward[3] = torch.nan
        return step


def parameters(net):
    """Return copies of the parameters of a network."""
    return [x.detach().clone() for x in net.parameters()]


def same(one, other):
    """Return whether two lists of tensors are bitwise equal."""
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
