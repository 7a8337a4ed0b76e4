"""Teams against each other: matches, ratings, and a picture of who stands where."""
