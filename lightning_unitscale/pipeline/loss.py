"""Which output of a module is the loss, and wrappers that make a loss the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path
from typing_extensions import override

LossSpec = Any


class LossWrapper(nn.Module):
    """A module together with its loss function, so that the loss is part of what is captured.

    Override ``forward(*inputs, targets)`` to call ``self.module`` and ``self.loss_fn``; its one
    result is the loss. :class:`TrivialLossWrapper` is the common case.

    Args:
        module: The model; its parameters keep their names below ``module.``.
        loss_fn: Computes the loss from the model's output and the targets.
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the loss.

        Raises:
            NotImplementedError: Always; a subclass says how the loss is computed.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: it does not say how the loss is computed; expected a forward "
            "that calls self.module and self.loss_fn; use TrivialLossWrapper for "
            "loss_fn(module(x), targets)."
        )


class TrivialLossWrapper(LossWrapper):
    """Computes ``loss_fn(module(x), targets)``."""

    @override
    def forward(self, x: Any, targets: Any) -> Tensor:
        """Returns the loss of the model's output for ``x``."""
        return self.loss_fn(self.module(x), targets)


def loss_index(
    outputs: Any, is_scalar: Sequence[bool], spec: LossSpec, *, whole: bool = False
) -> int | None:
    """Position of the loss among the flattened outputs, or ``None`` where there is none.

    Args:
        outputs: The output structure, any values in it.
        is_scalar: For each flattened output, whether it can be a loss: a tensor of one element that
            needs a gradient.
        spec: The output's structure with ``True`` at the loss and ``False`` elsewhere, or the key
            of the loss; ``None`` looks for the key ``"loss"``, and else takes an output that is
            one scalar.
        whole: Whether the one output is known to be the loss.

    Raises:
        ValueError: If ``spec`` does not fit, or what it names is no scalar.
    """
    flat = tree_flatten_with_path(outputs)[0]
    if spec is None:
        named = [place for place, (path, _) in enumerate(flat) if _key(path) == "loss"]
        if len(named) == 1 and is_scalar[named[0]]:
            return named[0]
        if len(flat) == 1 and (is_scalar[0] or whole):
            return _scalar(0, is_scalar, spec)
        return None
    if isinstance(spec, str):
        found = [place for place, (path, _) in enumerate(flat) if _key(path) == spec]
        if len(found) != 1:
            keys = [_key(path) for path, _ in flat]
            raise ValueError(
                f"loss_spec={spec!r}: {len(found)} outputs have this key; expected one of {keys}."
            )
        return _scalar(found[0], is_scalar, spec)
    truths = {path: bool(value) for path, value in tree_flatten_with_path(spec)[0]}
    wanted = [place for place, (path, _) in enumerate(flat) if _truth(truths, path)]
    if len(wanted) != 1:
        raise ValueError(
            f"loss_spec={spec!r}: it marks {len(wanted)} of the {len(flat)} outputs as the loss; "
            "expected the structure of the module's output with one True in it, or the key of the "
            "loss, such as 'loss'."
        )
    return _scalar(wanted[0], is_scalar, spec)


def _truth(truths: dict[Any, bool], path: Any) -> bool:
    """A spec may stop above the leaves, and may be a plain dict for a mapping of another class."""
    named = {tuple(map(_part, one)): value for one, value in truths.items()}
    parts = tuple(map(_part, path))
    return any(named.get(parts[:count], False) for count in range(len(parts) + 1))


def _part(entry: Any) -> Any:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return entry


def _key(path: Any) -> Any:
    return _part(path[-1]) if path else None


def _scalar(place: int, is_scalar: Sequence[bool], spec: LossSpec) -> int:
    if not is_scalar[place]:
        raise ValueError(
            f"loss_spec={spec!r}: output {place} is no tensor of one element with a gradient; "
            "expected the mean loss of a batch; reduce the loss in the module."
        )
    return place
