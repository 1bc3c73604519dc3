"""Scale and round every matmul of any Python code at torch's dispatcher."""
