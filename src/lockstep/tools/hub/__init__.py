"""Publish a run on the Hugging Face Hub, and download one. Downloaded files are data: nothing in them is executed."""
