"""Formats on the products of captured graphs, simulated and real."""
