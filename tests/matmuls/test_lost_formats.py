"""Every matmul of a plain module is rounded to the format, or a warning reports it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.transforms import (
    compile,
    fp8_linears,
    lossless_unit_scale,
    remat,
    simulate_format,
    simulate_fp8,
)
from tests.helpers import assert_same_bits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Between(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(self.up(x)).relu())

    @torch.compiler.disable
    def hidden(self, x: Tensor) -> Tensor:
        return self.middle(x)


MADE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fp8": fp8_linears,
    "simulated": simulate_fp8,
    "units": lambda module: fp8_linears(lossless_unit_scale(module, torch.randn(4, 32))),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _x(rows: int) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))


def _results(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    result = module(x)
    result.sum().backward()
    return [result.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def _is_rounded(module: Any, plain: nn.Module, x: Tensor) -> bool:
    pairs = zip(_results(module, x), _results(plain, x), strict=True)
    return all(not torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_torch_compile_past_recompile_limit_is_rounded(
    make: Callable[[nn.Module], nn.Module], torch_kernels: None
) -> None:
    """It runs uncompiled, whatever Dynamo has given up."""
    plain, module = Net(), torch.compile(make(Net()), dynamic=False)
    for rows in range(4, 16):
        assert _is_rounded(module, plain, _x(rows))


@pytest.mark.slow
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@pytest.mark.parametrize("capture", [compile, lambda module: remat(module, 1.0)])
def test_captured_module_past_recompile_limit_of_class_is_rounded(
    make: Callable[[nn.Module], nn.Module], capture: Any
) -> None:
    """These reach the limit of the code that they share."""
    plain, early = Net(), capture(make(Net()))
    _results(early, _x(4))  # its units are measured
    assert _is_rounded(early, plain, _x(4))
    for rows in range(4, 16):
        torch.compile(Net(), dynamic=False)(_x(rows))
    late = capture(make(Net()))
    _results(late, _x(4))
    for rows in (4, 5, 6):
        assert _is_rounded(early, plain, _x(rows)) and _is_rounded(late, plain, _x(rows))
        with torch.no_grad():
            assert not torch.equal(late(_x(rows)), plain(_x(rows)))


@pytest.mark.slow
def test_matmuls_between_captured_graphs_are_rounded() -> None:
    module, plain = compile(fp8_linears(Between())), Between()
    assert _is_rounded(module, plain, _x(4))
    assert "8 of 8 matmuls in FP8" in module.explain()  # type: ignore[operator]


def test_later_unsupported_shape_warns_in_its_call() -> None:
    class Sliced(Net):
        def forward(self, x: Tensor) -> Tensor:
            rows = 40 if len(x) == 5 else 48
            return x @ self.up.weight[:rows].T

    module, plain = fp8_linears(Sliced()), Sliced()
    for _ in range(2):
        assert not torch.equal(module(_x(4)), plain(_x(4)))
    with pytest.warns(
        UserWarning, match="went from 100 % to 0 % of the FLOPs at call 3: .*40 output"
    ):
        assert_same_bits(module(_x(5)).detach(), plain(_x(5)).detach())
    assert not torch.equal(module(_x(4)), plain(_x(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(_x(5))
    assert "In call 3 no matmul runs in FP8" in module.explain()  # type: ignore[operator]


def test_exempt_gradient_does_not_warn() -> None:
    exempt = [("down*", "weight_gradient")]
    module = simulate_format(Net(), "E4M3FN", "E5M2", exempt=exempt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # gradients of a step are counted in the next call
            module(_x(4)).sum().backward()
    assert "this computation is exempt" in module.explain()  # type: ignore[operator]
