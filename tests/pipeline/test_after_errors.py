"""After an error in a pipeline, module, Trainer and torch are as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from lightning_unitscale.pipeline.pipelined_method import NotPipelinedError
from lightning_unitscale.strategies import PipelineStrategy
from tests.fingerprint import assert_restored, of_run
from tests.pipeline.pipeline_run import Groups, _points

pytestmark = pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger")


class _Failing(pl.Callback):
    def __init__(self, where: str, error: type[BaseException]) -> None:
        self.where, self.error = where, error

    def raise_in(self, where: str, trainer: Any) -> None:
        if where == self.where and trainer.global_step >= 1:
            raise self.error("on purpose")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.raise_in("backward", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.raise_in("batch end", trainer)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.raise_in("validation", trainer)


class _Raising(_Failing):
    """After this, Lightning reports an error neither to later callbacks nor to its strategy."""

    def on_exception(self, *_: Any) -> None:
        raise self.error("on_exception")


class _Module(Groups):
    error: type[BaseException] | None = None
    of_tests = ("error",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.error is not None and self.global_step >= 1:
            raise self.error("on purpose")
        return F.cross_entropy(self(batch[0]), batch[1])


_CALLBACKS: dict[str, Callable[[], list[pl.Callback]]] = {
    "none": list,
    "both": lambda: [UnitScaleCallback(), ScaleMonitor(1)],
    "remat": lambda: [ScaleMonitor(1), RematCallback("min_cut")],
}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("where", "error", "callbacks", "capture"),
    [
        ("step", LookupError, "none", "step"),
        ("step", torch.OutOfMemoryError, "both", "step"),
        ("step", KeyboardInterrupt, "none", "forward"),
        ("backward", torch.OutOfMemoryError, "none", "step"),
        ("batch end", KeyboardInterrupt, "both", "step"),
        ("batch end", SystemExit, "none", "forward"),
        ("validation", LookupError, "remat", "step"),
    ],
)
@pytest.mark.parametrize("kind", [_Failing, _Raising])
def test_error_restores_module_and_trainer(
    where: str,
    error: type[BaseException],
    callbacks: str,
    capture: str,
    kind: type[_Failing],
    one_rank: dict[str, Any],
) -> None:
    module = _Module()
    module.error = error if where == "step" else None
    strategy = PipelineStrategy("GPipe", num_microbatches=2, capture=capture)
    trainer = pl.Trainer(
        strategy=strategy,
        callbacks=[kind(where, error), *_CALLBACKS[callbacks]()],
        val_check_interval=2,
        **one_rank,
    )
    before = of_run(module, trainer)
    with pytest.raises(BaseException) as caught:
        trainer.fit(module, *[torch.utils.data.DataLoader(_points(), batch_size=16)] * 2)
    # A step that raises is not one graph, and Lightning ends the process on Ctrl-C.
    assert caught.type in (error, SystemExit, NotPipelinedError)
    assert trainer.global_step >= 1
    assert_restored(module, before, trainer)
