"""A monitored run has the bits of the unmonitored one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import eval_frame

from lightning_unitscale import ScaleMonitor
from tests.callbacks.runs import assert_same_run, monitor_of, run
from tests.monitor.modules import MODULES, Reentrant

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore:.training_step. returned .None."),
    pytest.mark.filterwarnings("ignore:.*Lazy"),
    pytest.mark.filterwarnings("ignore:.*lazy"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", MODULES)
def test_monitored_run_is_bit_identical(kind: str, every: int) -> None:
    found, callbacks = assert_same_run(MODULES[kind], lambda: [ScaleMonitor(every_n_steps=every)])
    snapshots = monitor_of(callbacks).snapshots
    assert snapshots
    for one in snapshots:
        found_linear = any(name.startswith("first.linear") for name in one.names)
        assert found_linear or kind == "Threads"
    assert torch.overrides._len_torch_function_stack() == 0
    assert "training_step" not in vars(found.module)


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
@pytest.mark.parametrize("kind", ["Reentrant", "Encoder", "Hooks", "Views"])
def test_trainer_modes_are_bit_identical(kind: str, options: Any) -> None:
    assert_same_run(MODULES[kind], lambda: [ScaleMonitor(every_n_steps=1)], **options)


@pytest.mark.parametrize("is_again", [False, True])
def test_error_restores_torch_and_module(is_again: bool) -> None:
    """The error is in the step, or in a checkpoint's recomputation in the backward pass."""

    class Failing(Reentrant):
        def body(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled() == is_again:
                raise LookupError("on purpose")
            return super().body(x)

    before = torch.overrides.has_torch_function, eval_frame.set_skip_guard_eval_unsafe
    made: list[Failing] = []

    def make() -> Failing:
        made.append(Failing())
        return made[-1]

    with pytest.raises(LookupError, match="on purpose"):
        run(make, [ScaleMonitor(every_n_steps=1)], max_steps=1)
    assert (torch.overrides.has_torch_function, eval_frame.set_skip_guard_eval_unsafe) == before
    assert torch.overrides._len_torch_function_stack() == 0
    assert "training_step" not in vars(made[0])
