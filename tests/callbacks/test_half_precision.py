"""Parameters held in units: in FP32 the same bits as ever, in 16 bits what FP32 would train."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging
from torch import Tensor, nn

from lightning_unitscale import Lossless, ScaleMonitor, UnitScaleCallback
from tests.callbacks.modules import Regression, adamw, momentum
from tests.callbacks.runs import assert_same_run, loader, run
from tests.helpers import assert_same_bits
from tests.lossless.test_scaled_parameters import OPTIMIZERS


def _held(**options: Any) -> UnitScaleCallback:
    return UnitScaleCallback(Lossless(hold_parameters=True), **options)


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    weights = [one for one in module.parameters() if one.dim() > 1]
    others = [one for one in module.parameters() if one.dim() <= 1]
    return [{"params": weights}, {"params": others, "lr": 0.003}]


def _events(callback: UnitScaleCallback) -> str:
    text = callback.explain()
    assert "parameters and their gradients held in units" in text
    return text


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_to_the_same_bits(name: str) -> None:
    def make() -> Regression:
        return Regression(lambda module: OPTIMIZERS[name](_groups(module)))

    _, (callback,) = assert_same_run(make, lambda: [_held()])
    assert isinstance(callback, UnitScaleCallback)
    _events(callback)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2, "max_steps": 4},
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        {"precision": "64-true"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("depth", "optimizer"), [("products", adamw), ("products", momentum), ("all", adamw)]
)
def test_every_setting_trains_to_the_same_bits(
    depth: Any, options: dict[str, Any], optimizer: Any
) -> None:
    """A scheduler, two groups with decay, accumulation, clipping, and other types."""

    def make() -> Regression:
        return Regression(optimizer)

    _, callbacks = assert_same_run(
        make, lambda: [_held(depth=depth), ScaleMonitor(every_n_steps=2)], **options
    )
    assert isinstance(callbacks[0], UnitScaleCallback)
    _events(callbacks[0])


@pytest.mark.parametrize("recalibrate", ["auto", 3])
def test_new_units_on_the_way(recalibrate: Any) -> None:
    """A rate that lets everything grow by orders of magnitude within a few steps."""

    def make() -> Regression:
        return Regression(lambda m: torch.optim.Adam(m.parameters(), lr=0.5, amsgrad=True))

    _, (callback,) = assert_same_run(make, lambda: [_held(recalibrate=recalibrate)], max_steps=20)
    assert isinstance(callback, UnitScaleCallback)
    assert "parameters at step" in _events(callback)


def test_a_tuner_that_trains_before_the_training() -> None:
    """It takes other optimizers and puts parameters back, while they are held."""

    class Tuned(Regression):
        def __init__(self) -> None:
            super().__init__(dropout=0.0)
            self.lr = 0.01

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def trained(*callbacks: pl.Callback) -> Any:
        finder = LearningRateFinder(num_training_steps=6, update_attr=False)
        done = run(Tuned, [*callbacks, finder], max_epochs=2, max_steps=-1)
        return done.weights, done.optimizers, [one["loss"] for one in done.outputs]

    assert_same_bits(trained(_held()), trained())


class Tied(pl.LightningModule):
    """An embedding that is the readout, a convolution, a norm, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(0.3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = (batch[0] * 1e3).long() % 7
        h = self.embedding(tokens)
        h = h + self.conv(h.mT).mT * self.scalar
        logits = self.frozen(self.norm(h)) @ self.embedding.weight.T
        penalty = 1e-3 * sum(one.square().sum() for one in self.parameters())
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + penalty

    def configure_optimizers(self) -> Any:
        return adamw(self)


@pytest.mark.parametrize("depth", ["products", "all"])
def test_parameters_that_are_read_in_many_ways(depth: Any) -> None:
    _, (callback,) = assert_same_run(Tied, lambda: [_held(depth=depth)])
    assert isinstance(callback, UnitScaleCallback)
    assert "6 parameters and their gradients held" in _events(callback)


class _Save(pl.Callback):
    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)
            trainer.save_checkpoint(self.path.with_suffix(".weights"), weights_only=True)


