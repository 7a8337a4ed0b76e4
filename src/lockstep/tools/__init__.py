"""Commands beyond training: audit, bench, doctor, export, play and report."""
