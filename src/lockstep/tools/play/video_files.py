"""Write scenes to video files: animated GIFs, and MP4s with PyAV."""

import io
import zlib
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lockstep.config import ConfigError
from lockstep.io.rich_console import PrintableConsole
from lockstep.protocols import Renderable

MAX_FRAMES = 300
"""Largest number of frames of a GIF. Of longer videos, every second frame is dropped until they fit."""
MIN_FRAMES = 16
"""Smallest number of frames that a GIF keeps, even if it is larger than its limit."""
COLORS = 64
MAX_SIZE = 640
"""Frames are enlarged by the largest integer factor that keeps them within this size in pixels."""


class VideoInfo(NamedTuple):
    """Contents of a written video file."""

    frames: int
    every: int
    """Steps per frame."""
    size: int
    """Size of the file in bytes."""


def write_gif(scenes: Iterable[Renderable], path: Path, fps: float, limit: float | None = None) -> VideoInfo:
    """Write scenes as an animated GIF of at most `limit` bytes (if possible) and MAX_FRAMES frames."""
    frames: list[_Packed] = []
    every = 1
    for number, scene in enumerate(_with_progress(scenes)):
        if number % every and not getattr(scene, "ended", False):  # the result is always shown
            continue
        frames.append(_Packed.of(scene.render()))
        if len(frames) > MAX_FRAMES:
            frames, every = frames[::2], 2 * every
    if not frames:
        raise ConfigError(*_NO_FRAMES)
    with PrintableConsole(stderr=True).status(f"encoding {len(frames)} frames"):
        images = _in_one_palette(frames)
        encoded = _encode(images, fps)
        while limit is not None and len(encoded) > limit and len(images) > MIN_FRAMES:
            images, every = images[::2], 2 * every
            encoded = _encode(images, fps)
    _write(path, encoded)
    return VideoInfo(len(images), every, len(encoded))


class _Packed(NamedTuple):
    """Compressed frame. Compression saves memory, because a video may be written while a run trains."""

    size: tuple[int, int]
    """Width and height in pixels."""
    content: bytes

    @classmethod
    def of(cls, frame: np.ndarray) -> "_Packed":
        return cls((frame.shape[1], frame.shape[0]), zlib.compress(frame.tobytes(), 1))

    def image(self) -> Image.Image:
        return Image.frombytes("RGB", self.size, zlib.decompress(self.content))


def _in_one_palette(frames: list[_Packed]) -> list[Image.Image]:
    """Quantize frames with one palette, so that they do not flicker and unchanged areas compress well."""
    samples = frames[:: max(1, len(frames) // 8)] + frames[-1:]  # also include colors that appear late
    width, height = samples[0].size
    strip = Image.new("RGB", (width, height * len(samples)))
    for index, frame in enumerate(samples):
        strip.paste(frame.image(), (0, height * index))
    palette = strip.quantize(colors=COLORS, dither=Image.Dither.NONE)
    return [frame.image().quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]


def _encode(images: list[Image.Image], fps: float) -> bytes:
    buffer = io.BytesIO()
    duration = max(20, round(1000 / fps))  # viewers replace shorter durations by a default
    images[0].save(
        buffer, "gif", save_all=True, append_images=images[1:], duration=duration, loop=0, optimize=True, disposal=1
    )
    return buffer.getvalue()


def write_mp4(scenes: Iterable[Renderable], path: Path, fps: float) -> VideoInfo:
    """Write scenes as an MP4 that all browsers and phones play: H.264, yuv420p, even width and height."""
    try:
        import av
    except ImportError:
        raise ConfigError("an MP4 needs PyAV, which is not installed.", "pip install 'lockstep-rl[video]'") from None
    frames = (_upscale(scene.render()) for scene in _with_progress(scenes))
    buffer, stream, count = io.BytesIO(), None, 0
    with av.open(buffer, "w", format="mp4") as container:
        for frame in frames:
            if stream is None:
                stream = container.add_stream("h264", rate=Fraction(fps).limit_denominator(1000))
                stream.height, stream.width = frame.shape[:2]
                stream.pix_fmt, stream.options = "yuv420p", {"crf": "20"}
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            count += 1
        if stream is None:
            raise ConfigError(*_NO_FRAMES)
        container.mux(stream.encode())
    _write(path, buffer.getvalue())
    return VideoInfo(count, 1, len(buffer.getvalue()))


_NO_FRAMES = "there is nothing to show.", "Play at least one episode of one step or more."


def scale_factor(frame: np.ndarray) -> int:
    """Return the factor by which a frame is enlarged."""
    return max(1, int(MAX_SIZE // max(frame.shape[:2])))


def _upscale(frame: np.ndarray) -> np.ndarray:
    """Enlarge a frame, and pad it to even height and width by repeating its last row or column."""
    factor = scale_factor(frame)
    frame = frame.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = frame.shape[:2]
    return np.ascontiguousarray(np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge"))


def _with_progress(scenes: Iterable[Renderable]) -> Iterator[Renderable]:
    """Yield scenes and show their number in a progress bar."""
    columns = "{task.description}", BarColumn(), TextColumn("{task.completed} frames"), TimeElapsedColumn()
    console = PrintableConsole(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("playing", total=None)
        for scene in scenes:
            yield scene
            progress.advance(task)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.", "Give a file in a directory that exists.") from None
