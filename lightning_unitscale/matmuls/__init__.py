"""Matmuls at the dispatcher: units and formats around every matmul of any Python code."""
