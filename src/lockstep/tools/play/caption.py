"""Lines of text below an image: what a video shows besides the image."""

import math
from collections.abc import Sequence

import numpy as np

from lockstep.tasks.rendering.line_chart import GRAY, WHITE, Canvas, fitting_size

MIN_WIDTH = 300
"""Images are enlarged by an integer factor to this width at least, so that the text can be read."""
LINE_HEIGHT, MARGIN = 20, 8
FONT_SIZE = 14


def add_caption(image: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """Return an image with lines of text below it, uint8 [height, width, 3]. The first line is the title."""
    factor = math.ceil(MIN_WIDTH / image.shape[1])
    image = image.repeat(factor, axis=0).repeat(factor, axis=1)
    width = image.shape[1]
    canvas = Canvas(width, LINE_HEIGHT * len(lines) + MARGIN)
    for number, line in enumerate(lines):
        y, size = LINE_HEIGHT * (number + 1) - 3, fitting_size(line, width - 2 * MARGIN, FONT_SIZE)
        canvas.write(MARGIN, y, line, size, GRAY if number else WHITE)
    return np.concatenate([image, canvas.to_array()])
