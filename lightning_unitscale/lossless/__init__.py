"""Lossless unit scaling of captured graphs, at depth "all", and what both depths share."""
