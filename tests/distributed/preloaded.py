"""Modules that the fork server imports once for all ranks."""

from tests.process import spare_time

spare_time()
