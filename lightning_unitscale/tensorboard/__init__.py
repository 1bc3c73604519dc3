"""Scales in TensorBoard: what is written, and how the dashboard reads it.

Empty on purpose: TensorBoard imports this package at its own start, with neither torch nor
Lightning, and every import here would slow that start.
"""
