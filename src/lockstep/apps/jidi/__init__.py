"""Jidi, the platform of the team snakes competition: a controller it can call, and replays its viewer plays."""
