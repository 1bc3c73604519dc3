"""The loss of a batch from microbatches: that of the ordinary step, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_unitscale.capture.dynamo_capture import static_shapes
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.pipeline.batch_rules import Coupled, Mean, Rows, Same
from lightning_unitscale.pipeline.batchwise import compare_graphs
from lightning_unitscale.pipeline.captured_program import (
    loss_position,
    program_of_step,
)
from lightning_unitscale.pipeline.program import split_evenly
from lightning_unitscale.pipeline.whole_batch import WholeBatch, joined
from tests.pipeline.batch_losses import CLASSES, COUPLED, FOLLOW, Losing, batch

STEP = "training_step"


class ByMicrobatches:
    """A step that is captured for a microbatch and for the batch."""

    def __init__(self, module: Any, of_batch: Any, count: int) -> None:
        self.module = module
        self.count = count
        step = ModuleSteps(module, (STEP,)).steps[STEP]
        parts = split_evenly(of_batch, count)
        with static_shapes():
            self.calls = [step.graph_call(part, 0) for part in parts]
            self.whole = step.graph_call(*split_evenly(of_batch, 1), 0)
            loss = loss_position(step, self.calls[0], (parts[0], 0), {})
        assert loss is not None
        self.loss = loss
        self.batch = WholeBatch(compare_graphs(self.calls[0], self.whole, count))
        self.reason = self.batch.why_not(self.calls[0], loss)

    def gradients(self) -> tuple[float, dict[str, Any]]:
        """The mean loss of the microbatches, and its gradients."""
        self.module.zero_grad()
        step = program_of_step(self.calls[0], self.module, self.loss, self.batch.rewrite)
        self.batch.note(self.whole)
        total = 0.0
        for call in self.calls:
            loss = step.program.graph_module(*step.inputs(call))[self.loss] / self.count
            loss.backward()
            total += loss.item()
        return total, {name: one.grad for name, one in self.module.named_parameters()}


def assert_same_step(module: nn.Module, of_batch: Any, count: int) -> None:
    loss = module.training_step(of_batch, 0)  # type: ignore[operator]
    loss.backward()
    expected = {name: one.grad for name, one in module.named_parameters()}
    by_microbatches = ByMicrobatches(module, of_batch, count)
    assert by_microbatches.reason is None
    found_loss, found = by_microbatches.gradients()
    assert found_loss == pytest.approx(loss.item(), rel=1e-6)
    largest = max(one.abs().max().item() for one in expected.values() if one is not None)
    for name, gradient in found.items():
        assert (gradient is None) == (expected[name] is None), name
        if gradient is not None:
            assert (gradient - expected[name]).abs().max() <= 1e-6 * largest, name


pytestmark = [
    pytest.mark.filterwarnings("ignore:Using a target size:UserWarning"),
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning"),
]
# With 8 each sample is a microbatch.
OF_OTHER_SIZES = [(loss, count) for loss in ("tokens", "mean of sentences") for count in (2, 8)]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("loss", "count"), [*((loss, 4) for loss in FOLLOW), *OF_OTHER_SIZES])
def test_microbatch_loss_and_gradients_match_batch(loss: str, count: int) -> None:
    torch.manual_seed(1)
    assert_same_step(Losing(FOLLOW[loss]), batch(), count)


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("loss", COUPLED)
def test_loss_that_couples_samples_is_reported(loss: str) -> None:
    function, reason = COUPLED[loss]
    found = ByMicrobatches(Losing(function), batch(), 4).reason
    assert found is not None
    assert reason in found
    assert "batch_losses.py" in found


def test_half_precision_losses_are_summed_in_full_precision() -> None:
    """A sum of many losses is more than float16 can hold."""

    def loss(step: Any, logits: Any, of_batch: Any, reduction: str = "mean") -> Any:
        flat = 30_000 * logits.view(-1, CLASSES), of_batch["labels"].view(-1)
        return F.cross_entropy(*flat, reduction=reduction)

    module = Losing(loss).half()
    of_batch = {
        name: one.half() if one.is_floating_point() else one for name, one in batch().items()
    }
    # The kernel's own mean of the batch is infinite.
    losses = Losing(lambda *given: loss(*given, reduction="none"))
    losses.load_state_dict(module.state_dict())
    total = losses.half().training_step(of_batch, 0).float().sum()
    found, _ = ByMicrobatches(module, of_batch, 4).gradients()
    assert found == pytest.approx((total / (of_batch["labels"] != -100).sum()).item(), rel=1e-2)


def test_values_are_joined_by_their_relation() -> None:
    parts = list(torch.arange(12.0).view(4, 3).split(1))
    assert torch.equal(joined(parts, Rows(0)), torch.cat(parts))
    assert torch.equal(joined([one.T for one in parts], Rows(1)), torch.cat(parts).T)
    assert torch.equal(joined(parts, Mean()), torch.cat(parts).mean(0, keepdim=True))
    assert torch.equal(joined(parts, Mean(1)), torch.cat(parts).sum(0, keepdim=True))
    assert joined(parts, Same()) is parts[0]
    counts = [torch.tensor(number) for number in (1, 2, 4)]
    assert joined(counts, Mean(1)) == joined(counts, None) == joined(counts, Coupled("")) == 7
    # Two views of each sample, one after the other.
    views = torch.arange(8).view(2, 4)
    pieces = [views[:, :2].reshape(-1), views[:, 2:].reshape(-1)]
    assert torch.equal(joined(pieces, Rows(0, blocks=2)), views.reshape(-1))
