"""Read memory budgets, turn them into bytes, and refuse those that no plan meets."""

from __future__ import annotations

import re
from collections.abc import Callable

from lightning_unitscale.arguments import shown
from lightning_unitscale.capture.fallback import Refusal
from lightning_unitscale.memory.profile_report import format_bytes

Budget = int | float | str
"""Bytes (an int, or ``"600MiB"``), a float from 0 (the smallest peak) to 1 (the peak without
rematerialization), ``"min"`` for 0, or ``"min_cut"``."""
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKmMgGtT]?[iI]?[bB])\s*")


def check_budget(budget: Budget, *, name: str = "budget") -> Budget:
    """Return ``budget`` as an int of bytes, a float from 0 to 1, or ``"min_cut"``."""
    expected = (
        "Expected bytes (an int, or a string such as '600MiB' or '2GB'), a float from 0.0 (the "
        "smallest peak that can be planned, also 'min') to 1.0 (the peak without "
        "rematerialization), or 'min_cut'"
    )
    if budget == "min_cut" or (isinstance(budget, float) and 0 <= budget <= 1):
        return budget
    if budget == "min":
        return 0.0
    num_bytes = parse_bytes(budget)
    if num_bytes is None:
        raise ValueError(
            f"{name}={shown(budget)}: not a budget. {expected}. Pass {name}=0.5 to try it."
        )
    if num_bytes < 1:
        raise ValueError(f"{name}={budget!r}: not positive. {expected}. Pass more.")
    return num_bytes


def parse_bytes(quantity: object) -> int | None:
    """Return an int, or a string such as ``"600MiB"``, in bytes; ``None`` for other values."""
    if isinstance(quantity, str) and (match := _QUANTITY.fullmatch(quantity)):
        return int(float(match[1]) * _UNITS[match[2].upper()])
    return quantity if isinstance(quantity, int) and not isinstance(quantity, bool) else None


def limit_of(budget: Budget, default: int, floor: Callable[[], int]) -> int:
    """Return a checked budget in bytes. A float leads from the floor to the default peak."""
    if not isinstance(budget, float):
        return int(budget)
    if budget == 1:
        return default  # finding the floor takes longest
    least = floor()
    return least + int(budget * (default - least))


class BudgetError(Refusal, ValueError):
    """Error for a budget that no plan of a step meets, or that its executor cannot follow."""


def refusal(num_bytes: int, floor: int, default: int, where: str) -> BudgetError:
    """Return the error for a budget in bytes that no plan meets."""
    return BudgetError(
        f"budget={format_bytes(num_bytes)} is too small. The smallest achievable peak is "
        f"{format_bytes(floor)} ({floor} bytes), {where}. Without rematerialization it is "
        f"{format_bytes(default)}. Raise the budget, or make the batch, the sequence or the output "
        "layer smaller. A float such as budget=0.5 is always met."
    )