@pytest.mark.parametrize("how", ["held to held", "held to plain", "plain to held"])
def test_checkpoints_are_in_true_units(how: str, tmp_path: Path) -> None:
    def make() -> Regression:
        return Regression(adamw, dropout=0.0)

    first, second = ([_held()] if one == "held" else [] for one in how.split(" to "))
    path = tmp_path / "half.ckpt"
    whole = run(make, max_steps=8)
    run(make, [*first, _Save(path, 4)], max_steps=8)
    plain = tmp_path / "plain.ckpt"
    run(make, [_Save(plain, 4)], max_steps=8)
    ours, theirs = (torch.load(one, weights_only=False) for one in (path, plain))
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same_bits(ours[key], theirs[key])
    weights = torch.load(path.with_suffix(".weights"), weights_only=False)
    assert_same_bits(weights["state_dict"], theirs["state_dict"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint")
        resumed = run(make, second, max_steps=8, entry_options={"ckpt_path": path})
    assert_same_bits((resumed.weights, resumed.optimizers), (whole.weights, whole.optimizers))
    # What is validated on its own is not held, whatever the checkpoint knows of units.
    if how == "held to held":
        tested = run(_Tested, [_held()], entry="test", entry_options={"ckpt_path": path})
        plainly = run(_Tested, entry="test", entry_options={"ckpt_path": plain})
        assert_same_bits(tested.metrics, plainly.metrics)


def test_16_true_goes_on_where_a_checkpoint_stopped(tmp_path: Path) -> None:
    """The optimizer's squares, 1e-16 in true units, come back; a summary may call the module."""

    class Shown(Faint):
        def __init__(self) -> None:
            super().__init__(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-15))
            self.example_input_array = torch.ones(1, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.gelu(self.norm(self.first(x.to(self.dtype)))))

    def losses(*callbacks: pl.Callback, **options: Any) -> Any:
        done = run(
            Shown,
            [UnitScaleCallback(depth="all"), *callbacks],
            precision="16-true",
            max_steps=8,
            enable_model_summary=True,
            entry_options=options,
        )
        return [step["loss"] for step in done.outputs], done.weights

    path = tmp_path / "half.ckpt"
    whole, weights = losses(_Save(path, 4))
    saved = torch.load(path, weights_only=False)["optimizer_states"][0]["state"][0]["exp_avg_sq"]
    assert saved.dtype == torch.float32 and 0 < saved.max() < 1e-10
    resumed, again = losses(ckpt_path=path)
    assert_same_bits(resumed, whole[4:])
    assert_same_bits(again, weights)


class _Tested(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def test_two_fits_and_what_is_left_of_them() -> None:
    callback = _held()
    module = Regression(adamw)
    run(lambda: module, max_steps=1)  # Lightning leaves attributes of its own
    before = {name: set(vars(one)) for name, one in module.named_modules()}
    for _ in range(2):
        run(lambda: module, [callback], max_steps=2)
    assert {name: set(vars(one)) for name, one in module.named_modules()} == before
    assert not any(one._forward_pre_hooks for one in module.modules())


class Faint(pl.LightningModule):
    """A loss so small that FP16 has none of its gradients."""

    def __init__(self, optimizer: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.optimizer_of = optimizer
        self.first, self.norm, self.second = nn.Linear(6, 32), nn.LayerNorm(32), nn.Linear(32, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.second(F.gelu(self.norm(self.first(100 * x))))
        return 1e-7 * F.mse_loss(out, y.to(out.dtype))

    def configure_optimizers(self) -> Any:
        return self.optimizer_of(self)


def _faint_losses(callbacks: Any, **options: Any) -> Tensor:
    def make() -> Faint:
        return Faint(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-15))

    with warnings.catch_warnings():
        # torch's notice that a scheduler or a scaler is not for a CPU, and the like.
        warnings.simplefilter("ignore")
        done = run(make, callbacks, max_steps=40, **options)
    return torch.stack([step["loss"].double() for step in done.outputs])


def test_16_true_trains_what_fp16_alone_cannot() -> None:
    true = _faint_losses([])
    plain = _faint_losses([], precision="16-true")
    callback = UnitScaleCallback(depth="all")
    found = _faint_losses([callback], precision="16-true")
    _events(callback)
    assert true[-1] < 0.7 * true[0]
    assert plain[-4:].mean() > 0.9 * plain[:4].mean() or not plain.isfinite().all()
    # A loss of 1e-7 has two bits in FP16, so the gain is compared, not the loss.
    assert found.isfinite().all()
    gains = [one[-8:].mean() / one[:8].mean() for one in (found, true)]
    assert abs(gains[0] - gains[1]) < 0.25


def test_fp8_in_a_module_of_16_bits() -> None:
    """The units of a parameter go into the cast to FP8 as any other does."""

    class Wide(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].repeat(1, 3)[:, :16] * 100
            return F.mse_loss(self.second(F.gelu(self.first(x))), x)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    losses = []
    for options in (
        {"depth": "all", "method": Lossless(hold_parameters=False)},
        {"depth": "all", "method": Lossless(hold_parameters=True)},
        # At the dispatcher, where the moving grid has names of its own.
        {"method": Lossless(hold_parameters=False)},
    ):
        callback = UnitScaleCallback(precision="fp8", **options)
        done = run(Wide, [callback], max_steps=12, precision="bf16-true")
        assert "2 of 2 products in FP8" in callback.explain()
        losses.append(torch.stack([step["loss"] for step in done.outputs]))
    assert_same_bits(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0], rtol=0.05, atol=0.0)
    assert losses[0][-4] < losses[0][0]


def test_16_mixed_at_depth_all_starts_its_loss_scale_at_one() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scales: list[float] = []

    class Scales(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            scales.append(trainer.precision_plugin.scaler.get_scale())

    def plugin() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))

    _faint_losses([UnitScaleCallback(depth="all"), Scales()], plugins=[plugin()])
    assert set(scales) == {1.0}
    scales.clear()
    _faint_losses([UnitScaleCallback(), Scales()], plugins=[plugin()])
    assert scales[0] > 1.0


def test_who_calls_the_module_by_itself_is_told() -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    x = torch.ones(3, 6)

    class Calls(pl.Callback):
        within = True

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step < 3:
                return
            if not self.within:
                pl_module.first(x)
            weight = pl_module.state_dict()["first.weight"]
            with callback.true_parameters():
                seen.append((pl_module.first(x), F.linear(x, weight, pl_module.first.bias)))

    callback = _held()
    run(lambda: Regression(adamw), [callback, Calls()], max_steps=4)
    assert len(seen) == 2
    for one, other in seen:
        assert_same_bits(one, other)
    Calls.within = False
    with pytest.raises(RuntimeError, match=r"^Linear is called outside of the module's steps"):
        run(lambda: Regression(adamw), [_held(), Calls()], max_steps=4)


def test_auto_is_for_16_bits_only() -> None:
    for precision, is_held in (("32-true", False), ("bf16-mixed", False), ("bf16-true", True)):
        callback = UnitScaleCallback()
        run(lambda: Regression(adamw), [callback], max_steps=1, precision=precision)
        assert ("held in units" in callback.explain()) == is_held
    callback = UnitScaleCallback(Lossless(hold_parameters=False))
    run(lambda: Regression(adamw), [callback], max_steps=1, precision="bf16-true")
    assert "held in units" not in callback.explain()


def test_fp16_between_products_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"with precision='16-true': gradients between .*'all'"):
        run(lambda: Regression(adamw), [UnitScaleCallback()], max_steps=1, precision="16-true")


