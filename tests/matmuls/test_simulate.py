"""A dispatch mode sees operands rounded to the format, in every form of call."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.executed_matmuls import below_all_kernels
from lightning_unitscale.capture.module_steps import captured_forward, steps_of
from lightning_unitscale.formats import E4M3FN, E5M2, NumberFormat
from lightning_unitscale.matmuls.matmul_formats import SimulateFormat
from lightning_unitscale.quantize import quantize
from lightning_unitscale.transforms import lossless_unit_scale, simulate_format, simulate_fp8
from tests.helpers import assert_same_bits, run
from tests.zoo import MATMULS, NETWORKS, Step, w, x

ZOO = {**MATMULS, **NETWORKS}


def _is_in(tensor: Tensor, format: NumberFormat) -> bool:
    dtype = {"E4M3FN": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[format.name]
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


# For each operand of each matmul, whether it is in E4M3FN and whether in E5M2.
Seen = list[tuple[str, bool, bool]]


def _formats(make: Callable[[], nn.Module], *inputs: Any) -> tuple[Seen, Seen]:
    """Formats of the operands in the forward pass, and of those in the backward pass."""
    seen: dict[bool, Seen] = {False: [], True: []}
    is_backward = False

    def see(name: str, tensor: Tensor) -> None:
        seen[is_backward].append((name, _is_in(tensor, E4M3FN), _is_in(tensor, E5M2)))

    @contextmanager
    def backward() -> Iterator[None]:
        nonlocal is_backward
        is_backward = True
        yield
        is_backward = False

    def step() -> None:
        module = make()
        seen[False].clear()
        seen[True].clear()
        run(module, *inputs, around_backward=backward())

    with below_all_kernels(see):
        step()
    return seen[False], seen[True]


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", ZOO)
def test_every_matmul_reads_representable_values(name: str) -> None:
    module, inputs = ZOO[name]()
    forward, backward = _formats(lambda: simulate_fp8(module), *inputs)
    assert forward
    # All that is below is what the matmuls themselves read.
    outside = [one for one in (*forward, *backward) if not (one[1] or one[2])]
    assert not outside, outside
    assert not [one for one in forward if not one[1]]


@pytest.mark.parametrize("order", ["lossless first", "lossless last"])
@pytest.mark.parametrize("name", ["linear", "attention_fused", "attention_dropout", "checkpoint"])
def test_stored_operands_are_rounded(name: str, order: str) -> None:
    module, inputs = ZOO[name]()

    def make() -> nn.Module:
        if order == "lossless first":
            return simulate_fp8(lossless_unit_scale(module, *inputs))
        return lossless_unit_scale(simulate_fp8(module), *inputs)

    forward, backward = _formats(make, *inputs)
    assert forward and backward
    assert all(one[1] for one in forward), forward
    assert all(one[1] or one[2] for one in backward), backward


def test_nesting_order_changes_nothing() -> None:
    module, inputs = NETWORKS["gates"]()
    first = simulate_fp8(lossless_unit_scale(module, *inputs))
    last = lossless_unit_scale(simulate_fp8(module), *inputs)
    assert_same_bits(run(first, *inputs), run(last, *inputs))


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(w(6, 8))
        self.bias = nn.Parameter(w(6))

    def forward(self, a: Tensor) -> Tensor:
        return F.linear(a, self.weight, self.bias)


def test_linear_layer_matches_hand_written_rounding() -> None:
    module, a = _Linear(), x(5, 8)
    simulated = simulate_fp8(module)
    output = simulated(a)
    grad = torch.randn(5, 6) * 1e-3
    output.backward(grad)
    stored, weight = quantize(a.detach(), "E4M3FN"), quantize(module.weight.detach(), "E4M3FN")
    arriving = quantize(grad, "E5M2")
    assert_same_bits(output.detach(), F.linear(stored, weight, module.bias.detach()))
    torch.testing.assert_close(a.grad, arriving @ weight)
    torch.testing.assert_close(simulated.weight.grad, arriving.T @ stored)
    # The bias is no operand: it is added wide, and so is its gradient.
    torch.testing.assert_close(simulated.bias.grad, grad.sum(0))
    assert module.weight.grad is None


def test_lossless_units_prevent_flush_to_zero() -> None:
    module = Step(lambda a, b: F.linear(b, a), w(6, 8, scale=1e-4))
    inputs = (x(5, 8, scale=1e4),)
    true = run(module, *inputs)["parameters"]["w0"]
    naive = run(simulate_fp8(module), *inputs)["parameters"]["w0"]
    both = simulate_fp8(lossless_unit_scale(module, *inputs))
    scaled = run(both, *inputs)["parameters"]["w0"]
    assert (naive - true).norm() > 0.9 * true.norm()
    assert (scaled - true).norm() < 0.1 * true.norm()


@pytest.mark.slow_cases
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
def test_executors_match_eager(executor: str, rounding: str, torch_kernels: None) -> None:
    def function(one: nn.Module, two: nn.Module, a: Tensor) -> Tensor:
        return checkpoint(lambda b: two(F.relu(one(b))), a, use_reentrant=False)

    # Sums of few numbers of few bits are exact, so no order of summation shows.
    module = Step(function, nn.Linear(4, 4), nn.Linear(4, 2))
    inputs = (torch.randn(4, 4).requires_grad_(),)
    expected = captured_forward(
        simulate_format(module, (3, 2), (4, 2), rounding=rounding, seed=3), "test"
    )[0]
    compiled = copy.deepcopy(expected)
    steps_of(compiled).use_executor(executor)
    for _ in range(2):
        torch.testing.assert_close(
            run(compiled, *inputs), run(expected, *inputs), rtol=1e-5, atol=1e-6
        )


def test_stochastic_rounding_is_seeded_without_global_rng() -> None:
    module, inputs = NETWORKS["checkpoint"]()

    def results(seed: int) -> Any:
        simulated = simulate_format(module, "E3M2FN", "E3M2FN", rounding="stochastic", seed=seed)
        outcomes = [run(simulated, *inputs) for _ in range(2)]
        return outcomes, torch.get_rng_state()

    first, state = results(1)
    again, _ = results(1)
    other, _ = results(2)
    assert_same_bits(first, again)
    assert not torch.equal(first[0]["output"], first[1]["output"])
    assert not torch.equal(first[0]["output"], other[0]["output"])
    run(module, *inputs)
    assert torch.equal(state, torch.get_rng_state())


def test_copy_draws_same_random_numbers() -> None:
    module, inputs = NETWORKS["gates"]()
    simulated = simulate_format(module, "E3M2FN", "E3M2FN", rounding="stochastic")
    first = run(simulated, *inputs)
    twin = copy.deepcopy(simulated)
    expected = run(simulated, *inputs)
    assert not torch.equal(first["output"], expected["output"])
    assert_same_bits(run(twin, *inputs), expected)


def test_stochastic_gradients_are_unbiased() -> None:
    module, a = _Linear(), torch.randn(64, 8)
    simulated = simulate_format(module, "FP32", "E2M1FN", rounding="stochastic")
    grad = torch.randn(64, 6)
    total = torch.zeros(6, 8)
    for _ in range(200):
        simulated.zero_grad()
        simulated(a).backward(grad)
        total += simulated.weight.grad
    assert (total / 200 - grad.T @ a).norm() < 0.02 * (grad.T @ a).norm()


@pytest.mark.slow
def test_include_and_exclude() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, a: Tensor) -> Tensor:
            return self.down(self.up(a)).sum()

    module, a = Two(), x(3, 8)
    for options in ({"exclude": "down"}, {"include": ["u*"]}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forward, _ = _formats(lambda: simulate_format(module, "E4M3FN", "E5M2", **options), a)  # noqa: B023
        assert [one[1] for one in forward] == [True, True, False, False]
        simulated = simulate_format(module, "E4M3FN", "E5M2", **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            simulated(a).backward()
        # Modules that are not included were not requested.
        expected = ["down (name excluded)"] if "exclude" in options else []
        assert [str(one.message).rpartition(": ")[2] for one in caught] == expected
        done = simulated.explain()
        assert "3 of 6 matmuls in a simulated format (50 % of their FLOPs)" in done
        assert "Operands rounded to E4M3FN, gradients to E5M2 (nearest)" in done
        del simulated  # the kernels of matmuls are watched from below in the next turn
        rows = [line.split() for line in done.splitlines()]
        assert ["up", "3", "50", "%", "in", "format"] in rows
        reason = "name excluded" if "exclude" in options else "name not included"
        assert ["down", "3", "50", "%", "unrounded", *reason.split()] in rows


def test_no_grad_forward_is_rounded() -> None:
    module, a = _Linear(), torch.randn(5, 8)
    simulated = simulate_fp8(module)
    with torch.no_grad():
        output = simulated(a)
    assert "1 of 1 matmuls in a simulated format" in simulated.explain()
    weight = quantize(module.weight.detach(), "E4M3FN")
    assert_same_bits(output, F.linear(quantize(a, "E4M3FN"), weight, module.bias.detach()))


def test_step_without_matmuls_is_unchanged() -> None:
    module = Step(lambda p, a: p * a, w(4))
    inputs = (x(4),)
    simulated = simulate_format(module, "E4M3FN", "E5M2", rounding="stochastic")
    assert_same_bits(run(simulated, *inputs), run(module, *inputs))
    # The first step may have no loss, so it is no reason to warn.
    with pytest.warns(UserWarning, match="no matmul runs in a simulated format: no matmul"):
        run(simulated, *inputs)


def test_bad_simulate_arguments_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"rounding='up': unknown rounding"):
        SimulateFormat("E4M3FN", "E5M2", rounding="up")
    with pytest.raises(ValueError, match=r"mantissa_bits=0: out of range"):
        simulate_format(_Linear(), (4, 0), "E5M2")
    with pytest.raises(ValueError, match=r"exponent_bits=1: out of range"):
        simulate_format(_Linear(), "E4M3FN", (1, 3))
    with pytest.raises(ValueError, match=r"exclude=\[''\]: '' is not a pattern"):
        simulate_format(_Linear(), "E4M3FN", "E5M2", exclude=[""])
