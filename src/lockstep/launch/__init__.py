"""Start worker processes and watch over them."""
