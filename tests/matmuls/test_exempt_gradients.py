"""Kernels that compute two gradients, one of which is exempt from a format."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.capture.operators import RULES
from lightning_unitscale.matmuls.calls import slot_of
from lightning_unitscale.matmuls.execute import Matmul
from lightning_unitscale.matmuls.matmul_formats import SimulateFormat
from lightning_unitscale.matmuls.measurement import Site
from lightning_unitscale.matmuls.rounding import SimulatedMatmuls
from lightning_unitscale.quantize import quantize
from lightning_unitscale.transforms import simulate_format
from tests.helpers import assert_same_bits


@pytest.mark.parametrize("format", ["E2M1FN", "MXFP4"])
def test_exempt_gradient_is_not_rounded(format: str) -> None:
    rule = next(rule for rule in RULES if rule.operator == "convolution_backward")
    torch.manual_seed(0)
    g, x, w = torch.randn(2, 32, 6, 6) * 8.0, torch.randn(2, 32, 8, 8), torch.randn(32, 32, 3, 3)
    rest = ([32], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    site = Site("conv", "", ("input", "weight"))
    slot, names = slot_of(rule.sources), ("conv", *site.operand_names)
    matmul = Matmul(rule, site, slot, (3, 0, 0), (True, False, False), names, 0)
    calls: list[tuple[list[bool], Tensor]] = []

    def original(*args: Any) -> Any:
        calls.append((args[10], args[0]))
        return torch.ops.aten.convolution_backward(*args)

    made = {}
    for exempt in (None, "input_gradient", "weight_gradient"):
        pairs: list[Any] = [] if exempt is None else [("conv", exempt)]
        numerics = SimulatedMatmuls(SimulateFormat(format, format, exempt=pairs))
        calls.clear()
        made[exempt] = numerics.run(matmul, original, [g, x, w, *rest], {})
        if exempt is not None:
            assert [mask for mask, _ in calls] == [[True, False, False], [False, True, True]]
            _, given = calls[exempt == "weight_gradient"]
            assert_same_bits(given, g / 8.0)
    exact = torch.ops.aten.convolution_backward(g, x, w, *rest)
    assert_same_bits(made["input_gradient"][0], exact[0])
    assert_same_bits(made["weight_gradient"][0], made[None][0])
    for index in (1, 2):
        assert_same_bits(made["weight_gradient"][index], exact[index])
        assert_same_bits(made["input_gradient"][index], made[None][index])
    assert not torch.equal(made[None][0], exact[0]) and not torch.equal(made[None][1], exact[1])


class _Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_tbc(x, self.weight, x.new_zeros(8))  # type: ignore[attr-defined,no-any-return]


def test_exempt_gradient_of_kernel_without_output_mask() -> None:
    layer, x = _Convolution(), torch.randn(6, 2, 8)

    def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        return list(torch.autograd.grad(module(x).sum(), (x, *module.parameters())))

    exempt = [("*", "forward"), ("*", "input_gradient")]
    found = gradients(simulate_format(layer, "E2M1FN", "E2M1FN", exempt=exempt), x)
    assert_same_bits(found[0], gradients(layer, x)[0])
    assert_same_bits(found[1], gradients(layer, quantize(x, "E2M1FN"))[1])
