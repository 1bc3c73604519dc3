"""Watch a step while it runs, and name each result by its module and its operation."""
