"""What algorithms learn from: rollouts, replay, data sets; always lane by lane."""
