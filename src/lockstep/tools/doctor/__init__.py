"""Checks whether this machine can train. Each module checks one subject and yields `CheckResult` objects."""
