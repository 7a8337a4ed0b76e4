"""Data sets of episodes: from replay buffers of runs, and from the chunks of the authors' TD-MPC2."""
