"""The first-contact kit: `lockstep doctor --gpu` tries everything on the GPUs of a machine and writes one file."""
