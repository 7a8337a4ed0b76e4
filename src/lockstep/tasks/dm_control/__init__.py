"""DeepMind Control Suite tasks."""
