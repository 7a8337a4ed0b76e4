"""Batched tensor simulators: many environments in one object, whose tensors stay on the device."""
