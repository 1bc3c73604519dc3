"""Which arguments of a torch function a product that has run in it has read, and in which units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from lightning_unitscale.dispatch.threads import RanProduct
from lightning_unitscale.tracking.torch_state import is_readable

# What a product adds comes first among its arguments.
_ADDENDS_FIRST = frozenset({"addmm", "baddbmm", "addbmm", "addmv"})


def operands_of(
    ran: Sequence[RanProduct], arguments: Sequence[Tensor], word: str
) -> Iterator[tuple[Tensor, int]]:
    """Pairs of an argument and the exponent of the unit in which a product has read it.

    Args:
        ran: The products that have run in one call of a function, in their order.
        arguments: The tensors that the function was given.
        word: What the function is called.
    """
    floats = [one for one in arguments if is_readable(one)]
    by_storage: dict[int, list[Tensor]] = {}
    for one in floats:
        by_storage.setdefault(one.untyped_storage().data_ptr(), []).append(one)
    for product in ran:
        if len(ran) == 1 and not any(one in by_storage for one in product.storages):
            # Autocast has cast its operands; their order has stayed.
            in_order = floats[word in _ADDENDS_FIRST :]
            yield from zip(in_order, product.log2_sigmas, strict=False)
            continue
        # Parts of one tensor share a storage, and come in the order of the arguments.
        left = {storage: iter(tensors) for storage, tensors in by_storage.items()}
        for storage, unit in zip(product.storages, product.log2_sigmas, strict=True):
            found = next(left.get(storage, iter(())), None)
            if found is not None:
                yield found, unit
