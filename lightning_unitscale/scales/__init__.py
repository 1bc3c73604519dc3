"""What is measured of a tensor, and what is wrong with it."""
