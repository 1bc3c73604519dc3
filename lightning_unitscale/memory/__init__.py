"""Predict the memory of a training step, and plan steps that fit a memory budget."""
