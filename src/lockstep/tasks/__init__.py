"""Tasks: environments and datasets. One package each; `env_checker.py` checks the contract of environments."""
