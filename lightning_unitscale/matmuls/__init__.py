"""Products at the dispatcher: units and formats around every matrix product of any Python code."""
