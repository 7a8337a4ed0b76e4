"""Applications on top of trained agents: backtests, leagues and Jidi submissions."""
