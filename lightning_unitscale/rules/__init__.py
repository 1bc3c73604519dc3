"""Unit-scale a whole step by rules: from its graphs to factors on their tensors."""
