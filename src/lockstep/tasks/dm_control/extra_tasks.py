"""The eleven tasks that TD-MPC2's authors added to the Control Suite for mt30, rebuilt on the suite's own models.

Goals, speeds and weights are the published ones. Models are the suite's; the arm with three links is built from its arm
with two. Call `suite()` before importing this module.
"""

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
from dm_control.rl.control import Environment
from dm_control.suite import ball_in_cup, base, cheetah, hopper, pendulum, reacher, walker
from dm_control.utils.rewards import tolerance

TARGET_HEIGHT = 1.2
"""Target height of a cheetah's torso and feet."""


def load_variant(name: str) -> Any:
    """Load the environment of one of these tasks."""
    match name.split("-"):
        case ["walker", gait, "backwards"]:
            speed = walker._WALK_SPEED if gait == "walk" else walker._RUN_SPEED
            physics = BackwardsWalker.from_xml_string(*walker.get_model_and_assets())
            return Environment(physics, walker.PlanarWalker(speed, random=0), time_limit=25, control_timestep=0.025)
        case ["cheetah", *goal]:
            physics = cheetah.Physics.from_xml_string(*cheetah.get_model_and_assets())
            return Environment(physics, CHEETAHS["-".join(goal)](random=0), time_limit=10)
        case ["hopper", "hop", "backwards"]:
            physics = hopper.Physics.from_xml_string(*hopper.get_model_and_assets())
            return Environment(physics, BackwardsHopper(True, random=0), time_limit=20, control_timestep=0.02)
        case ["reacher", "three", size]:
            target = reacher._BIG_TARGET if size == "easy" else reacher._SMALL_TARGET
            model, assets = reacher.get_model_and_assets()
            physics = reacher.Physics.from_xml_string(three_links(model), assets)
            return Environment(physics, reacher.Reacher(target, random=0), time_limit=20)
        case ["cup", "spin"]:
            physics = ball_in_cup.Physics.from_xml_string(*ball_in_cup.get_model_and_assets())
            return Environment(physics, SpinningBall(random=0), time_limit=20, control_timestep=0.02)
        case ["pendulum", "spin"]:
            physics = pendulum.Physics.from_xml_string(*pendulum.get_model_and_assets())
            return Environment(physics, SpinningPendulum(random=0), time_limit=20)
    raise ValueError(f"{name} is not one of the variants")


def reaching(value: float, goal: float, margin: float, at_margin: float = 0.5) -> float:
    """Return 1 from a goal on, falling linearly to `at_margin` at a margin below it."""
    return float(tolerance(value, (goal, np.inf), margin, "linear", at_margin))


def raised(height: float) -> float:
    return float(tolerance(height, (TARGET_HEIGHT, np.inf), TARGET_HEIGHT / 2))


class BackwardsWalker(walker.Physics):
    """A walker whose velocity is negated, so that the suite's rewards ask it to walk or run backwards."""

    def horizontal_velocity(self) -> Any:
        return -super().horizontal_velocity()


class BackwardsCheetah(cheetah.Cheetah):
    def get_reward(self, physics: Any) -> float:
        return reaching(-physics.speed(), 8.0, 8.0, 0.0)


class CheetahOnOneFoot(cheetah.Cheetah):
    """Run on one foot, with the other in the air."""

    raised_foot = ""

    def get_reward(self, physics: Any) -> float:
        heights = physics.named.data.xpos
        up = (3 * raised(heights[self.raised_foot, "z"]) + 2 * raised(heights["torso", "z"])) / 5
        return up * (5 * reaching(physics.speed(), 6.0, 6.0, 0.0) + 1) / 6


class CheetahOnFront(CheetahOnOneFoot):
    raised_foot = "bfoot"


class CheetahOnBack(CheetahOnOneFoot):
    raised_foot = "ffoot"


class JumpingCheetah(cheetah.Cheetah):
    """Jump in place, with both feet in the air."""

    def get_reward(self, physics: Any) -> float:
        heights = physics.named.data.xpos
        up = [raised((heights["torso", "z"] + heights[foot, "z"]) / 2) for foot in ("bfoot", "ffoot")]
        in_place = float(tolerance(physics.speed(), (-0.5, 0.5), 0.5, "linear", 0.0))
        return (5 * sum(up) / 2 + in_place) / 6


CHEETAHS = {
    "run-backwards": BackwardsCheetah,
    "run-front": CheetahOnFront,
    "run-back": CheetahOnBack,
    "jump": JumpingCheetah,
}


class BackwardsHopper(hopper.Hopper):
    def get_reward(self, physics: Any) -> float:
        return float(tolerance(physics.height(), (0.6, 2.0))) * reaching(-physics.speed(), 1.0, 0.5)


class SpinningPendulum(pendulum.SwingUp):
    def get_reward(self, physics: Any) -> float:
        return reaching(float(np.linalg.norm(physics.angular_velocity())), 9.0, 4.5)


class SpinningBall(ball_in_cup.BallInCup):
    """Swing the ball around the cup, fast and on a taut string. Nine in ten episodes start with the ball in the cup."""

    def initialize_episode(self, physics: Any) -> None:
        anywhere = self.random.uniform() < 0.1
        while True:
            physics.named.data.qpos["ball_x"] = self.random.uniform(-0.2, 0.2)
            physics.named.data.qpos["ball_z"] = self.random.uniform(0.2, 0.5)
            physics.after_reset()
            if not physics.data.ncon and (anywhere or physics.in_target()):
                break
        base.Task.initialize_episode(self, physics)

    def get_reward(self, physics: Any) -> float:
        speed = np.linalg.norm([physics.named.data.qvel["ball_x"], physics.named.data.qvel["ball_z"]])
        taut = reaching(float(np.linalg.norm(physics.ball_to_target())), 0.5, 0.25)
        return (1 - physics.in_target()) * (taut + 2 * reaching(float(speed), 6.0, 3.0)) / 3


def three_links(model: bytes | str) -> str:
    """Add a third link to the suite's arm with two links: 9 cm each, elbows that bend 80 degrees."""
    root = ET.fromstring(model)
    bodies = {name: _find(root, f".//body[@name='{name}']") for name in ("arm", "hand", "finger")}
    middle = ET.Element("body", name="arm1", pos=".09 0 0")
    ET.SubElement(middle, "geom", name="arm1", type="capsule", fromto="0 0 0 0.09 0 0", size=".01", material="self")
    ET.SubElement(middle, "joint", name="shoulder1", limited="true", range="-80 80")
    _find(bodies["arm"], "geom").set("fromto", "0 0 0 0.09 0 0")
    bodies["arm"].remove(bodies["hand"])
    bodies["arm"].append(middle)
    middle.append(bodies["hand"])
    for name in ("hand", "finger"):
        bodies[name].set("pos", ".09 0 0")
    _find(root, ".//joint[@name='wrist']").set("range", "-80 80")
    _find(root, "actuator").insert(1, ET.Element("motor", name="shoulder1", joint="shoulder1"))
    return ET.tostring(root, encoding="unicode")


def _find(root: ET.Element, path: str) -> ET.Element:
    found = root.find(path)
    if found is None:
        raise ValueError(f"the suite's model has no {path}")
    return found
