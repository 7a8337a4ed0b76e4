"""TD-MPC2: model-based reinforcement learning with planning."""
