"""Networks and the small modules they are made of."""
