"""Recipes: an algorithm on a task, with settings that work."""
