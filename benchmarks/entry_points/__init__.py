"""Packages that train by entry points of their own, and what compares their trainings."""
