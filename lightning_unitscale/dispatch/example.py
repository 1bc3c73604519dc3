"""Units of a module's products, measured on an example that a throw-away copy of it runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_unitscale.dispatch.attach import AttachedSession
from lightning_unitscale.dispatch.measured import Measurement
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.transforms.attach import detached_copy, products_of
from lightning_unitscale.transforms.calibration import find_loss
from lightning_unitscale.transforms.copied_inputs import copied_inputs
from lightning_unitscale.transforms.full_precision import (
    full_precision,
    in_full_precision,
    runs_in_fp16,
)
from lightning_unitscale.transforms.restoring import restoring


def session_of_example(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ProductSession:
    """Run a copy of a module on copies of an example, forward and, with a loss, backward.

    Neither the module nor any random state changes. A module in FP16, or under autocast to it, is
    measured in FP32 as well: what FP16 loses measures as zero.

    Args:
        module: The module; of its products nothing is rounded here.
        args: Positional arguments of one call.
        kwargs: Keyword arguments of that call.

    Returns:
        A session that has ended, with the gauge, and with the products that have to run plain.
    """
    session, measurement = _measure(module, args, kwargs, is_wide=False)
    forward, backward = dict(measurement.forward), dict(measurement.backward)
    if runs_in_fp16(module):
        try:
            _, wide = _measure(module, args, kwargs, is_wide=True)
        except RuntimeError as error:
            warnings.warn(
                f"{type(module).__name__}.forward: it runs in FP16 and not in FP32 "
                f"({str(error).splitlines()[0]}), so units are measured in FP16, where small "
                "gradients are zero; expected a step without casts to torch.float16 of its "
                "own; use tensor.to(other.dtype) for them.",
                stacklevel=4,
            )
        else:
            # Products that are there in FP16 only keep what was measured of them.
            forward |= wide.forward
            backward |= wide.backward
    session.adopt(forward, backward, measurement)
    return session


def _measure(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_wide: bool
) -> tuple[ProductSession, Measurement]:
    trial = detached_copy(module)
    if (products := products_of(trial)) is not None:
        products.detach()
    attached = AttachedSession(trial, ["forward"])
    try:
        with (
            torch.random.fork_rng(devices=_accelerators(trial)),
            # What the copy shares with the module: globals, and random states of other packages.
            restoring(trial, numbers=False),
            full_precision(trial) if is_wide else contextlib.nullcontext(),
            torch.enable_grad(),
        ):
            given = copied_inputs(args, kwargs)
            if is_wide:
                given = in_full_precision(given)
            output = trial(*given[0], **given[1])
            loss = find_loss(output)
            if loss is not None:
                loss.backward(torch.ones_like(loss))
        return attached.session, attached.session.take() or Measurement()
    finally:
        attached.detach()


def _accelerators(module: nn.Module) -> list[torch.device]:
    tensors = (*module.parameters(), *module.buffers())
    return [device for device in {one.device for one in tensors} if device.type == "cuda"]
