"""Tasks: what an agent learns to do. One file each; `check.py` says whether a task keeps the contract."""
