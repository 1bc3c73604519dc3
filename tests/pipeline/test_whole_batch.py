"""The loss of a batch in a pipeline without the strategy: that of the module, or a warning."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.pipeline import PipelineRunner, SplitPoint, pipeline
from lightning_unitscale.pipeline.program import split_evenly
from tests.pipeline.batch_losses import COUPLED, FOLLOW, Losing, batch

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore:Using a target size:UserWarning"),
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning"),
]
COUNT = 4
WEIGHTED = {"tokens", "another class ignored", "classes second", "class weights", "smoothed", "nll"}
# Of these the strategy changes the graph; a runner of a plain module has no batch to do so with.
WARNED = {
    "sum", "sum / tokens", "masked", "masked, clamped", "normalized mask", "guarded",
    "times a share", "by class", "weights of the batch", "and another mean", "mixture", "stacked",
    "squares", "centered targets", "scaled targets", "and decay", "a mask with a write",
}  # fmt: skip


class Module(nn.Module):
    """A step as a plain module."""

    def __init__(self, step: Losing) -> None:
        super().__init__()
        self.step = step

    def forward(self, of_batch: dict[str, Tensor]) -> Tensor:
        return self.step.training_step(of_batch, 0)


def _train(module: nn.Module, of_batch: Any, count: int = COUNT) -> tuple[Tensor, list[str]]:
    """The mean loss of a step by microbatches, with warnings of the runner."""
    part = split_evenly(of_batch, count)[0]
    pipe = pipeline(module, (part,), split_spec={"step.second": SplitPoint.BEGINNING})
    runner = PipelineRunner(pipe, "LoopedBFS", num_microbatches=count)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = runner.step(of_batch)
        runner.step(of_batch)
    assert losses is not None
    said = [str(one.message) for one in caught if "PipelineRunner" in str(one.message)]
    return torch.stack(losses).mean(), said


def _gradients(module: nn.Module) -> list[Tensor]:
    return [torch.zeros(()) if one.grad is None else one.grad for one in module.parameters()]


def _is_close(found: Tensor, expected: Tensor, size: Tensor | None = None) -> bool:
    size = expected.abs().max() if size is None else size
    return bool((found - expected).abs().max() <= 2e-6 * size)


@pytest.mark.slow_cases
@pytest.mark.parametrize("loss", FOLLOW)
def test_loss_matches_plain_module_or_warns(loss: str) -> None:
    torch.manual_seed(1)
    module = Module(Losing(FOLLOW[loss]))
    plain = copy.deepcopy(module)
    expected = plain(batch())
    (2 * expected).backward()  # two steps
    found, said = _train(module, batch())
    assert len(said) == (loss in WARNED)
    if said:
        assert f"the losses of {COUNT} microbatches" in said[0]
        return
    assert _is_close(found, expected)
    size = max(gradient.abs().max() for gradient in _gradients(plain))
    for gradient, other in zip(_gradients(module), _gradients(plain), strict=True):
        assert _is_close(gradient, other, size)


def test_unweighted_mean_differs_from_batch_loss() -> None:
    """Means of these microbatches, some without a target, are not the loss of the batch."""
    for loss in WEIGHTED:
        torch.manual_seed(1)
        module = Module(Losing(FOLLOW[loss]))
        means = torch.stack([module(part) for part in split_evenly(batch(), COUNT)])
        assert not _is_close(means.mean(), module(batch()))


@pytest.mark.slow_cases
@pytest.mark.parametrize("loss", ["root", "dice", "contrastive", "pseudo labels"])
def test_loss_that_couples_samples_is_reported(loss: str) -> None:
    function, reason = COUPLED[loss]
    _, (said,) = _train(Module(Losing(function)), batch())
    assert reason in said


def test_batch_without_targets_gives_nan_loss() -> None:
    of_batch = batch()
    of_batch["labels"].fill_(-100)
    found, said = _train(Module(Losing(FOLLOW["tokens"])), of_batch)
    assert found.isnan() and not said


def test_one_microbatch_matches_batch() -> None:
    module = Module(Losing(FOLLOW["sum"]))
    expected = module(batch())
    found, said = _train(module, batch(), 1)
    assert torch.equal(found, expected) and not said


def test_forward_only_losses_are_weighted() -> None:
    module = Module(Losing(FOLLOW["tokens"]))
    part = split_evenly(batch(), COUNT)[0]
    pipe = pipeline(module, (part,), split_spec={"step.second": SplitPoint.BEGINNING})
    losses = PipelineRunner(pipe, "LoopedBFS", num_microbatches=COUNT).eval(batch())
    assert losses is not None
    assert _is_close(torch.stack(losses).mean(), module(batch()))


class FixedSize(nn.Module):
    """It runs for two samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.step["first"](x) + torch.ones(2, 4)
        return F.mse_loss(self.step["second"](hidden), x)


def test_fixed_batch_size_is_reported() -> None:
    _, (said,) = _train(FixedSize(), torch.randn(8, 4))
    assert "cannot be captured for a batch of another size" in said
