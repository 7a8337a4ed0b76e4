"""Recipes: one algorithm on one task, with settings that work."""
