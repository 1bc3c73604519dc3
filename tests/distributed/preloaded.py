"""Imported once, as the last, by the server that ranks are forked from: what each would repeat."""

from lightning_unitscale.scales import cpu_kernel
from tests.process import spare_time

cpu_kernel.is_available()  # compiles the kernel
spare_time()
