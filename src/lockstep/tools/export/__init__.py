"""Export policies and import weights. Every exported file is loaded again and compared with the policy."""