def test_trainers_and_optimizers_that_do_not_go_with_it() -> None:
    def make(optimizer: Any = torch.optim.Adadelta) -> Regression:
        return Regression(lambda module: optimizer(module.parameters()))

    with pytest.raises(ValueError, match=r"^optimizer=Adadelta\(...\): .*; expected one of Adam"):
        run(make, [UnitScaleCallback()], max_steps=1, precision="bf16-true")
    run(
        make,
        [UnitScaleCallback(Lossless(hold_parameters=False))],
        max_steps=1,
        precision="bf16-true",
    )
    with pytest.raises(MisconfigurationException, match=r"with StochasticWeightAveraging: it aver"):
        run(lambda: Regression(adamw), [_held(), StochasticWeightAveraging(0.1)], max_epochs=2)


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__(momentum)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_manual_optimization_is_not_held() -> None:
    with pytest.raises(MisconfigurationException, match=r"^hold_parameters=True: a step that cann"):
        run(Manual, [_held()], max_steps=2)
    callback = UnitScaleCallback()
    run(Manual, [callback], max_steps=2, precision="bf16-true")
    assert "Parameters are not held in units: a step that cannot" in callback.explain()


class Broken(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.first(batch[0])
        torch._dynamo.graph_break()
        return self.second(h).square().mean()


class Validated(Regression):
    """Validation that is captured in parts, with metrics and weights read between them."""

    seen: list[Tensor]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        h = self.first(batch[0])
        torch._dynamo.graph_break()
        self.seen.append(self.first.weight.detach().clone())
        self.log("val_loss", self.second(F.gelu(self.norm(h))).square().mean())


def test_validation_sees_true_values() -> None:
    runs = []
    for callbacks in ([], [_held()]):
        Validated.seen = []
        options: dict[str, Any] = {"val_check_interval": 2, "num_sanity_val_steps": 1}
        data = {"val_dataloaders": loader()}
        done = run(lambda: Validated(adamw), callbacks, entry_options=data, max_steps=6, **options)
        runs.append((Validated.seen, done.outputs, done.weights, done.metrics))
    assert len(runs[0][0]) > 8
    assert_same_bits(runs[1], runs[0])


class Later(Regression):
    """A step that is captured whole at first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.first(batch[0])
        if self.trainer.global_step == 2:
            torch._dynamo.graph_break()
        return self.second(h).square().mean()


def test_a_graph_break_while_held_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"^training_step: a graph break while parameters are"):
        run(lambda: Later(adamw), [_held()], max_steps=5)


def test_graph_breaks_are_not_held() -> None:
    def make() -> Broken:
        return Broken(momentum)

    callback = UnitScaleCallback()
    run(make, [callback], max_steps=2, precision="bf16-true")
    assert "not held in units: the step has graph breaks" in callback.explain()
