"""Measure tensors, and find violations in the measurements."""
