"""DDPG and TD3 for single agents and teams."""
