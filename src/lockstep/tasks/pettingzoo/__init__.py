"""PettingZoo parallel environments: several agents with one policy."""
