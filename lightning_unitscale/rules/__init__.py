"""Unit scaling by rules: from the graphs of a whole step to factors on their tensors."""
