"""Taking a model away, and bringing one in: each way out is compared with the policy before it counts as done."""
