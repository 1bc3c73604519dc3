"""Packages with their own training entry points, and the comparison of their trainings."""
