"""GPU kit: `lockstep doctor --gpu` runs all GPU checks of a machine and writes one report file."""
