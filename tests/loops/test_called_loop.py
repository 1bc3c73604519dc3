"""Calls and steps of a loop: other methods than forward, closures, other optimizers."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from threading import Event, Thread
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale import attach
from lightning_unitscale.loops.called_loop import OptimizerSteps
from lightning_unitscale.loops.loop import Loop, LoopCallback
from lightning_unitscale.transforms import lossless_unit_scale
from tests.helpers import assert_same_bits
from tests.loops.loops import NUM_STEPS, Net, batches, new
from tests.loops.methods import METHODS


class LossNet(Net):
    """The loop calls no ``forward``."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y) + F.cross_entropy(self.down(x.repeat(1, 2)), y)


def test_other_method_than_forward() -> None:
    results = []
    for methods in ((), "loss"):
        torch.manual_seed(3)
        model = LossNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        units, monitor = callbacks = METHODS["both"]()
        losses = []
        with attach(model, optimizer, callbacks if methods else (), methods=methods):
            for x, y in batches(3):
                losses.append(model.loss(x, y))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        assert not {"forward", "loss"} & vars(model).keys()
        results.append((losses, model.state_dict()))
    assert_same_bits(*results)
    # Three matmuls, two of which ask for gradients of weights only.
    assert units.coverage.num_in_units == units.coverage.num_matmuls == 7
    assert [snapshot.step for snapshot in monitor.snapshots] == [0, 1, 2]
    assert {"up.linear", "down.linear", "down.linear_1"} <= set(monitor.snapshots[-1].names)


class Descent:
    """An optimizer that does not subclass torch's."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        self.params = list(params)

    def step(self) -> None:
        with torch.no_grad():
            for param in self.params:
                param.sub_(0.01 * param.grad)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def descend(model: nn.Module, optimizer: Any) -> list[Tensor]:
    losses = []
    for x, y in batches():
        losses.append(F.cross_entropy(model(x), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_optimizer_that_is_not_a_torch_optimizer() -> None:
    results = []
    for callbacks in ([], METHODS["both"]()):
        model, _ = new()
        optimizer = Descent(model.parameters())
        with attach(model, optimizer, callbacks) as attachment:
            results.append((descend(model, optimizer), model.state_dict()))
        assert attachment.step_index == NUM_STEPS
        assert "step" not in vars(optimizer)
    assert_same_bits(*results)
    assert [snapshot.step for snapshot in callbacks[1].snapshots] == [0, 1, 2, 4]


class Private(torch.optim.Optimizer):
    """Steps by another optimizer, as Opacus's does: torch hears of that one only."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.original_optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.original_optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)


def test_optimizer_that_wraps_optimizer() -> None:
    model, optimizer = new()
    optimizer = Private(optimizer)
    with attach(model, optimizer, METHODS["both"]()) as attachment:
        descend(model, optimizer)
    assert attachment.step_index == NUM_STEPS


def test_optimizer_belongs_to_module_if_they_share_parameters() -> None:
    model, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    steps = OptimizerSteps(model, None)
    assert not steps.end_with(optimizer)
    optimizer.add_param_group({"params": model[0].weight})
    assert steps.end_with(optimizer)
    del optimizer.param_groups[1]
    assert not steps.end_with(optimizer)
    model.append(other)  # a module may grow
    assert steps.end_with(optimizer)


class Compiled:
    """An optimizer whose user has compiled its step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.step = torch.compile(optimizer.step, backend="eager")
        self.zero_grad = optimizer.zero_grad


def test_compiled_optimizer_step() -> None:
    results = []
    for callbacks in ([], METHODS["both"]()):
        torch._dynamo.reset()
        model, optimizer = new()
        with attach(model, optimizer, callbacks) as attachment:
            results.append((descend(model, Compiled(optimizer)), model.state_dict()))
        assert attachment.step_index == NUM_STEPS
    assert_same_bits(*results)
    assert [snapshot.step for snapshot in callbacks[1].snapshots] == [0, 1, 2, 4]


def minimize(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses = []

    def closure(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(x), y))
        losses[-1].backward()
        return losses[-1].detach()

    for x, y in batches(3):
        optimizer.step(partial(closure, x, y))
    return losses


def test_optimizer_closures() -> None:
    """Calls within a step are of that step."""
    results = []
    for callbacks in ([], METHODS["both"]()):
        model, _ = new()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        with attach(model, optimizer, callbacks) as attachment:
            results.append((minimize(model, optimizer), model.state_dict()))
        assert attachment.step_index == 3
    assert_same_bits(*results)
    assert [snapshot.step for snapshot in callbacks[1].snapshots] == [0, 1, 2]


def test_closures_that_do_not_call_module() -> None:
    model, optimizer = new()
    other = nn.Linear(16, 16)
    with (
        attach(model, optimizer, METHODS["both"]()),
        pytest.warns(UserWarning, match="stepped 3 times, and no call of the module that records"),
    ):
        minimize(other, optimizer)


def test_training_in_evaluation_mode() -> None:
    """This happens with frozen norms. The first step shows that these calls are training."""
    results = []
    for callbacks in ([], METHODS["both"]()):
        model, optimizer = new()
        model.eval()
        with attach(model, optimizer, callbacks) as attachment:
            results.append((descend(model, optimizer), model.state_dict()))
    assert_same_bits(*results)
    assert attachment.step_index == NUM_STEPS - 1
    assert callbacks[0].coverage.num_in_units == callbacks[0].coverage.num_matmuls == 5
    assert [snapshot.step for snapshot in callbacks[1].snapshots] == [0, 1, 2, 4]


class Heard(LoopCallback):
    """Notes its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, loop: Loop) -> None: ...

    def begin_batch(self, *_: Any) -> None:
        self.told.append("batch")

    def begin_evaluation(self, *_: Any) -> None:
        self.told.append("evaluation")


