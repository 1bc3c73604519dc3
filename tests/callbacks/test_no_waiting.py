"""No training step waits for its device, but for those that are listed here.

The steps run on fake tensors of a GPU that is not there. What would make the host wait is noted
with its place, and answered; so are the kernels that the package's own operators would launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.demo_step import DemoLoss
from lightning_unitscale import ScaleMonitor, UnitScaleCallback, attach
from lightning_unitscale.callbacks import Simulate
from lightning_unitscale.matmuls.gauge import GaugePair
from tests.callbacks.absent_gpu import CUDA, Gpu, a_gpu
from tests.callbacks.runs import QUIET, Capturing
from tests.triton_helpers import needs_triton

# The numbers of the GPU that is not there are the same everywhere, and a readout is most of a small
# model.
pytestmark = [
    needs_triton,
    pytest.mark.filterwarnings("ignore:.*(run outside|flushed to zero|no matmul):UserWarning"),
]

LOOK_EVERY, SAMPLED_EVERY, NUM_STEPS = 3, 2, 8


def changing(step: int) -> float:
    """Scales that change at the first look."""
    return 2.0**-4 if step < LOOK_EVERY else 2.0**-9


def train(
    gpu: Gpu,
    *callbacks: UnitScaleCallback | ScaleMonitor,
    number: Callable[[int], float] = changing,
    num_parts: int = 1,
    num_steps: int = NUM_STEPS,
    after_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Train the demo's model in a small size, with all numbers of a step alike."""
    with CUDA:
        module = DemoLoss(width=32, depth=1, num_heads=2)
        tokens = torch.zeros(2, 2, 8, dtype=torch.int64)
    optimizer = torch.optim.AdamW(module.parameters())
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        attachment = attach(module, optimizer, callbacks)
    with attachment:
        for step in range(num_steps):
            gpu.begin_step()
            gpu.number = number(step)
            for _ in range(num_parts):
                module(*tokens).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            after_step(step)


UNITS = {"measurement.fill_in"}
FITS = {"fp8_linear.arrived"}


