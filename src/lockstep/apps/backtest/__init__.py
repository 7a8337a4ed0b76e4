"""Walk-forward backtests of trading agents on bars after their training data."""
