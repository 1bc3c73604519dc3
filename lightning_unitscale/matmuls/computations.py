"""Name the three computations of a matmul: its result, and the gradients of its operands.

The first operand is the input, the second the weight, whatever they are in the model. A backward
kernel of an attention computes all of its gradients at once, as one computation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from lightning_unitscale.arguments import shown
from lightning_unitscale.capture.name_patterns import NamePatterns, any_matches
from lightning_unitscale.matmuls.measurement import FORWARD, Site

Computation = Literal["forward", "input_gradient", "weight_gradient"]
COMPUTATIONS: tuple[Computation, ...] = get_args(Computation)
Exemption = tuple[str, Computation]  # a glob of module paths or matmul names, and a computation

EXEMPT = "this computation is exempt"
_INPUT, _WEIGHT = COMPUTATIONS[1:]


@functools.lru_cache(maxsize=2**10)
def computed_operands(slot: str, num_operands: int) -> tuple[int, ...]:
    """Return the operands whose gradients a backward matmul computes; empty for a forward one."""
    if slot == FORWARD:
        return ()
    saved = {int(part) for part in slot.split("_")[1:] if part != "g"}
    missing = tuple(index for index in range(num_operands) if index not in saved)
    # A kernel that reads all of them computes all gradients.
    return missing or tuple(range(num_operands))


@functools.lru_cache(maxsize=2**10)
def _computations(slot: str, num_operands: int) -> tuple[Computation, ...]:
    operands = computed_operands(slot, num_operands)
    if not operands:
        return (COMPUTATIONS[0],)
    if num_operands > 2 and len(operands) > 1:
        return (_INPUT,)
    return tuple(_WEIGHT if index == 1 else _INPUT for index in operands)


def computations_of(site: Site, slot: str) -> tuple[Computation, ...]:
    """Return the computations of one call: two for a kernel of both gradients."""
    return _computations(slot, len(site.roles))


def joined_results(results: Sequence[Any]) -> Any:
    """Return the results of a call that computes several gradients, each from its own run."""
    # A convolution's backward kernel returns the gradients of input, weight and bias.
    first, *others = results
    return first if not others else (first[0], *others[0][1:])


class Exemptions:
    """The computations that a format leaves out, by globs."""

    def __init__(self, exempt: Sequence[Exemption] = ()) -> None:
        self._exempt = checked_exempt(exempt)

    def set(self, exempt: Sequence[Exemption]) -> None:
        """Leave out other computations from now on."""
        self._exempt = checked_exempt(exempt)

    def __iter__(self) -> Any:
        return iter(self._exempt)

    def of(self, name: str) -> tuple[Computation, ...]:
        """Return the computations of a matmul that are left out, by its name."""
        site = Site(name, name.rpartition(".")[0], ())
        return tuple(each for each in COMPUTATIONS if self.covers(site, each))

    def covers(self, site: Site, *computations: Computation) -> bool:
        """Check whether any of these computations of a matmul is left out."""
        return any(
            computation in computations and any_matches((pattern,), (site.name, site.module))
            for pattern, computation in self._exempt
        )


def unmatched_exemptions(exempt: Iterable[Exemption], sites: Iterable[Site]) -> list[str]:
    """Return warnings about globs that match none of some matmuls."""
    patterns = NamePatterns([pattern for pattern, _ in exempt], argument="exempt")
    for site in sites:
        patterns.match_names(site.name, site.module)
    return patterns.take_unmatched()


def checked_exempt(exempt: Any) -> tuple[Exemption, ...]:
    """Return exemptions, or raise an error for invalid ones."""
    if exempt is None:
        return ()
    is_list = isinstance(exempt, (list, tuple))
    for each in exempt if is_list else [exempt]:
        is_pair = isinstance(each, (list, tuple)) and len(each) == 2 and isinstance(each[0], str)
        if not is_list or not is_pair or not each[0] or each[1] not in COMPUTATIONS:
            words = ", ".join(map(repr, COMPUTATIONS))
            raise ValueError(
                f"exempt={shown(exempt)}: {shown(each)} is not an exemption. Expected pairs of a "
                f"glob and one of {words}. Pass for example exempt=[('blocks.0.*', 'forward')]."
            )
    return tuple((pattern, computation) for pattern, computation in exempt)