def test_evaluation_with_gradients_is_not_training() -> None:
    model, optimizer = new()
    heard = Heard()
    with attach(model, optimizer, heard):
        for x, y in batches(3):
            F.cross_entropy(model.train()(x), y).backward()
            optimizer.step()
            model.eval()(x)
    assert heard.told == 3 * ["batch", "evaluation"]


def test_unseen_optimizer_warns_at_detach() -> None:
    model, _ = new()
    attachment = attach(model, None, METHODS["both"]())
    (x, y), *_ = batches(1)
    F.cross_entropy(model(x), y).backward()
    Descent(model.parameters()).step()
    with pytest.warns(UserWarning, match=r"module=Net: .* no optimizer step was seen"):
        attachment.detach()


@pytest.mark.parametrize(("by_hand", "num_calls"), [(True, 4), (False, 256)])
def test_loop_without_optimizer_warns_during_training(by_hand: bool, num_calls: int) -> None:
    model, _ = new()
    (x, y), *_ = batches(1)
    with attach(model):
        with pytest.warns(UserWarning, match=r"pass an object with a method step\(\)"):
            for _ in range(num_calls):
                F.cross_entropy(model(x), y).backward()
                if by_hand:
                    Descent(model.parameters()).step()
        # It is told once.
        model(x)


def test_first_call_and_load_state_dict_are_not_training() -> None:
    model, optimizer = new()
    (x, y), *_ = batches(1)
    with attach(model, optimizer):
        model(x)
        model.load_state_dict(new()[0].state_dict())
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_module_whose_calls_are_never_seen_warns() -> None:
    """The loop has stored the method before, and creates its own optimizer."""
    model, optimizer = new()
    forward = model.forward
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        attach(model, optimizer, METHODS["both"]()),
        pytest.warns(UserWarning, match="stepped 3 times, and no call of the module that records"),
    ):
        for x, y in batches(3):
            F.cross_entropy(forward(x), y).backward()
            own.step()


