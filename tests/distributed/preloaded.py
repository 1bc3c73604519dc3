"""Imported once, as the last, by the server that ranks are forked from: what each would repeat."""

from tests.process import spare_time

spare_time()
