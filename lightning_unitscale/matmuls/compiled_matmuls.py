"""Describe the matmuls of a compiled graph, also in text that Inductor caches with its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_unitscale.capture.operators import RULE_OF, MatmulRule
from lightning_unitscale.functional.scale import LARGEST_LOG2
from lightning_unitscale.matmuls.calls import slot_of
from lightning_unitscale.matmuls.compiled_runs import GraphMatmul, MatmulNames
from lightning_unitscale.matmuls.measurement import FORWARD, Site

# A description of a matmul, of which JSON keeps all.
Row = Mapping[str, Any]


@dataclass(eq=False)
class CompiledMatmul(GraphMatmul):
    """A scaled matmul of a graph."""

    dtype: torch.dtype  # of its operands
    start: int = 0  # index of its first factor among those of the graph
    is_scaled: bool = False  # already in the joint graph
    # The matmuls of its site in this graph, itself included.
    kin: list[CompiledMatmul] = field(default_factory=list)

    @property
    def slot(self) -> str:
        """Return ``"forward"``, or the name of its backward matmul."""
        return slot_of(self.sources) if self.is_backward else FORWARD

    @property
    def num_factors(self) -> int:
        """Return the number of its factors: its rule's, and one to undo a gradient's unit."""
        return self.rule.num_factors + (None in self.sources)

    @property
    def names(self) -> tuple[tuple[int, int | None], ...]:
        """Return the names that distinguish its operands' units within its graph."""
        return tuple((self.forward, source) for source in self.sources)

    def stays(self, operand: int) -> bool:
        """Check whether an operand stays unscaled."""
        # The temperature of an attention is a constant in the graph and cannot absorb a unit.
        return self.rule.temperature is not None and self.rule.temperature[operand] != 0

    def known(self, site: Site) -> tuple[int | None, ...]:
        """Return the exponents of its operands' units; ``None`` until they are measured."""
        return tuple(site.log2_gamma if k is None else site.log2_units[k] for k in self.sources)

    def why_plain(self, site: Site) -> str:
        """Return why it runs unscaled with the units in force; empty if it runs scaled."""
        # Matmuls of a site share scaled copies, so all of them run scaled or none does.
        reasons = list(site.plain.values())
        if any(
            abs(exponent) > LARGEST_LOG2 for kin in self.kin for exponent in kin._exponents(site)
        ):
            reasons.append(f"a factor beyond 2**{LARGEST_LOG2} or its inverse, in a compiled graph")
        return reasons[0] if reasons else ""

    def exponents(self, site: Site) -> list[int]:
        """Return the exponents of its factors."""
        return [0] * self.num_factors if self.why_plain(site) else self._exponents(site)

    def _exponents(self, site: Site) -> list[int]:
        known = enumerate(self.known(site))
        units = tuple(0 if self.stays(index) else unit or 0 for index, unit in known)
        back = [units[index] for index, source in enumerate(self.sources) if source is None]
        return [*self.rule.exponents(units), *back]


@dataclass(frozen=True)
class PlainMatmul:
    """An unscaled matmul of a compiled graph."""

    operator: str  # its name
    module: str  # path of its module
    reason: str  # why it is unscaled
    flops: int


@dataclass(frozen=True)
class LookedAt:
    """A matmul that is measured together with others."""

    index: int  # in its graph
    # For each operand and addend: its index among the measured tensors, and whether that tensor
    # is scaled.
    reads: tuple[tuple[int, bool], ...]


def row_of(matmul: CompiledMatmul | PlainMatmul) -> Row:
    """Return the description of a matmul."""
    if isinstance(matmul, PlainMatmul):
        return vars(matmul)
    rule = matmul.rule
    return {
        "rule": rule.operator,
        # What the call does not read; see MatmulRule.reading.
        "mask": RULE_OF[rule.operator].mask_of(rule),
        "adds": bool(rule.addends),
        "names": matmul.matmul_names,
        "forward": matmul.forward,
        "sources": matmul.sources,
        "flops": matmul.flops,
        "dtype": str(matmul.dtype).removeprefix("torch."),
    }


def matmul_of(row: Row, number: int) -> CompiledMatmul | PlainMatmul:
    """Return the matmul with a number in its graph and this description."""
    if "rule" not in row:
        return PlainMatmul(**row)
    rule: MatmulRule = RULE_OF[row["rule"]]
    args: Any = {rule.mask: row["mask"]}
    word, roles, path = row["names"]
    return CompiledMatmul(
        rule.reading(args, {} if row["adds"] else {"beta": 0}),
        MatmulNames(word, tuple(roles), path),
        number,
        row["forward"],
        tuple(row["sources"]),
        row["flops"],
        getattr(torch, row["dtype"]),
    )
