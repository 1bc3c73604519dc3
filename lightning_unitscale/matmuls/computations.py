"""Name the three computations of a matmul, exempt them, and find the dimensions that they sum over.

The computations are its result, and the gradients of its operands. The first operand is the input,
the second the weight, whatever they are in the model. A backward kernel of an attention computes
all of its gradients at once, as one computation. Blocks of a format lie along the dimension that a
computation sums over.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_unitscale.arguments import shown
from lightning_unitscale.capture.name_patterns import NamePatterns, any_matches
from lightning_unitscale.capture.operators import MatmulRule
from lightning_unitscale.matmuls.execute import Matmul
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


# NVFP4's scale of a scaled tensor: a constant instead of a reduction over the tensor. Blocks whose
# largest scaled magnitude is from 0.012 to 336 then have a normal FP8 number as their scale.
UNIT_SCALE = 2.0**-3
_HADAMARD = 16
Axes = tuple[int, ...]
# By operator, the dimension of each operand that is summed over, if it is not that of ``a @ b``.
_AXES = {
    "mv": (-1, -1),
    "addmv": (-1, -1),
    "dot": (-1, -1),
    "vdot": (-1, -1),
    "_trilinear": (-1, -1, -1),
}
# Operators that sum along one dimension, so that an orthogonal transform of both operands cancels.
_TRANSFORMED = ("mm", "bmm", "addmm", "baddbmm")


def axes_of(rule: MatmulRule, args: Sequence[Any]) -> list[Axes]:
    """Return the dimensions of each operand that a call sums over, counted from the end."""
    # A fused attention reads each operand once. Its blocks lie along the head dimension, but those
    # of the values in the forward pass along the sequence. A convolution sums over channels, and
    # its weight gradient over batch and positions.
    name, dim = rule.operator, args[rule.operands[0]].dim()
    if name in ("convolution", "convolution_backward"):
        is_forward = name == "convolution"
        channels, others = (1 - dim,), (-dim, *range(2 - dim, 0))
        if not is_forward and 2 not in rule.operands:
            return [others for _ in rule.operands]
        is_transposed = bool(args[6 if is_forward else 7])
        weight = (-dim,) if is_transposed == is_forward else channels
        return [weight if at == (1 if is_forward else 2) else channels for at in rule.operands]
    if name.startswith("_scaled_dot_product"):
        return [(-2,) if at == 2 and not rule.sources else (-1,) for at in rule.operands]
    if name == "conv_tbc_backward":
        return [(-1,) for _ in rule.operands]
    return [(axis,) for axis in _AXES.get(name, (-1, -2))]


def axes_of_function(word: str, operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the dimensions of its operands that a torch function sums over, as :func:`axes_of`."""
    # Empty for functions whose sum does not follow from their name, as that of ``einsum``.
    dims = [operand.dim() for operand in operands]
    if word == "scaled_dot_product_attention" and len(dims) == 3:
        return -1, -1, -2
    if len(dims) != 2:
        return ()
    if word == "linear":
        return -1, -1
    if word.startswith("conv") and word != "conv_tbc":
        channels = 1 - dims[1]
        return channels, -dims[1] if "transpose" in word else channels
    if word in ("matmul", "mv", "addmv", *_TRANSFORMED):
        return -1, -2 if dims[1] > 1 else -1
    return ()


def parts_of(matmul: Matmul, args: Sequence[Any]) -> Iterator[tuple[Matmul, list[Any]]]:
    """Yield the calls that compute the gradients of a convolution's operands one by one."""
    rule = matmul.rule
    if rule.mask is None:
        # A kernel without a mask returns both gradients each time.
        for _ in range(2):
            yield matmul, list(args)
        return
    of_input, of_weight, of_bias = args[rule.mask]
    for wanted in ((of_input, False, False), (False, of_weight, of_bias)):
        if any(wanted):
            given = list(args)
            given[rule.mask] = list(wanted)
            part = rule.reading(given, {})
            kept = [rule.operands.index(position) for position in part.operands]
            new = Matmul(
                part,
                matmul.site,
                matmul.slot,
                tuple(matmul.known[k] for k in kept),
                tuple(matmul.is_gradient[k] for k in kept),
                tuple(matmul.names[k] for k in kept),
                matmul.step,
            )
            yield new, given


class WeightMatmuls:
    """Finds which matmuls read a weight, or compute the gradient of one."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # of the forward matmuls whose second operand is a weight

    def see(self, matmul: Matmul, args: Sequence[Any]) -> None:
        """Note whether a forward matmul reads a weight."""
        if matmul.slot != FORWARD or len(matmul.names) != 2:
            return
        reads = matmul.reads_weight or matmul.site.roles[1:] == ("weight",)
        if reads or is_parameter(args[matmul.rule.operands[1]]):
            self._names.add(matmul.site.name)

    def reads(self, matmul: Matmul, name: str) -> bool:
        """Check whether an operand of a matmul is a weight."""
        site = matmul.site
        return site.name in self._names and name == site.operand_names[1]

    def is_gradient(self, matmul: Matmul) -> bool:
        """Check whether a matmul computes the gradient of a weight, which reads the input."""
        site = matmul.site
        is_one = matmul.slot != FORWARD and matmul.rule.operator in _TRANSFORMED
        return is_one and site.name in self._names and site.operand_names[0] in matmul.names


def hadamard(tensor: Tensor, axis: int, seed: int) -> Tensor:
    """Multiply runs of 16 elements by random signs and the orthogonal Hadamard matrix.

    The signs depend only on the seed. A matmul whose two operands are transformed along the
    dimension of its sum has the same result, and outliers are spread over 16 elements. Elements of
    a last partial run stay.

    References:
        NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), appendix C.
    """
    moved = tensor.movedim(axis, -1)
    whole = moved.shape[-1] // _HADAMARD * _HADAMARD
    if whole == 0:
        return tensor
    bits = zlib.crc32(f"hadamard {seed}".encode())
    signs = [1.0 - 2.0 * (bits >> place & 1) for place in range(_HADAMARD)]
    runs = moved[..., :whole].unflatten(-1, (-1, _HADAMARD)) * tensor.new_tensor(signs)
    for half in (1, 2, 4, 8):
        first, second = runs.unflatten(-1, (-1, 2, half)).unbind(-2)
        runs = torch.stack([first + second, first - second], -2).flatten(-3)
    made = torch.cat([runs.flatten(-2) * _HADAMARD**-0.5, moved[..., whole:]], -1)
    return made.movedim(-1, axis)


def is_parameter(tensor: Tensor) -> bool:
    """Check whether a tensor is a parameter, a view of one, or autocast's copy of one."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return any(
        source is not None and isinstance(getattr(source, "variable", None), nn.Parameter)
        for source, _ in made_by.next_functions
    )
