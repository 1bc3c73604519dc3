"""The passes of ``UnitScaleCallback``'s formats, and the Trainers that go with real FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_unitscale.callbacks.options import FP8, Simulate
from lightning_unitscale.callbacks.packages import is_lightning, misconfigured
from lightning_unitscale.functional.low_precision import why_no_fp8
from lightning_unitscale.precision.fp8 import FP8Linears
from lightning_unitscale.precision.simulate import SimulateFormat

if TYPE_CHECKING:
    import lightning.pytorch as pl


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
U_MUP_EXCLUDE = (*_LAST_NAMES, *(f"*.{name}" for name in _LAST_NAMES), *_PATHS)
# Nearly all of what FP8 linears cost the demo's loss is the readout's:
# docs/explanation/low-precision.md.
READOUT_EXCLUDE = (*_READOUT, *(f"*.{name}" for name in _READOUT))

_CONFLICTS = {
    "TransformerEnginePrecision": "it replaces the layers by its own, which run in FP8 by "
    "themselves and hide their products from the graph",
    "BitsandbytesPrecision": "it replaces the layers by its own, which hold quantized weights and "
    "hide their products from the graph",
    "DeepSpeedPrecision": "it runs the module in an engine that casts and scales by itself",
}


def fp8_pass(fp8: FP8 | None, *, is_lossless: bool) -> FP8Linears | None:
    """The pass that runs linear layers in FP8, if that is asked for.

    Args:
        fp8: The callback's options.
        is_lossless: Whether the method leaves the model as it is, which decides what ``"auto"``
            excludes.
    """
    if fp8 is None:
        return None
    exclude = fp8.exclude
    if exclude == "auto":
        exclude = READOUT_EXCLUDE if is_lossless else U_MUP_EXCLUDE
    return FP8Linears(
        exclude=exclude,
        gradient_format=fp8.gradient_format,
        grid=fp8.grid,
        in_evaluation=fp8.evaluation,
        casts=fp8.casts,
    )


def unmatched_layers(fp8: FP8 | None, graph_pass: FP8Linears | None) -> list[str]:
    """What is wrong with layers that were excluded by name and are not there.

    Args:
        fp8: The callback's options.
        graph_pass: Their pass, which has seen all products of a step.
    """
    # What "auto" excludes are usual names: no model has them all.
    if fp8 is None or graph_pass is None or fp8.exclude == "auto":
        return []
    return [f"FP8: {text}" for text in graph_pass.patterns.take_unmatched()]


def simulation_pass(simulate: Simulate | None) -> SimulateFormat | None:
    """The pass that rounds what products read, if that is asked for."""
    if simulate is None:
        return None
    return SimulateFormat(*simulate.formats, rounding=simulate.rounding, grid=simulate.grid)


def check_fp8(trainer: pl.Trainer) -> None:
    """Refuse a Trainer whose device or precision plugin does not go with FP8 linears.

    Raises:
        MisconfigurationException: With the reason.
    """
    plugin = trainer.precision_plugin
    for kind, why in _CONFLICTS.items():
        if is_lightning(plugin, kind):
            raise misconfigured(
                f"precision='fp8' with {type(plugin).__name__}: {why}; expected '32-true', "
                "'bf16-mixed', '16-mixed', 'bf16-true' or '16-true'; change the Trainer's "
                "precision, or leave out precision='fp8' here."
            )
    check_fp8_device(trainer.strategy.root_device)


def check_fp8_device(device: torch.device) -> None:
    """Refuse a device that has no FP8.

    Raises:
        MisconfigurationException: With the reason.
    """
    why_not = why_no_fp8(device)
    if why_not is not None:
        raise misconfigured(
            f"precision='fp8' on {device}: {why_not}; expected a GPU of "
            "compute capability 8.9 or above, or a CPU; pass simulate='fp8' to see what FP8 would "
            "do, or leave it out."
        )
