"""Generation claims, as written by starts that have loaded a checkpoint."""

import json

from lockstep.checkpoint.lineage import newest_generation
from lockstep.checkpoint.naming import generation_file


def claim(directory, parent):
    """Claim the next generation with a parent checkpoint; return its number."""
    generation = newest_generation(directory) + 1
    text = json.dumps({"parent": str(parent) if parent else None})
    generation_file(directory, generation).write_text(text)
    return generation