@pytest.mark.slow_cases
@pytest.mark.filterwarnings("ignore:(?s)ScaleMonitor:UserWarning")
@pytest.mark.parametrize(
    ("options", "at_first", "at_looks"),
    [
        ({}, UNITS, set()),
        ({"simulate": Simulate("fp8", rounding="stochastic")}, UNITS, UNITS),
        ({"precision": "fp8"}, UNITS | FITS, UNITS | FITS),
    ],
    ids=["units", "simulated", "fp8"],
)
def test_eager_steps_synchronize_only_at_measurements(
    options: dict[str, Any], at_first: set[str], at_looks: set[str]
) -> None:
    callback = UnitScaleCallback(recalibrate=LOOK_EVERY, **options)
    monitor = ScaleMonitor(every_n_steps=SAMPLED_EVERY)
    with a_gpu() as gpu:
        train(gpu, callback, monitor)
    waits = [at_first, *(set() if step % LOOK_EVERY else at_looks for step in range(1, NUM_STEPS))]
    assert list(map(set, gpu.waits)) == waits
    # Alerts are judged when the next step has been computed, and so are the units of a look, but
    # where they decide how a matmul is rounded.
    snapshots = {snapshot.step: snapshot for snapshot in monitor.snapshots}
    # This loop does not announce its last step.
    assert list(snapshots) == [0, 1, *range(2, NUM_STEPS, SAMPLED_EVERY)] and monitor.alerts
    assert snapshots[2].log2_sigma.min() == -4 and snapshots[6].log2_sigma.min() == -9
    assert snapshots[LOOK_EVERY + 1].log2_sigma.min() == (-9 if at_looks else -4)
    rows = [launches.total() - launches["cast_tiles"] for launches in gpu.launches]
    # Units are measured by the same kernels, here in a step that is not sampled.
    num_looked = rows[LOOK_EVERY]
    assert num_looked > 0
    for step, num_launches in enumerate(rows):
        num_rows = 0
        if step in snapshots:
            num_rows = len(snapshots[step].names) + int((snapshots[step].backward[:, 0] > 0).sum())
        num_launches -= 0 if step % LOOK_EVERY else num_looked
        # One launch for each tensor, and one more for all rows of the sample.
        assert num_launches == num_rows + bool(num_rows) * -(-num_rows // 64)


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(
    ("options", "at_first"),
    [({}, UNITS), ({"simulate": "fp8"}, UNITS), ({"precision": "fp8"}, UNITS)],
    ids=["units", "simulated", "fp8"],
)
def test_late_units_do_not_synchronize(
    options: dict[str, Any], at_first: set[str], num_parts: int
) -> None:
    """Tensors that were zero at first are measured in each step, and read a step later."""
    callback, late, seen = UnitScaleCallback(recalibrate=None, **options), 3, []

    def note(step: int) -> None:
        seen.append(set(callback.gauge.values()))

    with a_gpu() as gpu:
        train(
            gpu,
            callback,
            number=lambda step: 0.0 if step < late else 2.0**-4,
            num_parts=num_parts,
            after_step=note,
        )
    assert list(map(set, gpu.waits)) == [at_first, *[set()] * (NUM_STEPS - 1)]
    assert seen[: late + 1] == [set()] * (late + 1)
    units = {GaugePair(log2_sigma=-4), GaugePair(log2_gamma=-4)}
    assert seen[late + 1 :] == [units] * (NUM_STEPS - late - 1)
    casts = [launches["cast_tiles"] > 0 for launches in gpu.launches]
    # Each layer is cast once its tensors were seen in their units, whose numbers are late too.
    num_plain = late + 4 if "precision" in options else NUM_STEPS
    assert casts == [step >= num_plain for step in range(NUM_STEPS)]


@pytest.mark.slow
def test_each_fp8_operand_is_cast_once() -> None:
    """Each operand of a linear layer, and its gradient, is cast once."""
    with a_gpu() as gpu:
        callback = UnitScaleCallback(recalibrate=LOOK_EVERY, precision="fp8")
        train(gpu, callback, num_steps=LOOK_EVERY + 2)
    for step, launches in enumerate(gpu.launches):
        # Four layers of three matmuls; where matmuls are measured, each makes its own casts.
        num_casts = 4 * 3 if step % LOOK_EVERY else 4 * 3 * 2
        assert launches.pop("cast_tiles") == num_casts
        assert bool(launches) == (step % LOOK_EVERY == 0)


class Absent(SingleDeviceStrategy):
    """Training on the GPU that is not there, where module and batches are already."""

    def __init__(self) -> None:
        super().__init__(device=CUDA)

    @override
    def setup_environment(self) -> None: ...

    @override
    def model_to_device(self) -> None: ...

    @override
    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return batch

    @override
    def teardown(self) -> None: ...


class Seen(pl.Callback):
    """Records the last sample at the end of each epoch."""

    def __init__(self, monitor: ScaleMonitor) -> None:
        self.steps: list[int] = []
        self._monitor = monitor

    def on_train_epoch_end(self, *_: Any) -> None:
        self.steps.append(self._monitor.snapshots[-1].step)


class Layers(pl.LightningModule):
    """Embedding, norm, a block of two layers, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(11, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Linear(32, 16),
            nn.Linear(16, 11),
        )

    @override
    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(tokens).flatten(0, 1), tokens.flatten())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Batches:
    """The same tokens in every step, of which the device is told."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.tokens = torch.zeros(2, 8, dtype=torch.int64, device=CUDA)

    def __len__(self) -> int:
        return NUM_STEPS

    def __iter__(self) -> Any:
        for _ in range(NUM_STEPS):
            yield self.tokens


class Steps(pl.Callback):
    """Marks on the device where a step begins. Its scales change at the first measurement."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self.gpu.begin_step()
        self.gpu.number = 2.0**-4 if len(self.gpu.waits) <= LOOK_EVERY else 2.0**-9


@pytest.mark.slow_cases
@pytest.mark.filterwarnings("ignore:(?s)ScaleMonitor:UserWarning")
@pytest.mark.filterwarnings("ignore:Total length of:UserWarning")
@pytest.mark.parametrize(
    ("options", "at_looks"),
    [
        ({}, []),
        ({"precision": "fp8"}, ["measurement.fill_in", "fp8_linear.arrived"]),
        ({"method": "u-mup"}, []),
    ],
    ids=["units", "fp8", "rules"],
)
def test_captured_steps_synchronize_only_at_measurements(
    options: dict[str, Any], at_looks: list[str]
) -> None:
    callback = UnitScaleCallback(recalibrate=LOOK_EVERY, **options)
    monitor = ScaleMonitor(every_n_steps=SAMPLED_EVERY)
    with a_gpu() as gpu:
        with CUDA:
            module = Layers()
        trainer = pl.Trainer(
            strategy=Absent(),
            max_steps=NUM_STEPS,
            gradient_clip_val=1.0,
            callbacks=[Steps(gpu), callback, monitor, seen := Seen(monitor), Capturing()],
            **QUIET,
        )
        trainer.fit(module, Batches(gpu))
    # A callback that monitors scales at the end of an epoch sees its last step.
    assert seen.steps == [NUM_STEPS - 1]
    assert gpu.waits[0]  # its units are measured
    expected = [[] if step % LOOK_EVERY else at_looks for step in range(1, NUM_STEPS)]
    # The last sample is read when the epoch is over.
    expected[-1] = [*expected[-1], "probes.arrived"]
    assert gpu.waits[1:] == expected
    looks = range(LOOK_EVERY, NUM_STEPS, LOOK_EVERY)
    assert all(f"at step {step}" in callback.explain() for step in looks)
    sampled = [snapshot.step for snapshot in monitor.snapshots]
    assert sampled == [0, 1, *range(2, NUM_STEPS, SAMPLED_EVERY), NUM_STEPS - 1]
    # Rows are observed in sampled steps and in looks.
    for step, launches in enumerate(gpu.launches):
        is_observed = step in sampled or step % LOOK_EVERY == 0
        assert bool({*launches} - {"cast_tiles"}) == is_observed


@pytest.mark.slow_cases
@pytest.mark.filterwarnings("ignore:Total length of:UserWarning")
@pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger:UserWarning")
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}],
    ids=["plain", "accumulated and clipped"],
)
@pytest.mark.parametrize(
    "arrangement",
    ["units", "units, captured", "monitor", "fp8", "fp8, captured", "fp8 and monitor"],
)
def test_steps_after_first_do_not_synchronize(arrangement: str, settings: dict[str, Any]) -> None:
    """Batches are accumulated, gradients are clipped, and the monitor is there but not sampling."""
    options: dict[str, Any] = {"precision": "fp8"} if "fp8" in arrangement else {}
    callbacks: list[pl.Callback] = []
    if arrangement != "monitor":
        callbacks.append(UnitScaleCallback(recalibrate=None, **options))
    if "monitor" in arrangement:
        callbacks.append(ScaleMonitor(last_step=0, on_violation=None))
    if "captured" in arrangement:
        callbacks.append(Capturing())
    with a_gpu() as gpu:
        with CUDA:
            module = Layers()
        trainer = pl.Trainer(
            strategy=Absent(), max_epochs=1, callbacks=[Steps(gpu), *callbacks], **settings, **QUIET
        )
        trainer.fit(module, Batches(gpu))
    first = settings.get("accumulate_grad_batches", 1)
    assert any(gpu.waits[:first]) == (arrangement != "monitor")  # units are measured
    assert gpu.waits[first:] == [[]] * (NUM_STEPS - first)
