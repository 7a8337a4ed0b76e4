"""Submissions and replays for Jidi, the platform of the team snakes competition."""
