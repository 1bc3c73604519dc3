"""Tensors inside activation checkpoints are monitored like all others."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from tests.callbacks.modules import Regression
from tests.callbacks.runs import monitor_of, run
from tests.helpers import assert_same_bits

OTHERS = {
    "alone": list,
    "lossless": lambda: [UnitScaleCallback()],
    "captured": lambda: [UnitScaleCallback(remat="min_cut")],
    "by rules": lambda: [UnitScaleCallback("unit-scaling")],
    "simulated FP8": lambda: [UnitScaleCallback(simulate="fp8")],
    "compiled": lambda: [UnitScaleCallback(compile=True)],
}


class Block(nn.Module):
    """A residual branch with an in-place operation and dropout."""

    def __init__(self, width, rate):
        super().__init__()
        self.rate = rate
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        branch = self.down(self.act(self.up(self.norm(x))))
        return x + F.dropout(branch, self.rate, self.training)


class Checkpointed(Regression):
    """Blocks that are run again in the backward pass, or not; two of them within one checkpoint.

    Args:
        kind: ``None``, ``"reentrant"``, ``"non-reentrant"`` or ``"nested"``.
        rate: Of dropout.
    """

    def __init__(self, kind, rate):
        super().__init__(norm=False, dropout=rate)
        self.kind = kind
        # A reentrant checkpoint has gradients only if something that it is given needs them.
        self.gain = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList(Block(6, rate) for _ in range(3))

    def again(self, function, x):
        if self.kind is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.kind == "reentrant")

    def pair(self, x):
        inner = self.again if self.kind == "nested" else lambda function, x: function(x)
        return inner(self.blocks[1], inner(self.blocks[0], x))

    def forward(self, x):
        x = self.again(self.blocks[2], self.again(self.pair, x * self.gain))
        return super().forward(x)


def watched(kind, others, rate=0.1):
    callbacks = [*OTHERS[others](), ScaleMonitor(every_n_steps=1)]
    return run(lambda: Checkpointed(kind, rate), callbacks, max_steps=2)


@pytest.fixture(scope="module")
def plain_run():
    """The run without a checkpoint, made once for each of the others."""
    return functools.cache(functools.partial(watched, None))


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "nested"])
@pytest.mark.parametrize("others", [one for one in OTHERS if one != "compiled"])
def test_statistics_match_run_without_checkpoint(plain_run, kind, others):
    plain, checked = plain_run(others), watched(kind, others)
    assert_same_bits(checked.outputs, plain.outputs)
    assert_same_bits(checked.weights, plain.weights)
    assert_same_snapshots(checked, plain, 0.0)


@pytest.mark.slow
def test_compiled_statistics_match_lossless(torch_kernels):
    # No dropout: Inductor draws other random numbers.
    plain, checked = (
        watched("non-reentrant", others, rate=0.0) for others in ("lossless", "compiled")
    )
    torch.testing.assert_close(checked.outputs, plain.outputs, rtol=1e-5, atol=0)
    assert_same_snapshots(checked, plain, 1e-4)


def assert_same_snapshots(checked, plain, tolerance):
    theirs, ours = (monitor_of(one.trainer.callbacks).snapshots for one in (plain, checked))
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert "blocks.1.act.relu" in one.names
        assert set(one.names) == set(other.names)
        # The tensors of the graph come in the order in which it computes them.
        given = {name for name in other.names if name.startswith("input.") or name in plain.weights}
        made = [name for name in other.names if name not in given]
        assert [name for name in one.names if name in made] == made
        one, other = one.select(other.names), other.select(other.names)
        assert dict(zip(one.names, map(set, one.inputs), strict=True)) == dict(
            zip(other.names, map(set, other.inputs), strict=True)
        )
        for direction in ("forward", "backward"):
            np.testing.assert_allclose(
                one.rows(direction),
                other.rows(direction),
                rtol=tolerance,
                atol=tolerance,
                err_msg=direction,
            )
