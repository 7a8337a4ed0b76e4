"""Watching a policy in a window, on SDL's driver that needs no screen."""

import pygame
import pytest

from lockstep.config import ConfigError, overlay
from lockstep.loading import LoadedPolicy
from lockstep.play import play_window
from lockstep.recipes import find_recipe
from lockstep.runtime import Runtime


@pytest.fixture
def policy():
    """An untrained snake."""
    recipe = overlay(find_recipe("snake-ppo")(), find_recipe("snake-ppo").smoke)
    runtime = Runtime.alone(recipe.run)
    algorithm = recipe.algo.build(recipe.task.build(runtime.lanes, runtime.device), runtime)
    return LoadedPolicy(algorithm.policy(), recipe, runtime.device)


def test_a_window_shows_every_step_and_is_closed_in_the_end(policy, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown = []
    monkeypatch.setattr(
        pygame.display, "flip", lambda: shown.append(pygame.surfarray.array3d(pygame.display.get_surface()))
    )
    play_window(policy, episodes=1, seed=1, fps=1000.0, max_steps=9)
    assert 1 <= len(shown) <= 9
    assert max(shown[0].shape[:2]) > 320  # enlarged
    assert shown[0].std() > 0  # something is to be seen
    assert not pygame.display.get_init()


@pytest.mark.parametrize("event", [{"type": pygame.QUIT}, {"type": pygame.KEYDOWN, "key": pygame.K_q}])
def test_a_window_that_is_closed_ends_the_show(policy, monkeypatch, event):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown = []

    def flip():
        shown.append(1)
        if len(shown) == 3:
            pygame.event.post(pygame.event.Event(event["type"], **({"key": event["key"]} if "key" in event else {})))

    monkeypatch.setattr(pygame.display, "flip", flip)
    play_window(policy, episodes=50, seed=1, fps=1000.0, max_steps=500)
    assert len(shown) == 3


def test_where_no_window_can_be_it_is_said(policy, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "no-such-driver")
    with pytest.raises(ConfigError, match="no window can be opened here"):
        play_window(policy, episodes=1, seed=1, fps=10.0, max_steps=3)
