"""Watching a step while it runs: every result by its module and torch's own word for it."""
