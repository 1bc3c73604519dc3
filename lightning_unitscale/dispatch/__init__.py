"""Products at torch's dispatcher: units around each of them, without any graph."""
