"""Imported once by the server that ranks are forked from: each of them would compile the kernel."""

from lightning_unitscale.scales import cpu_kernel

cpu_kernel.is_available()
