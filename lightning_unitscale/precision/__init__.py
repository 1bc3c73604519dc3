"""Account for what low precision costs: which matmuls lose accuracy, and where two runs part."""
