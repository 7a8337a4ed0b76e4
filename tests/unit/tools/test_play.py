"""Watching a policy: in the terminal, in a window (SDL dummy driver), as GIF and as MP4."""

import sys
from types import SimpleNamespace

import av
import numpy as np
import pygame
import pytest
from PIL import Image

from lockstep.cli import main
from lockstep.config import ConfigError, apply_overrides
from lockstep.distributed import Runtime
from lockstep.inference import LoadedPolicy
from lockstep.registry import find_recipe
from lockstep.tools.play import video_files
from lockstep.tools.play.caption import LINE_HEIGHT, MARGIN, add_caption
from lockstep.tools.play.display import show_in_terminal, show_in_window
from lockstep.tools.play.half_blocks import as_half_blocks
from lockstep.tools.play.playback import END_FRAMES, play_episodes
from lockstep.tools.play.video_files import write_gif, write_mp4


@pytest.fixture
def policy():
    """An untrained snake policy."""
    recipe = apply_overrides(find_recipe("snake-ppo")(), find_recipe("snake-ppo").smoke_overrides)
    runtime = Runtime.single_process(recipe.run)
    algorithm = recipe.algo.build(recipe.task.build(runtime.lanes, runtime.device), runtime)
    return LoadedPolicy(algorithm.policy(), recipe, runtime.device)


class Shade:
    """A frame of one color that gets brighter, with a white corner."""

    def __init__(self, number, height=33, width=47):
        self.number, self.picture = number, np.full((height, width, 3), 20 + 10 * number).astype(np.uint8)
        self.picture[:8, :8] = 255

    def render_text(self):
        return f"scene {self.number}"

    def render(self):
        return self.picture


class Noise(Shade):
    """A frame that does not compress."""

    def render(self):
        return np.random.default_rng(self.number).integers(0, 255, (64, 64, 3), np.uint8)


def decoded(path):
    """Frames of a GIF at 0.1 s each; repeated frames are stored once with a longer duration."""
    with Image.open(path) as gif:
        frames = []
        for number in range(gif.n_frames):
            gif.seek(number)
            frames += [np.asarray(gif.convert("RGB"))] * round(gif.info["duration"] / 100)
    return frames


# ------------------------------------------------------------------------------------------------------------- episodes


def test_play_episodes_plays_in_sequence_up_to_max_steps(policy):
    one, two = (len(list(play_episodes(policy, episodes, 1, 500))) for episodes in (1, 2))
    assert 0 < one < two < 500
    assert len(list(play_episodes(policy, 50, 1, 7))) == 7
    starts = ["step 0  return 0.00" in scene.render_text() for scene in play_episodes(policy, 2, 1, 500)]
    assert sum(starts) == 2
    assert starts[0]


def test_play_episodes_of_dataset_without_playback_raises_with_fix(policy):
    class Silent:
        def build(self, lanes, device):
            return self

    mute = LoadedPolicy(policy.policy, SimpleNamespace(task=Silent()), policy.device)
    with pytest.raises(ConfigError, match=r"Silent has nothing to watch.*\n.*lockstep eval"):
        next(play_episodes(mute, 1, 1, 5))


def test_show_in_terminal_without_tty_prints_last_frame(capsys):
    show_in_terminal([Shade(1), Shade(2)], fps=1e-3)
    assert capsys.readouterr().out == "scene 2\n"


def test_show_in_terminal_prints_final_return_of_each_episode(policy, capsys):
    lengths, returns = [], []
    for scene in play_episodes(policy, 2, 1, 2000):
        if scene.length == 0:
            lengths.append(0)
            returns.append(scene)
        lengths[-1] += not scene.ended
    show_in_terminal(play_episodes(policy, 2, 1, 2000), fps=1e9)
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines == [
        f"episode {number}: return {scene.total:.2f} in {length} steps  {scene._score}"
        for number, (length, scene) in enumerate(zip(lengths, returns, strict=True), 1)
    ]


def test_show_in_terminal_marks_episode_that_was_cut_off(policy, capsys):
    show_in_terminal(play_episodes(policy, 1, 1, 2), fps=1e9)
    assert capsys.readouterr().out.splitlines()[-1].endswith("in 1 steps, not ended")


