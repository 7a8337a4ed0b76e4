"""Trading on price data or a simulated market."""
