"""Watch a policy: in the terminal, in a window, as a GIF or as an MP4."""