@pytest.mark.parametrize(("colors", "images"), [("truecolor", True), ("", False)])
def test_show_in_terminal_shows_image_in_24_bit_color(monkeypatch, capsys, colors, images):
    for name, value in {
        "FORCE_COLOR": "1",
        "TERM": "xterm",
        "COLORTERM": colors,
        "COLUMNS": "40",
        "LINES": "12",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    scene = Shade(3)
    scene.terminal_image = scene.render
    show_in_terminal([scene], fps=1e9)
    shown = capsys.readouterr().out
    assert ("38;2;255;255;255;48;2;255;255;255m" in shown) is images
    assert "scene 3" in shown


@pytest.mark.parametrize(("columns", "lines"), [(20, 30), (100, 4), (100, 100)])
def test_half_blocks_fit_and_keep_colors(columns, lines):
    frame = np.zeros((20, 40, 3), np.uint8)
    frame[10:] = 9, 8, 7
    text = as_half_blocks(frame, columns, lines)
    rows = text.plain.splitlines()
    assert len(rows) <= lines
    assert {len(row) for row in rows} == {min(40, columns, 4 * lines)}
    assert len(rows[0]) == 4 * len(rows)
    assert (text.spans[0].style.color.triplet, text.spans[-1].style.bgcolor.triplet) == ((0, 0, 0), (9, 8, 7))


def test_show_in_terminal_without_packages_shows_text(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLORTERM", "truecolor")

    def render():
        raise ConfigError("no pygame.", "pip install it")

    scene = Shade(3)
    scene.terminal_image = render
    show_in_terminal([scene], fps=1e9)
    assert "no image: no pygame." in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- captions


def test_scene_shows_title_step_score_and_result_of_its_last_frame(policy):
    texts = [scene.render_text() for scene in play_episodes(policy, 1, 1, 2000)]
    title, progress = texts[0].splitlines()[-2:]
    assert (title, progress) == ("Snake 6 x 6", "step 0  return 0.00  food 0 of 33")
    steps = len(texts) - END_FRAMES
    assert len(set(texts[steps:])) == 1
    assert texts[-1].splitlines()[:-1] == texts[steps - 1].splitlines()[:-1]  # the board before the last step
    assert texts[-1].splitlines()[-1].startswith(f"step {steps}  return ")
    assert texts[-1].endswith("game over")


def test_scene_image_has_caption_of_constant_size_below_the_board(policy):
    shapes, boards = set(), set()
    for scene in play_episodes(policy, 1, 1, 2000):
        image = scene.render()
        board = scene.terminal_image() if scene.env.prefers_image else scene._render_env()
        factor = image.shape[1] // board.shape[1]
        assert (image[: factor * len(board) : factor, ::factor] == board).all()
        shapes.add(image.shape)
        boards.add(image[factor * len(board) :].tobytes())
    assert shapes == {(2 * 168 + 2 * LINE_HEIGHT + MARGIN, 2 * 168, 3)}
    assert len(boards) == scene.length + 1  # each step, and the result


def test_caption_shrinks_long_lines():
    image = np.zeros((10, 300, 3), np.uint8)
    short, long = (add_caption(image, ["m" * count])[10:] for count in (10, 40))
    assert short.shape == long.shape
    assert (short[:, -MARGIN:] == short[0, 0]).all()
    assert (long[:, -MARGIN:] == long[0, 0]).all()


def test_write_gif_keeps_the_result_when_it_drops_frames(tmp_path, monkeypatch):
    monkeypatch.setattr(video_files, "MAX_FRAMES", 8)
    scenes = [Shade(number / 10) for number in range(99)] + [Shade(23)]
    scenes[-1].ended = True
    write_gif(scenes, tmp_path / "a.gif", fps=10.0)
    assert decoded(tmp_path / "a.gif")[-1][20, 20, 0] == pytest.approx(250, abs=6)


# -------------------------------------------------------------------------------------------------------------- files


def test_write_gif_contains_every_frame(tmp_path):
    scenes = [Shade(number) for number in range(9)]
    written = write_gif(scenes, tmp_path / "a.gif", fps=10.0)
    assert (written.frames, written.every, written.size) == (9, 1, (tmp_path / "a.gif").stat().st_size)
    frames = decoded(tmp_path / "a.gif")
    assert [frame[20, 20, 0] for frame in frames] == pytest.approx(
        [scene.picture[20, 20, 0] for scene in scenes], abs=6
    )


def test_write_gif_subsamples_long_episodes_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(video_files, "MAX_FRAMES", 8)
    written = write_gif((Shade(number / 10) for number in range(100)), tmp_path / "a.gif", fps=10.0)
    assert (written.frames, written.every) == (7, 16)
    assert len(decoded(tmp_path / "a.gif")) == 7


def test_write_gif_respects_size_limit(tmp_path):
    whole = write_gif((Noise(number) for number in range(40)), tmp_path / "whole.gif", 10.0)
    small = write_gif((Noise(number) for number in range(40)), tmp_path / "small.gif", 10.0, limit=whole.size / 1.5)
    assert small.size <= whole.size / 1.5
    assert (small.frames, small.every) == (20, 2)
    least = write_gif((Noise(number) for number in range(40)), tmp_path / "least.gif", 10.0, limit=1.0)
    assert least.frames == 10  # a GIF is always written


def test_write_mp4_contains_every_frame_enlarged_as_h264(tmp_path):
    scenes = [Shade(number) for number in range(9)]
    written = write_mp4(scenes, tmp_path / "a.mp4", fps=12.5)
    with av.open(tmp_path / "a.mp4") as video:
        stream = video.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == 12.5
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(stream)]
    assert len(frames) == written.frames == 9
    assert written.size == (tmp_path / "a.mp4").stat().st_size
    assert frames[0].shape == (13 * 33 + 1, 13 * 47 + 1, 3)  # scaled by 640 // 47 and padded to even size
    for frame, scene in zip(frames, scenes, strict=True):
        assert frame[:100, :100].mean() == pytest.approx(255, abs=8)
        assert frame[200:].mean() == pytest.approx(scene.picture[-1, -1, 0], abs=8)


def test_write_mp4_without_av_raises_with_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"lockstep-rl\[video\]"):
        write_mp4([Shade(0)], tmp_path / "a.mp4", 10.0)


