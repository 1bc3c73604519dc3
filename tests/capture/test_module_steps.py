"""Captured steps replace a module's methods, and are removed without a trace."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_unitscale.capture.module_steps import LIGHTNING_STEPS, ModuleSteps, steps_of
from lightning_unitscale.transforms import unit_scale
from tests.helpers import assert_same_bits, run


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.logged: list[tuple[str, Any]] = []
        self.bias_name = "bias"

    def log(self, name: str, value: Any) -> None:
        self.logged.append((name, value))

    def forward(self, x: Tensor) -> Tensor:
        """Own documentation."""
        return self.linear(x).square().sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 13:
            raise LookupError("no such batch")
        if batch.shape[1] == 3:
            self.log("before", 1)
        loss = self.forward(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("seen", batch_idx)


def _attached(module: nn.Module, *names: str) -> ModuleSteps:
    steps = ModuleSteps(module, names or ("forward",), defer=("log",))
    steps.attach("test")
    return steps


def test_captured_step_matches_plain_step() -> None:
    module, x = Module(), torch.randn(3, 4, requires_grad=True)
    expected = run(module, x)
    _attached(module)
    assert_same_bits(run(module, x), expected)
    assert module.forward.__doc__ == "Own documentation."
    assert module.forward.__name__ == "forward"


def test_detach_by_last_owner_restores_module() -> None:
    module = Module()
    module.validation_step = own = lambda batch, batch_idx: None
    before = dict(module.__dict__)
    steps = ModuleSteps(module, [one for one in LIGHTNING_STEPS if hasattr(module, one)])
    steps.attach("first")
    steps.attach("first")
    steps.attach("second")
    assert steps_of(module) is steps
    module.training_step(torch.ones(1, 4), 0)
    module.logged.clear()
    steps.detach("first")
    assert steps_of(module) is steps
    steps.detach("unknown")
    steps.detach("second")
    assert steps_of(module) is None
    assert module.__dict__ == before
    assert list(module.__dict__) == list(before)
    assert module.validation_step is own
    steps.detach("second")
    assert module.__dict__ == before


@pytest.mark.parametrize("first_is_good", [False, True])
def test_user_error_is_raised_and_next_call_is_captured(first_is_good: bool) -> None:
    module, batch = Module(), torch.randn(3, 4)
    log = module.log
    steps = _attached(module, "training_step")
    step = steps.steps["training_step"]
    if first_is_good:
        module.training_step(batch, 0)
    with pytest.raises(LookupError, match="no such batch"):
        module.training_step(batch, 13)
    assert module.log == log
    module.logged.clear()
    for size in (3, 5):
        batch = torch.randn(size, 4)
        loss = module.training_step(batch, 0)
        assert step.num_graph_calls == 1
        assert torch.equal(loss, Module.forward(module, batch))
    assert [name for name, _ in module.logged] == ["loss", "loss"]


def test_torch_error_is_raised_and_next_call_is_captured() -> None:
    module = Module()
    steps = _attached(module, "training_step")
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        module.training_step(torch.randn(2, 3), 0)
    assert module.logged == []
    module.training_step(torch.randn(2, 4), 0)
    assert steps.steps["training_step"].num_graph_calls == 1


def test_smaller_last_batch_is_captured_too() -> None:
    module = Module()
    step = _attached(module).steps["forward"]
    for size in (8, 8, 3, 8, 1):
        x = torch.randn(size, 4)
        assert torch.equal(module(x), Module.forward(module, x))
        assert step.num_graph_calls == 1
    assert 2 <= len(step.graphs) <= 3


def test_graph_break_is_reported() -> None:
    class Broken(Module):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            torch._dynamo.graph_break()
            return y.square().sum()

    module, x = Broken(), torch.randn(3, 4, requires_grad=True)
    expected = run(module, x)
    steps = _attached(module)
    assert_same_bits(run(module, x), expected)
    assert steps.steps["forward"].num_graph_calls == 2
    assert [one.index for one in steps.steps["forward"].graphs] == [0, 1]
    report = steps.explain()
    assert "1 graph breaks:" in report
    assert "test_module_steps.py:" in report
    run(module, x)
    assert len(steps.graph_breaks) == 1


def test_step_without_tensor_operations_warns_once() -> None:
    module = Module()
    steps = _attached(module, "validation_step")
    with pytest.warns(UserWarning, match=r"Module\.validation_step: no graph could be captured"):
        module.validation_step(torch.ones(2), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.validation_step(torch.ones(2), 1)
    assert module.logged == [("seen", 0), ("seen", 1)]
    assert steps.steps["validation_step"].graphs == []


def test_copied_module_has_separate_steps() -> None:
    module = Module()
    steps = _attached(module, "training_step", "forward")
    module.training_step(torch.ones(2, 4), 0)
    module.logged.clear()
    copied = copy.deepcopy(module)
    other = steps_of(copied)
    assert other is not steps
    assert other.module is copied
    assert copied.training_step is other.steps["training_step"]
    with torch.no_grad():
        copied.linear.weight.zero_()
        copied.linear.bias.fill_(1.0)
    assert copied.training_step(torch.ones(2, 4), 0).item() == 4.0
    x = torch.ones(2, 4)
    assert torch.equal(module.training_step(x, 0), Module.forward(module, x))
    assert [name for name, _ in copied.logged] == ["loss"]
    assert [name for name, _ in module.logged] == ["loss"]
    other.detach("test")
    assert steps_of(copied) is None
    assert steps_of(module) is steps
    assert copied.training_step(torch.ones(2, 4), 0).item() == 4.0


def test_pickling_captured_module_is_an_error() -> None:
    module = Module()
    steps = _attached(module)
    with pytest.raises(
        TypeError, match=r"Module\.forward is captured and cannot be pickled. Expected"
    ):
        pickle.dumps(module)
    steps.detach("test")
    assert torch.equal(pickle.loads(pickle.dumps(module)).linear.weight, module.linear.weight)


def test_interpreter_gets_each_graph_and_its_inputs() -> None:
    module, x = Module(), torch.randn(3, 4)
    step = _attached(module).steps["forward"]
    seen = []

    def interpreter(graph: Any, inputs: tuple[Any, ...]) -> Any:
        seen.append((graph.index, len(inputs)))
        return graph.base(*inputs)

    assert torch.equal(step.rehearse(interpreter, x), Module.forward(module, x))
    assert seen == [(0, 3)]
    assert step.interpreter is None
    with pytest.raises(ZeroDivisionError):
        step.rehearse(lambda graph, inputs: 1 / 0, x)
    assert step.interpreter is None
    assert torch.equal(module(x), Module.forward(module, x))


def test_step_inside_torch_compile_is_not_captured_again() -> None:
    module, x = Module(), torch.randn(3, 4)
    expected = module(x)
    step = _attached(module).steps["forward"]
    outer = torch.compile(lambda value: module.forward(value) * 2, backend="eager")
    assert torch.equal(outer(x), expected * 2)
    assert step.graphs == []


def test_captured_module_is_garbage_collected() -> None:
    import gc
    import weakref

    module = Module()
    _attached(module)
    module(torch.ones(1, 4))
    reference = weakref.ref(module)
    del module
    torch._dynamo.reset()
    gc.collect()
    assert reference() is None


def _in_grad(module: nn.Module, x: Tensor) -> None:
    grad(lambda p: functional_call(module, p, (x,)))(dict(module.named_parameters()))


def _in_vmap(module: nn.Module, x: Tensor) -> None:
    vmap(module)(x[None])


def _in_flop_counter(module: nn.Module, x: Tensor) -> None:
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert counter.get_total_flops() == 2 * 3 * 4 * 2


@pytest.mark.parametrize("within", [_in_grad, _in_vmap, _in_flop_counter])
@pytest.mark.parametrize("is_first", [True, False])
def test_uncaptured_call_does_not_stop_later_captures(within: Any, is_first: bool) -> None:
    """Dynamo passes over a call within such a mode, and would over all later ones of any module."""
    module, x = Module(), torch.randn(3, 4)
    steps = _attached(module)
    expected = module(x) if not is_first else None
    with pytest.warns(UserWarning, match=r"^Module\.forward: .* runs uncaptured"):
        within(module, x)
    found = module(x)
    assert steps.steps["forward"].num_graph_calls == 1
    if expected is not None:
        assert_same_bits(found, expected)
    other = _attached(Module())
    other.module(x)
    assert other.steps["forward"].num_graph_calls == 1


def test_rules_inside_vmap_are_an_error() -> None:
    module, x = Module(), torch.randn(3, 4)
    scaled = unit_scale(module)
    scaled(x).backward()
    with pytest.raises(
        RuntimeError, match=r"Module\.forward cannot be .* by rules: it runs within"
    ):
        _in_vmap(scaled, x)


class Seen(TorchDispatchMode):
    """A mode, such as torch's debug mode, under which Dynamo captures."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[type] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kinds.update(type(one) for one in args if isinstance(one, Tensor))
        return func(*args, **(kwargs or {}))


def test_torch_function_mode_does_not_see_rewriting() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)[None]
            return functional.scaled_dot_product_attention(x, x, x)[0]

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

        def forward(self, x: Tensor) -> Tensor:
            # Not captured itself. The second and the third layer run one captured code.
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x.square().sum()

    module, x = Layers(), torch.randn(3, 4)
    expected = run(module, x)
    steps = _attached(module)
    with Seen() as seen:
        assert_same_bits(run(module, x), expected)
    assert len(steps.steps["forward"].graphs) == 3
    assert seen.kinds <= {Tensor, nn.Parameter}
