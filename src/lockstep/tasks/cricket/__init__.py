"""Cricket data, ball by ball."""
