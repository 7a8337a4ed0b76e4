"""One page about one run or several, that needs nothing but itself."""