@pytest.mark.parametrize("write", [write_gif, write_mp4])
def test_write_video_without_frames_or_directory_raises(tmp_path, write):
    with pytest.raises(ConfigError, match="nothing to show"):
        write([], tmp_path / "a", 10.0)
    with pytest.raises(ConfigError, match="cannot be written"):
        write([Shade(0)], tmp_path / "nowhere" / "a", 10.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("--fps", "0"), ("--episodes", "0"), ("--max-steps", "0")])
def test_play_non_positive_numbers_are_rejected(tmp_path, capsys, words):
    assert main(["play", str(tmp_path), *words]) == 2
    assert "must be positive" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- window


def test_show_in_window_shows_every_step_and_closes(policy, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown = []
    monkeypatch.setattr(
        pygame.display, "flip", lambda: shown.append(pygame.surfarray.array3d(pygame.display.get_surface()))
    )
    show_in_window(play_episodes(policy, 1, 1, 9), fps=1000.0)
    assert 1 <= len(shown) <= 9
    assert max(shown[0].shape[:2]) > 320  # enlarged
    assert shown[0].std() > 0  # not a uniform image
    assert not pygame.display.get_init()


@pytest.mark.parametrize("event", [{"type": pygame.QUIT}, {"type": pygame.KEYDOWN, "key": pygame.K_q}])
def test_show_in_window_stops_on_quit_event(policy, monkeypatch, event):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown = []

    def flip():
        shown.append(1)
        if len(shown) == 3:
            pygame.event.post(pygame.event.Event(event["type"], **({"key": event["key"]} if "key" in event else {})))

    monkeypatch.setattr(pygame.display, "flip", flip)
    show_in_window(play_episodes(policy, 50, 1, 500), fps=1000.0)
    assert len(shown) == 3


def test_show_in_window_without_display_raises(policy, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "no-such-driver")
    with pytest.raises(ConfigError, match="cannot open a window"):
        show_in_window(play_episodes(policy, 1, 1, 3), fps=10.0)
