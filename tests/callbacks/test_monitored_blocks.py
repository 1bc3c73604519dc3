"""Losses to block formats in the monitor: their dimension, their units, and their display."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.formats import MXFP4, MXFP8_E4M3, NVFP4
from lightning_unitscale.matmuls.block_rounding import UNIT_SCALE
from lightning_unitscale.monitor.rows import Measuring, TensorRow
from lightning_unitscale.monitor.watcher import StepWatcher
from lightning_unitscale.precision.diagnosis import diagnose
from lightning_unitscale.scales.layout import Direction, RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.snapshot_rows import summarize
from lightning_unitscale.scales.torch_rows import block_row
from lightning_unitscale.tensorboard.history import LastStep, read_run
from lightning_unitscale.tensorboard.responses import fractions_frame
from lightning_unitscale.tensorboard.table import scale_table
from tests.callbacks.modules import Regression
from tests.callbacks.runs import MemoryLogger, run

LAYOUT = RowLayout((), sample_size=None, block_formats=(MXFP4, NVFP4))


class Matmuls(nn.Module):
    """One matmul of each kind, whose operands have their own scale in every row and column."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 40)
        self.conv = nn.Conv1d(40, 24, 3)
        self.turned = nn.ConvTranspose1d(24, 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = y @ torch.ones(40, 20).cumsum(0)
        q = y.unflatten(-1, (2, 20)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, q, q)
        w = self.turned(self.conv(y.transpose(1, 2)))
        return z.square().mean() + attended.square().mean() + w.square().mean()


def blocks_of(snapshot: ScaleSnapshot, direction: Direction, name: str) -> list[float]:
    row = snapshot.rows(direction)[snapshot.names.index(name)]
    return row[-len(LAYOUT.block_columns) :].tolist()


def wide(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp2()


def test_blocks_run_along_reduction_dimension() -> None:
    torch.manual_seed(0)
    model, watcher = Matmuls(), StepWatcher(LAYOUT, lambda *_: True)
    x = wide(4, 16, 48)
    gradients: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: object, result: Tensor) -> None:
            result.register_hook(lambda gradient: gradients.update({name: gradient}))

        return hook

    for name, layer in model.named_children():
        layer.register_forward_hook(keep(name))
    loss = watcher.run(model, model.forward, (x,), {})
    loss.backward()
    arrived = watcher.take(0)
    assert arrived is not None
    snapshot = arrived()
    expected = {
        "input": (x, -1),
        "linear.weight": (model.linear.weight, 1),
        "conv.weight": (model.conv.weight, 1),
        "turned.weight": (model.turned.weight, 0),
        "linear.linear": (model.linear(x), -1),
    }
    found_names = set(snapshot.names)
    for name, (tensor, axis) in expected.items():
        (full,) = [each for each in found_names if each == name or each.startswith(f"{name}.")]
        assert blocks_of(snapshot, "forward", full) == block_row(tensor, axis, LAYOUT).tolist()
    axes = {"linear.linear": ("linear", -1), "conv.conv1d": ("conv", 1)}
    axes["turned.conv_transpose1d"] = ("turned", 1)
    for name, (made_by, axis) in axes.items():
        expected_row = block_row(gradients[made_by], axis, LAYOUT).tolist()
        assert blocks_of(snapshot, "backward", name) == expected_row
    # Tensors that no matmul reads have no blocks.
    assert not any(blocks_of(snapshot, "forward", "linear.bias"))
    assert math.isnan(snapshot.block_shares()[snapshot.names.index("linear.bias"), 0, 0])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_simulated_format_is_counted_in_scaled_values(accumulate: int, tmp_path: Path) -> None:
    monitor = ScaleMonitor(every_n_steps=1, formats=["FP16", "MXFP8"])
    callback = UnitScaleCallback(simulate="nvfp4")
    board = TensorBoardLogger(tmp_path, "board")
    run(
        Regression,
        [callback, monitor],
        logger=[board, MemoryLogger()],
        max_steps=2,
        accumulate_grad_batches=accumulate,
    )
    snapshot = monitor.snapshots[-1]
    assert snapshot.layout.block_formats == (MXFP8_E4M3, NVFP4)
    read = snapshot.read_by_matmuls("forward")
    shares = snapshot.block_shares("forward")
    assert read.any() and not torch.from_numpy(shares[read, :, :3]).isnan().any()
    # Each batch is counted once, whatever its number of blocks.
    numel = snapshot.column("numel")[read]
    assert snapshot.column("NVFP4.elements")[read].tolist() == numel.tolist()
    run_scales = read_run(board.log_dir)
    last = LastStep(run_scales)
    stored = torch.from_numpy(last.block_shares("forward")).double()
    torch.testing.assert_close(
        stored, torch.from_numpy(shares), rtol=1e-6, atol=1e-6, equal_nan=True
    )
    assert scale_table(last).count("NVFP4") == 3
    assert "MXFP8_E4M3 spread" in monitor.table(full=True)
    assert "worst NVFP4.spread" in str(diagnose(last, ()))
    numbers = summarize(snapshot).numbers
    assert numbers["scales/NVFP4/underflow_forward"] == shares[read, 1, 0].max()
    assert b'"block_formats":["MXFP8_E4M3","NVFP4"]' in fractions_frame(
        run_scales.fractions("forward"), 0
    )


def test_tensor_scale_of_nvfp4_is_the_unit() -> None:
    tensor, measuring = wide(8, 64), Measuring(LAYOUT)
    row = TensorRow("a", "", log2_gamma=-3, has_gradient_unit=True, gradient_axis=0)
    measuring.operand(row, tensor, -1, 5)
    measuring.operand(row, tensor, 0, 0)  # only as the first matmul reads it
    measuring.gradient(row, tensor)
    _, read = measuring.send()
    found = read([row.forward_blocks, row.backward_blocks])
    expected = [(-1, UNIT_SCALE * 2.0**5), (0, UNIT_SCALE * 2.0**-3)]
    assert torch.equal(found, torch.stack([block_row(tensor, a, LAYOUT, s) for a, s in expected]))
