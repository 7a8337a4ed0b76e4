"""Snake on a square board."""
