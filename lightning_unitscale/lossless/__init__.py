"""Lossless unit scaling of captured graphs, and what it shares with the dispatcher."""
