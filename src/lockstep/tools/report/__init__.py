"""Self-contained HTML report about one or several runs."""
