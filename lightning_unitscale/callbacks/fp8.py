"""``UnitScaleCallback(precision="fp8")``: which layers, and with which Trainers it goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    TransformerEnginePrecision,
)

from lightning_unitscale.functional.fp8_linear import DEFAULT_GRADIENT, GradientFormat
from lightning_unitscale.functional.scaled_product import why_no_fp8
from lightning_unitscale.transforms.fp8_linears import FP8Linears, check_gradient_format
from lightning_unitscale.transforms.moving_grid import Grid, check_grid

# By the names that these layers have in torch, nanoGPT, Hugging Face's and Meta's code.
_READOUT = ("lm_head", "head", "embed_out", "output_layer")
_LAST_NAMES = (
    *("out_proj", "o_proj"),  # attention's output
    *("down_proj", "fc2", "fc_out", "linear2", "w2", "dense_4h_to_h"),  # a feed-forward's last
    *_READOUT,
)
_PATHS = (
    *("*attn*.c_proj", "*attn*.proj", "*attention*.dense", "*attention.wo"),
    *("*mlp*.c_proj", "*mlp.proj", "*DenseReluDense.wo", "*layer.[0-9]*.output.dense"),
)
# What u-muP keeps out of FP8 (Blake et al., arXiv 2407.17465).
U_MUP_EXCLUDE = (*_LAST_NAMES, *(f"*.{one}" for one in _LAST_NAMES), *_PATHS)
# Nearly all of what FP8 linears cost the demo's loss is the readout's: docs/low-precision.md.
READOUT_EXCLUDE = (*_READOUT, *(f"*.{one}" for one in _READOUT))

_CONFLICTS = {
    TransformerEnginePrecision: "it replaces the layers by its own, which run in FP8 by themselves "
    "and hide their products from the graph",
    BitsandbytesPrecision: "it replaces the layers by its own, which hold quantized weights and "
    "hide their products from the graph",
    DeepSpeedPrecision: "it runs the module in an engine that casts and scales by itself",
}


def fp8_of(
    precision: str | None,
    exclude: str | Sequence[str] | None,
    method: str,
    gradient_format: GradientFormat,
    grid: Grid,
    in_evaluation: bool,
    is_simulated: bool,
) -> FP8Linears | None:
    """The pass that runs linear layers in FP8, if that is asked for.

    Args:
        precision: ``"fp8"`` or ``None``.
        exclude: Globs; ``"auto"`` for the method's own.
        method: The callback's method.
        gradient_format: Format of gradients that fit into it.
        grid: Whether the numbers of FP8 move.
        in_evaluation: Whether validation, test and prediction are in FP8 too.
        is_simulated: Whether a format is simulated as well.

    Raises:
        ValueError: If an argument makes no sense, alone or with the others.
    """
    if precision not in (None, "fp8"):
        raise ValueError(
            f"precision={precision!r}: unknown precision; expected 'fp8' or None; other types are "
            "the Trainer's: pass Trainer(precision=...)."
        )
    check_gradient_format(gradient_format, "fp8_gradients")
    if precision is None:
        for name, given, default in (
            ("fp8_gradients", gradient_format, DEFAULT_GRADIENT),
            ("fp8_exclude", exclude, "auto"),
            ("fp8_evaluation", in_evaluation, False),
        ):
            if given != default:
                raise ValueError(
                    f"{name}={given!r}: nothing runs in FP8; expected {default!r} without "
                    "precision='fp8'; leave it out, or pass precision='fp8'."
                )
        return None
    if is_simulated:
        raise ValueError(
            "precision='fp8': together with simulate, layers would run in one format and be "
            "simulated in another; expected one of the two; leave one out."
        )
    if exclude == "auto":
        exclude = READOUT_EXCLUDE if method == "lossless" else U_MUP_EXCLUDE
    return FP8Linears(
        exclude=exclude,
        gradient_format=gradient_format,
        grid=grid,
        in_evaluation=in_evaluation,
    )


def grid_of(grid: Grid | Literal["auto"], precision: str | None, *, is_simulated: bool) -> Grid:
    """Whether the numbers of a format move, if there is one.

    Args:
        grid: The callback's argument.
        precision: ``"fp8"`` or ``None``.
        is_simulated: Whether a format is simulated.

    Raises:
        ValueError: If it is unknown, or nothing is rounded.
    """
    if grid == "auto":
        return "fixed" if precision is None else "moving"
    check_grid(grid)
    if precision is None and not is_simulated:
        raise ValueError(
            f"grid={grid!r}: no format is in use whose numbers could lie anywhere; expected 'auto' "
            "without precision='fp8' and simulate; leave it out, or pass one of these."
        )
    return grid


def check_fp8(trainer: pl.Trainer) -> None:
    """Refuse a Trainer whose device or precision plugin does not go with FP8 linears.

    Raises:
        MisconfigurationException: With the reason.
    """
    plugin = trainer.precision_plugin
    for kind, why in _CONFLICTS.items():
        if isinstance(plugin, kind):
            raise MisconfigurationException(
                f"precision='fp8' with {type(plugin).__name__}: {why}; expected '32-true', "
                "'bf16-mixed', '16-mixed', 'bf16-true' or '16-true'; change the Trainer's "
                "precision, or leave out precision='fp8' here."
            )
    why_not = why_no_fp8(trainer.strategy.root_device)
    if why_not is not None:
        raise MisconfigurationException(
            f"precision='fp8' on {trainer.strategy.root_device}: {why_not}; expected a GPU of "
            "compute capability 8.9 or above, or a CPU; pass simulate='fp8' to see what FP8 would "
            "do, or leave it out."
        )
