"""Optimizers of scaled parameters: learning rates, settings and state."""
