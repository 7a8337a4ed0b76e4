"""Images and text for environments."""
