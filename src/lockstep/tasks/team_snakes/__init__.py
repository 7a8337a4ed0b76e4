"""Three snakes against three on one board."""