def test_evaluation_in_other_thread_during_training() -> None:
    """The thread's call runs while the model is trained."""
    is_within, may_leave = Event(), Event()

    def wait(*_: Any) -> None:
        if not torch.is_grad_enabled():
            is_within.set()
            may_leave.wait()

    def evaluate(model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            model(x)

    model, optimizer = new()
    model.norm.register_forward_hook(wait)
    units, monitor = METHODS["both"]()
    with attach(model, optimizer, [units, monitor]) as attachment:
        thread = Thread(target=evaluate, args=(model, batches(1)[0][0]))
        thread.start()
        is_within.wait()
        descend(model, optimizer)
        may_leave.set()
        thread.join()
    assert attachment.step_index == NUM_STEPS
    assert [snapshot.step for snapshot in monitor.snapshots] == [0, 1, 2, 4]
    assert units.coverage.num_in_units == units.coverage.num_matmuls == 5


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_attached_module_can_be_exported() -> None:
    """Loggers that draw the module export it."""
    model, optimizer = new()
    x = batches(1)[0][0]
    with attach(model.eval(), optimizer, METHODS["both"]()):
        recorded = torch.jit.trace(model, x), torch.export.export(model, (x,)).module()
    for module in recorded:
        assert_same_bits(module(x), model(x))


class Replicated(nn.Module):
    """Calls shallow copies of a model with weights of their own, as ``nn.DataParallel`` does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        replica = self.model._replicate_for_data_parallel()
        replica.weight, replica.bias = self.model.weight * 2, None
        return replica(x)


@pytest.mark.parametrize("how", ["attached", "transformed"])
def test_data_parallel_replica_is_unscaled(how: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)
    expected = Replicated(model)(x)
    if how == "attached":
        with attach(model, None, METHODS["both"]()):
            found = Replicated(model)(x)
    else:
        found = Replicated(lossless_unit_scale(model, x))(x)
    assert_same_bits(found, expected)


def test_batched_gradients_are_not_measured() -> None:
    """Statistics of batched gradients are not measured."""
    model, optimizer = new()
    units, monitor = METHODS["both"]()
    with attach(model, optimizer, [units, monitor]):
        y = model(x := batches(1)[0][0].requires_grad_())
        rows = torch.eye(16)[:, None].expand(-1, 8, -1)
        torch.autograd.grad(y, x, rows, is_grads_batched=True, retain_graph=True)
        y.square().mean().backward()
        optimizer.step()
    assert [snapshot.step for snapshot in monitor.snapshots] == [0]


def test_module_called_by_torch_func() -> None:
    """Nothing of it can be shown, which is said."""
    results = []
    for callbacks in ([], METHODS["both"]()):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)  # one number, which might be a loss
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        params = dict(model.named_parameters())

        def loss(values: dict[str, Tensor], x: Tensor, model: nn.Module = model) -> Tensor:
            return torch.func.functional_call(model, values, (x[None],)).square().mean()

        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))
        said = (
            pytest.warns(UserWarning, match="torch.func calls the module")
            if callbacks
            else nullcontext()
        )
        with said, attach(model, optimizer, callbacks):
            for x in torch.randn(3, 8, 4):
                values = {name: value.detach() for name, value in params.items()}
                for name, gradient in gradients(values, x).items():
                    params[name].grad = gradient.mean(0)
                optimizer.step()
        results.append(model.state_dict())
    assert_same_bits(*results)


def with_weights(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A module with all attributes of another, and other weights; as packages for MAML make it."""
    copied = copy.copy(model)
    copied._parameters, copied._modules = {}, {}
    for name, child in model.named_children():
        prefix = f"{name}."
        own = {key.removeprefix(prefix): weights[key] for key in weights if key.startswith(prefix)}
        copied._modules[name] = with_weights(child, own)
    copied._parameters.update({key: weights[key] for key in weights if "." not in key})
    return copied


def test_shallow_copy_with_own_weights() -> None:
    results = []
    for callbacks in ([], METHODS["both"]()):
        model, optimizer = new()
        losses = []
        with attach(model, optimizer, callbacks):
            for x, y in batches(3):
                loss = F.cross_entropy(model(x), y)
                weights = dict(model.named_parameters())
                gradients = torch.autograd.grad(loss, weights.values(), create_graph=True)
                steps = zip(weights.items(), gradients, strict=True)
                fast = {key: weight - 0.5 * gradient for (key, weight), gradient in steps}
                losses.append(F.cross_entropy(with_weights(model, fast)(x), y))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append((losses, model.state_dict()))
    assert_same_bits(*results)
    assert callbacks[0].coverage.num_in_units == callbacks[0].coverage.num_matmuls == 18


class Named(LossNet):
    """The function of a method has another name, as that of a module without ``forward`` has."""

    loss, forward = Net.forward, LossNet.loss


def test_pickled_module_has_plain_methods() -> None:
    model = Named()
    with attach(model, None, METHODS["both"](), methods="loss"):
        other = pickle.loads(pickle.dumps(model))
    assert (other.loss.__func__, other.forward.__func__) == (Named.loss, Named.forward)


def test_stored_method_works_after_detach() -> None:
    """It works after the end as the module's own does."""
    results = []
    for callbacks in ([], METHODS["both"]()):
        model, optimizer = new()
        with attach(model, optimizer, callbacks):
            descend(model, optimizer)
            forward, copied = model.forward, copy.copy(model)
        losses = []
        for x, y in batches(2):
            losses.append(F.cross_entropy(forward(x), y) + F.cross_entropy(copied(x), y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((losses, model.state_dict()))
    assert_same_bits(*results)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_signature_and_export_of_attached_method() -> None:
    (model, optimizer), (other, _) = new(), new(4)
    model.eval(), other.eval()
    ((x, _),) = batches(1)
    plain = model(x), inspect.getfullargspec(model.forward), inspect.signature(model.forward)
    with attach(model, optimizer, METHODS["both"]()):
        assert_same_bits(torch.jit.trace(model, x)(x), plain[0])
        assert_same_bits(torch.export.export(model, (x,)).module()(x), plain[0])
        assert inspect.getfullargspec(model.forward) == plain[1]
        assert inspect.signature(model.forward) == plain[2]
        for module in (model, other):
            assert_same_bits(MethodType(model.forward.__func__, module)(x), module(x))
