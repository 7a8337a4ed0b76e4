"""Tournaments of teams: matches, ratings and a plot of the standings."""
