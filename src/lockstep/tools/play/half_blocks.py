"""Images as text: every character shows two pixels, one above the other, in 24-bit color.

Shapes: H height and W width of the result in pixels.
"""

import numpy as np
from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

UPPER_HALF = "\N{UPPER HALF BLOCK}"


def as_half_blocks(frame: np.ndarray, columns: int, lines: int) -> Text:
    """Return an image, uint8 [height, width, 3], shrunk to at most `columns` x `lines` characters."""
    height, width = frame.shape[:2]
    scale = min(1.0, columns / width, 2 * lines / height)
    size = max(1, int(width * scale)), max(2, int(height * scale) // 2 * 2)
    pixels = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX))  # [H, W, 3]
    text = Text(no_wrap=True)
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        for front, back in zip(upper, lower, strict=True):
            text.append(UPPER_HALF, Style(color=Color.from_rgb(*front), bgcolor=Color.from_rgb(*back)))
        text.append("\n")
    return text
