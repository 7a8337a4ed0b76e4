"""Console output, metric logs, videos and Weights & Biases."""
