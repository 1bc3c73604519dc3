"""Callbacks in a plain loop: same bits as without them, and everything is restored."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from benchmarks.executed_matmuls import has_torchs_own_kernels
from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback, attach
from lightning_unitscale.callbacks import ScaleViolation
from tests.helpers import assert_same_bits
from tests.loops.loops import NUM_STEPS, Net, batches, new
from tests.loops.methods import METHODS


def train(
    model: nn.Module, optimizer: Any, data: Sequence[tuple[Tensor, Tensor]], parts: int = 2
) -> list[Tensor]:
    """Accumulates the gradients of parts of each batch, and evaluates after each step."""
    seen = []
    for x, y in data:
        for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.cross_entropy(model(part), target)
            loss.backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(model(x))
        model.train()
    return seen


@pytest.mark.parametrize("names_optimizer", [True, False])
def test_alternating_training_and_evaluation(names_optimizer: bool, tmp_path: Path) -> None:
    model, optimizer = new()
    expected = train(model, optimizer, batches()), model.state_dict()
    model, optimizer = new()
    callbacks = METHODS["both"]()
    named = optimizer if names_optimizer else None
    with attach(model, named, callbacks, log_dir=tmp_path) as attachment:
        found = train(model, optimizer, batches())
        assert attachment.step_index == NUM_STEPS
    assert_same_bits((found, model.state_dict()), expected)
    for callback in callbacks:
        if isinstance(callback, UnitScaleCallback):
            # Two batches with five matmuls each: the batch itself needs no gradient.
            assert callback.coverage.num_matmuls == 10
            assert len(callback.gauge) == 6
            assert "evaluation: 2 of 2 matmuls scaled" in str(callback.explain())
        else:
            assert [snapshot.step for snapshot in callback.snapshots] == [0, 1, 2, 4]
            assert {"input.x", "up.linear", "down.linear"} <= set(callback.snapshots[-1].names)
            accumulator = EventAccumulator(str(tmp_path))
            accumulator.Reload()
            (tag, *_) = accumulator.Tags()["scalars"]
            assert [event.step for event in accumulator.Scalars(tag)] == [0, 1, 2, 4]
    # Nothing is left.
    assert "forward" not in vars(model)
    assert not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
    assert has_torchs_own_kernels()


def test_matmul_operands_are_stored_near_rms_1() -> None:
    model, optimizer = new()
    monitor = ScaleMonitor(every_n_steps=1)
    with attach(model, optimizer, [monitor, UnitScaleCallback(recalibrate=1)]):
        train(model, optimizer, batches())
    snapshot = monitor.snapshots[-1]
    stored = {
        name: snapshot.log2_rms("forward", stored=True)[index]
        for index, name in enumerate(snapshot.names)
    }
    assert abs(stored["input.x"]) <= 1
    assert abs(stored["down.weight"]) <= 1
    true = snapshot.log2_rms("forward", stored=False)[snapshot.names.index("down.weight")]
    assert true < -4


@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"simulate": "E3M2FN"}])
def test_format_matches_trainer_and_resumes(options: dict[str, Any], tmp_path: Path) -> None:
    data = batches(12)
    model, optimizer = new()
    plain = train(model, optimizer, data)
    model, optimizer = new()
    with attach(model, optimizer, UnitScaleCallback(**options)):
        whole = train(model, optimizer, data), model.state_dict()
    assert not torch.equal(whole[0][-1], plain[-1])

    model, optimizer = new()
    with attach(model, optimizer, UnitScaleCallback(**options)) as attachment:
        first = train(model, optimizer, data[:9])
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "callbacks": attachment.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(state, tmp_path / "state.pt")
    model, optimizer = new(seed=8)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    with attach(model, optimizer, UnitScaleCallback(**options)) as attachment:
        attachment.load_state_dict(state["callbacks"])
        torch.set_rng_state(state["random"])
        assert attachment.step_index == 9
        rest = train(model, optimizer, data[9:])
    assert_same_bits(([*first, *rest], model.state_dict()), whole)


def test_two_models_with_separate_optimizers() -> None:
    """A GAN: a step of one model is not a step of the other."""

    def play(callbacks: dict[str, list[Any]]) -> list[Tensor]:
        torch.manual_seed(0)
        nets = {name: nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for name in ("g", "d")}
        optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
        handles = [attach(nets[name], None, own) for name, own in callbacks.items()]
        losses = []
        for x, _ in batches():
            for _ in range(2):
                loss = (nets["d"](x) - nets["d"](nets["g"](x).detach())).mean()
                optimizers["d"].zero_grad()
                loss.backward()
                optimizers["d"].step()
            loss = nets["d"](nets["g"](x)).mean()
            optimizers["g"].zero_grad()
            loss.backward()
            optimizers["g"].step()
            losses.append(loss.detach())
        assert [handle.step_index for handle in handles] == [NUM_STEPS, 2 * NUM_STEPS][
            : len(handles)
        ]
        for handle in handles:
            handle.detach()
            handle.detach()
        return losses

    own = {name: METHODS["both"]() for name in ("g", "d")}
    assert_same_bits(play(own), play({}))
    for unit_scale, monitor in own.values():
        assert set(unit_scale.gauge) >= {"0.linear", "0.linear:weight"}
        assert "0.linear" in monitor.snapshots[0].names


def test_unreferenced_attachment_is_freed() -> None:
    model, optimizer = new()
    attach(model, optimizer, METHODS["both"]())
    train(model, optimizer, batches(2))
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
    assert has_torchs_own_kernels()


def test_copies_of_attached_model_are_unscaled() -> None:
    """Copies for averaged weights, and files of whole modules, are unscaled."""
    model, optimizer = new()
    with attach(model, optimizer, METHODS["both"]()) as attachment:
        train(model, optimizer, batches(2))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            steps = attachment.step_index
            train(other, torch.optim.SGD(other.parameters(), lr=0.1), batches(1))
            assert attachment.step_index == steps
            assert other.forward.__func__ is Net.forward


@pytest.mark.parametrize("on_violation", ["stop", "raise"])
def test_violation_raises_or_stops(on_violation: Any) -> None:
    model, optimizer = new()
    monitor = ScaleMonitor(every_n_steps=1, on_violation=on_violation)
    with attach(model, optimizer, monitor) as attachment:
        train(model, optimizer, batches(1))
        x, y = batches(1)[0]
        if on_violation == "raise":
            with pytest.raises(ScaleViolation):
                train(model, optimizer, [(x * torch.inf, y)])
            return
        with pytest.warns(UserWarning, match=r"\d+ NaN|\d+ infinite"):
            train(model, optimizer, [(x * torch.inf, y)])
        assert attachment.should_stop


def test_loss_outside_module_gives_gradient_of_result() -> None:
    model, optimizer = new()
    monitor = ScaleMonitor(every_n_steps=1)
    ((x, y),) = batches(1)
    with attach(model, optimizer, monitor):
        result = model(x)
        result.retain_grad()
        F.cross_entropy(result, y).backward()
        optimizer.step()
    snapshot = monitor.snapshots[0]
    assert not any("cross_entropy" in name for name in snapshot.names)
    seen = snapshot.log2_rms("backward", stored=False)[snapshot.names.index("down.linear")]
    assert seen == pytest.approx(float(result.grad.square().mean().sqrt().log2()), abs=1e-4)


def test_gradients_exclude_loss_scale() -> None:
    """And a step that the scaler skips is none: its batches are part of the next."""
    rms = []
    for is_scaled in (False, True):
        model, optimizer = new()
        monitor = ScaleMonitor(every_n_steps=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
        with attach(model, optimizer, monitor, scaler=scaler) as attachment:
            for x, y in batches(2):
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert attachment.step_index == 2
        snapshot = monitor.snapshots[0]
        rms.append(snapshot.log2_rms("backward", stored=False)[snapshot.names.index("up.linear")])
    assert rms[0] == pytest.approx(rms[1], abs=1e-4)


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def _replica(model: nn.Module) -> nn.Module:
    # Dynamo warns of the broadcast, which it does not follow.
    return DistributedDataParallel(model, broadcast_buffers=False)


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow_cases
@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "compiled",
    [
        lambda model: torch.compile(model, backend="aot_eager"),
        _in_place,
        lambda model: _replica(_in_place(model)),
        pytest.param(
            lambda model: torch.compile(_replica(model), backend="aot_eager"),
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda model: _in_place(_replica(model)), marks=pytest.mark.slow),
    ],
    ids=["compiled", "in place", "replica of it", "replica compiled", "replica in place"],
)
def test_compiled_module_is_bit_identical(compiled: Callable[[nn.Module], nn.Module]) -> None:
    results = []
    for how in ("without", "both"):
        model, optimizer = new()
        called = compiled(model)
        before = dict(vars(model))
        callbacks = METHODS["both"]() if how == "both" else []
        with attach(called, optimizer, callbacks):
            results.append((train(called, optimizer, batches(3), parts=1), model.state_dict()))
        assert vars(model).keys() == before.keys()
    assert_same_bits(*results)
    units, monitor = callbacks
    # Matmuls of a compiler other than Inductor are reached in eager.
    assert units.coverage.num_in_units == units.coverage.num_matmuls == 5
    assert [snapshot.step for snapshot in monitor.snapshots] == [0, 1, 2]


def test_calling_other_compiled_copy_warns() -> None:
    model, optimizer = new()
    with attach(model, optimizer, METHODS["both"]()):
        compiled = torch.compile(model, backend="aot_eager")
        with pytest.warns(
            UserWarning, match=r"module=Net: an optimizer has stepped 3 times.*attach"
        ):
            train(compiled, optimizer, batches(3), parts=1)


BAD = {
    "module": (lambda m, o: attach("m"), TypeError, "module='m'"),
    "optimizer": (lambda m, o: attach(m, "sgd"), TypeError, "optimizer='sgd'"),
    "methods": (lambda m, o: attach(m, o, methods=["loss"]), ValueError, "no method 'loss'"),
    "callbacks": (lambda m, o: attach(m, o, ["x"]), TypeError, "callbacks='x'"),
    "twice": (
        lambda m, o: attach(m, o, [ScaleMonitor(), ScaleMonitor()]),
        ValueError,
        "ScaleMonitor is given 2 times",
    ),
    "class": (lambda m, o: attach(m, o, [ScaleMonitor]), TypeError, r"Write ScaleMonitor\(\)"),
    "budgets": (
        lambda m, o: attach(m, o, [RematCallback(0.5), UnitScaleCallback(remat=0.6)]),
        ValueError,
        r"RematCallback\(budget=0.5\) and UnitScaleCallback\(remat=0.6\) both set",
    ),
    "log_dir": (
        lambda m, o: attach(m, o, ScaleMonitor(), log_dir=f"{__file__}/scales"),
        ValueError,
        "log_dir='.*/scales': this folder is not writable .*not a directory",
    ),
    "remat": (lambda m, o: attach(m, o, RematCallback(0.5)), ValueError, "RematCallback: it"),
    "rules": (lambda m, o: attach(m, o, UnitScaleCallback("u-mup")), ValueError, "method="),
    "remat of units": (
        lambda m, o: attach(m, o, [ScaleMonitor(), UnitScaleCallback(remat="min_cut")]),
        ValueError,
        "remat='min_cut': it needs captured steps.*Expected method='lossless' in other loops",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error_and_restores_module(name: str) -> None:
    call, kind, text = BAD[name]
    model, optimizer = new()
    with pytest.raises(kind, match=text):
        call(model, optimizer)
    assert "forward" not in vars(model)
    assert not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def test_adding_duplicate_callback_is_an_error() -> None:
    model, optimizer = new()
    with attach(model, optimizer, ScaleMonitor()) as attachment:
        with pytest.raises(ValueError, match="ScaleMonitor is given 2 times"):
            attachment.add(ScaleMonitor())
        assert len(attachment.callbacks) == 1


def test_attaching_module_twice_is_an_error() -> None:
    model, optimizer = new()
    with (
        attach(model, optimizer, ScaleMonitor()),
        pytest.raises(ValueError, match="attached to it already"),
    ):
        attach(model, optimizer, UnitScaleCallback())


def test_log_folder_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer, ScaleMonitor(1), log_dir="~/runs"):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert list((tmp_path / "home/runs").glob("*tfevents*")) and not (tmp_path / "~").exists()
