"""Models and data that the configurations in `configs/` train."""
