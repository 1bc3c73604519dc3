"""What became of the products of a step: in units, in a format, or as they are and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from tabulate import tabulate
from torch import Tensor

Kind = Literal["units", "format", "plain", "left out"]
# The products of a site that run plain, with reasons, and which of them it is.
PlainProduct = tuple[Mapping[str, str], str]
# Below this share of a step's floating-point operations a user is warned.
ENOUGH = 0.9
_NUM_NAMED = 5


@dataclass(frozen=True)
class ProductCount:
    """Products that ran alike in one module.

    Attributes:
        module: Path of the module; empty for the root.
        kind: ``"units"``, ``"format"`` (rounded to fewer bits, in units if there are any),
            ``"plain"``, or ``"left out"`` of the format where there are no units.
        reason: Why they ran plain, or outside of a format; empty otherwise.
        num_products: How many there were in a step.
        flops: Their floating-point operations.
    """

    module: str
    kind: Kind
    reason: str
    num_products: int
    flops: int


@dataclass(frozen=True)
class Coverage:
    """The products of one step, forward and backward.

    Attributes:
        counts: By module, kind and reason, in the order in which they ran.
        has_units: Whether products run in units; if not, they are only rounded.
        lacking: Operands, and gradients, that had no unit after the step.
    """

    counts: tuple[ProductCount, ...] = ()
    has_units: bool = True
    lacking: tuple[str, ...] = ()

    @property
    def num_products(self) -> int:
        """Products of the step."""
        return sum(count.num_products for count in self.counts)

    @property
    def num_in_units(self) -> int:
        """Those that ran on operands in units, rounded or not."""
        return sum(count.num_products for count in self.counts if count.kind in ("units", "format"))

    @property
    def reasons(self) -> Mapping[str, float]:
        """Why products ran plain, with their share of the step's floating-point operations."""
        shares: Counter[str] = Counter()
        for count in self.counts:
            if count.kind == "plain":
                shares[count.reason] += count.flops
        total = sum(count.flops for count in self.counts) or 1
        return {reason: flops / total for reason, flops in shares.most_common()}

    def fraction_of_flops(self, *kinds: Kind) -> float:
        """Share of the step's floating-point operations in products of these kinds; 1 if none."""
        total = sum(count.flops for count in self.counts)
        if total == 0:
            return 1.0
        return sum(count.flops for count in self.counts if count.kind in kinds) / total

    def uncovered_modules(self) -> tuple[str, ...]:
        """Modules with plain products, those with the most operations first."""
        flops: Counter[str] = Counter()
        for count in self.counts:
            if count.kind == "plain":
                flops[count.module or "the step itself"] += count.flops
        return tuple(module for module, _ in flops.most_common())

    def line(self) -> str:
        """One line for the log."""
        if not self.counts:
            return "no matrix product ran"
        rounded = sum(count.num_products for count in self.counts if count.kind == "format")
        how = "in units" if self.has_units else "rounded to a format"
        text = (
            f"{self.num_in_units} of {self.num_products} products {how} "
            f"({_percent(self.fraction_of_flops('units', 'format'))} of their FLOPs)"
        )
        if rounded and self.has_units:
            share = _percent(self.fraction_of_flops("format"))
            text += f", {rounded} of them rounded to a format ({share})"
        reasons = [f"{_percent(share)} plain: {why}" for why, share in self.reasons.items()]
        return "; ".join(filter(None, [text, *reasons, lacking_line(self.lacking)]))

    def shortfall(self) -> str:
        """What to warn of where much of a step ran plain; empty where enough did not."""
        modules = self.uncovered_modules()
        if not modules or 1.0 - self.fraction_of_flops("plain") >= ENOUGH:
            return ""
        wanted = "in units" if self.has_units else "rounded"
        return (
            f"{self.line()}. What runs plain is in {listed(modules)}; expected at least "
            f"{ENOUGH:.0%} of the FLOPs {wanted}; explain() lists all products."
        )

    def table(self) -> str:
        """A row for each module, kind and reason."""
        total = sum(count.flops for count in self.counts) or 1
        rows = [
            (
                count.module or "(the step itself)",
                count.num_products,
                _percent(count.flops / total),
                count.kind,
                count.reason,
            )
            for count in self.counts
        ]
        return tabulate(rows, headers=("module", "products", "FLOPs", "run in", "why"))


class CoverageCounter:
    """Counts products while a step runs."""

    def __init__(self) -> None:
        self._counted: list[tuple[str, Kind, str, int, PlainProduct | None]] = []

    def add(
        self,
        module: str,
        kind: Kind,
        reason: str,
        flops: int,
        plain: PlainProduct | None = None,
    ) -> None:
        """Count one product.

        Args:
            module: Path of its module.
            kind: How it ran.
            reason: Why it ran plain, or outside of a format, if it did.
            flops: Its floating-point operations.
            plain: The products of its site that run plain, and which of them it is: whether one in
                units will be plain from now on is known after the first step.
        """
        self._counted.append((module, kind, reason, flops, plain))

    def add_complex(self, module: str, operands: Sequence[Tensor], flops: int) -> None:
        """Count a product of complex numbers with those of its gradients, which run plain.

        These are counted here, since they do not say whose they are.

        Args:
            module: Path of its module.
            operands: What it reads.
            flops: Floating-point operations of a product of real numbers.
        """
        num_gradients = sum(operand.requires_grad for operand in operands)
        for _ in range(1 + num_gradients if torch.is_grad_enabled() else 1):
            self.add(module, "plain", "complex numbers", 4 * flops)

    def result(self, *, has_units: bool = True, lacking: Iterable[str] = ()) -> Coverage:
        """What was counted, as it runs from now on.

        Args:
            has_units: Whether products run in units, rather than only rounded.
            lacking: Operands, and gradients, that have no unit.
        """
        joint: dict[tuple[str, Kind, str], list[int]] = {}
        for module, kind, reason, flops, plain in self._counted:
            if kind == "units" and plain is not None and (why := plain[0].get(plain[1], "")):
                kind, reason = "plain", why
            entry = joint.setdefault((module, kind, reason), [0, 0])
            entry[0] += 1
            entry[1] += flops
        counts = tuple(ProductCount(*key, *entry) for key, entry in joint.items())
        return Coverage(counts, has_units, tuple(lacking))


def lacking_line(names: Sequence[str]) -> str:
    """Name operands without a unit; empty if there are none."""
    if not names:
        return ""
    some = "1 operand has" if len(names) == 1 else f"{len(names)} operands have"
    return f"{some} no unit yet (zero or not finite so far): {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """Name the first few."""
    return ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")


def _percent(share: float) -> str:
    return "100 %" if share == 1.0 else f"{100 * share:.3g} %"
