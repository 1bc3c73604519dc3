"""Capture of a module's steps as FX graphs, and ordered passes over them."""
