"""Lossless: equal bits of loss, gradients and buffers, and every operand near RMS 1."""

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.module_steps import matmuls_of, steps_of
from lightning_unitscale.matmuls.gauge import MAX_LOG2_GAMMA, MAX_LOG2_SIGMA
from lightning_unitscale.transforms import (
    Gauge,
    GaugePair,
    compile,
    lossless_unit_scale,
    simulate_format,
)
from tests.helpers import OperandMeter, assert_same_bits, operand_scales, run
from tests.zoo import MATMULS, NETWORKS, Step, w, x

ZOO = {**MATMULS, **NETWORKS}
# ATen multiplies their result of two operands by the third: it cannot be scaled in between.
_INTERMEDIATE = {"multi_dot"}
# Attention that is so sure of itself that terms vanish: there a product in units is another one.
_SATURATED = {"multi_head_attention"}
_SLACK = 1e-3  # rounding of the operands themselves, largest in BF16


def _set_gauge(module: nn.Module, gauge: Gauge) -> None:
    matmuls_of(module).session.units.set_gauge(gauge)


def _forward(module: nn.Module) -> CapturedStep:
    return steps_of(module).steps["forward"]


def _random_gauge(gauge: Gauge, seed: int) -> Gauge:
    dice = random.Random(seed)
    return Gauge(
        {name: GaugePair(dice.randint(-9, 9), dice.randint(-15, 15)) for name in sorted(gauge)}
    )


@pytest.mark.slow_cases
@pytest.mark.filterwarnings("ignore:.*unscaled. terms below 2..-126")
@pytest.mark.parametrize("name", ZOO)
def test_zoo_is_bit_identical_with_operands_near_rms_1(name: str) -> None:
    module, inputs = ZOO[name]()
    expected = run(module, *inputs)

    def make() -> nn.Module:
        torch.manual_seed(3)  # the seed of ``run``: the example then draws the same dropout masks
        return lossless_unit_scale(module, *inputs)

    readings = operand_scales(make, *inputs)
    assert readings
    outside = [one for one in readings if not 0.7071 - _SLACK <= one[1] <= 1.4143 + _SLACK]
    assert not outside or name in (_INTERMEDIATE | _SATURATED)
    with OperandMeter() as meter:
        run(module, *inputs)
    assert [one for one in meter.readings if not 0.5 <= one[1] <= 2.0], "nothing to scale"

    # Any gauge at all is as good for the bits, and none of them recompiles.
    scaled = make()
    assert_same_bits(run(scaled, *inputs), expected)
    for seed in range(2):
        _set_gauge(scaled, _random_gauge(scaled.gauge(), seed))
        assert_same_bits(run(scaled, *inputs), expected)
    assert (" unscaled: terms below" in scaled.explain()) == (name in _SATURATED)
    assert (" unscaled" in scaled.explain()) == (name in _SATURATED)


def test_three_factor_einsum_is_bit_identical() -> None:
    module = Step(lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), w(4, 5), w(5, 6))
    inputs = (x(6, 3),)
    expected = run(module, *inputs)
    scaled = lossless_unit_scale(module, *inputs)
    assert_same_bits(run(scaled, *inputs), expected)
    # Two matmuls of two operands each.
    assert [name.partition(":")[2] for name in scaled.gauge()].count("input") == 2


@pytest.mark.parametrize("is_compiled", [False, True])
def test_vdot_is_bit_identical_with_units_of_dot(is_compiled: bool) -> None:
    steps = {name: Step(getattr(torch, name), w(300)) for name in ("vdot", "dot")}
    leaf = x(300, scale=7.0)
    results, gauges = {}, {}
    for name, module in steps.items():
        results[name] = run(module, leaf)
        scaled = lossless_unit_scale(module, leaf)
        if is_compiled:
            scaled = compile(scaled)
            steps_of(scaled).use_executor("aot_eager")
        assert_same_bits(run(scaled, leaf), results[name])
        gauges[name] = [(key.partition(":")[2], pair) for key, pair in scaled.gauge().items()]
        assert any(pair.log2_sigma for _, pair in gauges[name])
    assert [pair for _, pair in gauges["vdot"]] == [pair for _, pair in gauges["dot"]]


@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
def test_new_gauges_change_no_bit_and_do_not_recompile(executor: str) -> None:
    module = Step(lambda one, two, a: two(one(a).relu()), nn.Linear(8, 16), nn.Linear(16, 8))
    inputs = (x(5, 8, scale=0.3),)
    expected = run(module, *inputs)
    scaled = compile(lossless_unit_scale(module, *inputs))
    steps_of(scaled).use_executor(executor)
    first = run(scaled, *inputs)
    if executor == "aot_eager":
        assert_same_bits(first, expected)
    else:
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
    stats = torch._dynamo.utils.counters["stats"]
    num_graphs, num_compiled = len(_forward(scaled).graphs), stats["unique_graphs"]
    for seed in range(3):
        _set_gauge(scaled, _random_gauge(scaled.gauge(), seed))
        assert_same_bits(run(scaled, *inputs), first)
    assert len(_forward(scaled).graphs) == num_graphs
    assert stats["unique_graphs"] == num_compiled


def test_new_gauge_does_not_affect_pending_backward_pass() -> None:
    module, inputs = NETWORKS["reused_residual"]()
    expected = run(module, *inputs)
    scaled = lossless_unit_scale(module, *inputs)
    leaf = inputs[0].detach().clone().requires_grad_()
    loss = scaled(leaf)
    _set_gauge(scaled, _random_gauge(scaled.gauge(), 5))
    loss.backward()
    assert_same_bits(leaf.grad, expected["inputs"][0])


def test_gradient_accumulation_and_no_grad() -> None:
    module, (a,) = NETWORKS["gates"]()
    scaled = lossless_unit_scale(module, a)
    gradients = []
    for one in (module, scaled):
        one.zero_grad()
        for part in (a, a * 2, a * 3):
            (one(part.detach()) / 3).backward()
        gradients.append({name: p.grad for name, p in one.named_parameters()})
    assert_same_bits(*gradients)
    with torch.no_grad():
        assert_same_bits(scaled(a), module(a))
    with torch.inference_mode():
        assert_same_bits(scaled(a), module(a))


def test_original_module_is_not_changed() -> None:
    module, inputs = NETWORKS["batch_norm"]()
    before = copy.deepcopy(module.__dict__)
    state = {name: one.clone() for name, one in module.state_dict().items()}
    random_state = torch.get_rng_state()
    scaled = lossless_unit_scale(module, *inputs)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same_bits(dict(module.state_dict()), state)
    assert_same_bits(dict(scaled.state_dict()), state)
    assert set(module.__dict__) == set(before)
    assert all(one.grad is None for one in (*module.parameters(), *scaled.parameters()))
    scaled(*inputs).backward()
    assert all(one.grad is None for one in module.parameters())
    pairs = zip(module.parameters(), scaled.parameters(), strict=True)
    assert all(one.data_ptr() != other.data_ptr() for one, other in pairs)


@pytest.mark.filterwarnings("ignore:.*unscaled. terms (below|above) 2")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-42, 3e38])
def test_extreme_values_give_bounded_units(value: float) -> None:
    module = Step(lambda m, a: m(a).tanh(), nn.Linear(4, 3))
    a = torch.full((2, 4), value)
    scaled = lossless_unit_scale(module, a)
    if value != 1e-42:  # a subnormal number may round on the way, as the hardware likes
        assert torch.equal(scaled(a).isnan(), module(a).isnan())
    pairs = scaled.gauge().values()
    assert all(abs(pair.log2_sigma) <= MAX_LOG2_SIGMA for pair in pairs)
    assert all(abs(pair.log2_gamma) <= MAX_LOG2_GAMMA for pair in pairs)
    ordinary = torch.randn(2, 4)
    assert_same_bits(run(scaled, ordinary), run(module, ordinary))


def test_empty_scalar_integer_and_complex_tensors() -> None:
    def function(m: nn.Module, a: Tensor, index: Tensor, z: Tensor) -> Tensor:
        empty = m(a[:0])
        whole = (index @ index.mT).sum().to(a.dtype)
        spectrum = torch.fft.fft(z @ z.mT).abs().sum()
        return m(a) * whole + empty.sum() + spectrum * a.sum() + a.new_tensor(2.0)

    module = Step(function, nn.Linear(4, 3))
    index, z = torch.arange(6).view(2, 3), torch.randn(2, 2, dtype=torch.complex64)
    inputs = (x(5, 4), index, z)
    expected = run(module, *inputs)
    scaled = lossless_unit_scale(module, *inputs)
    with pytest.warns(UserWarning, match="complex numbers"):
        found = run(scaled, *inputs)
    assert_same_bits(found, expected)


def test_gradient_units_come_from_first_backward_without_loss() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    a = torch.randn(5, 6) * 40
    expected = run(module, a)
    scaled = lossless_unit_scale(module, a)
    assert all(pair.log2_gamma == 0 for pair in scaled.gauge().values())
    with torch.no_grad():  # an evaluation in between has no gradients to show
        scaled(a)
    (scaled(a) * 1e-6).sum().backward()
    scaled.zero_grad()
    assert_same_bits(run(scaled, a), expected)
    assert all(scaled.gauge()[name].log2_gamma < -10 for name in ("0.linear", "2.linear"))
    sigmas = {name: pair.log2_sigma for name, pair in scaled.gauge().items()}
    assert sigmas["0.linear:input"] in (5, 6)


def test_rounded_module_without_loss() -> None:
    """Units of gradients are measured as the first of them arrive, and rounded in these units."""
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    a = torch.randn(5, 16)
    exact = module(a).detach()
    rounded = simulate_format(lossless_unit_scale(module, a), "E4M3FN", "E5M2")
    with torch.no_grad():
        inference = rounded(a)
    assert 0 < (inference - exact).norm() < 0.1 * exact.norm()
    assert_same_bits(rounded(a).detach(), inference)
    gradient = torch.randn(5, 16)
    ((rounded(a) * gradient).sum() * 2.0**-40).backward()
    faint = [one.grad.clone() for one in rounded.parameters()]
    assert rounded.gauge()["2.linear"].log2_gamma < -38
    module.zero_grad()
    (module(a) * gradient).sum().backward()
    for one, found in zip(module.parameters(), faint, strict=True):
        assert (found * 2.0**40 - one.grad).norm() < 0.15 * one.grad.norm()


def test_copy_measures_its_own_gradient_units() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    a = torch.randn(5, 6)
    scaled = lossless_unit_scale(module, a)
    copied = copy.deepcopy(scaled)
    (copied(a) * 2.0**-20).sum().backward()
    copied.zero_grad()
    assert_same_bits(run(copied, a), run(module, a))
    assert copied.gauge()["1.linear"].log2_gamma == -20
    assert "1.linear" not in scaled.gauge()


@pytest.mark.parametrize("kind", ["mapping", "attribute", "tuple"])
def test_loss_is_found_in_output_structures(kind: str) -> None:
    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    wrap = {
        "mapping": lambda loss: {"loss": loss, "other": None},
        "attribute": Output,
        "tuple": lambda loss: (loss, None),
    }[kind]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, a: Tensor) -> object:
            return wrap(self.linear(a).square().mean() * 2.0**-30)

    scaled = lossless_unit_scale(Module(), torch.randn(5, 6))
    assert scaled.gauge()["linear.linear"].log2_gamma < -20


def test_transforms_nest() -> None:
    module, inputs = NETWORKS["gates"]()
    expected = run(module, *inputs)
    inner = lossless_unit_scale(module, *inputs)
    outer = lossless_unit_scale(inner, *inputs)
    assert_same_bits(run(outer, *inputs), expected)
    assert_same_bits(run(inner, *inputs), expected)
    assert outer.gauge() == inner.gauge()


def test_keyword_arguments_and_nested_inputs() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, batch: dict[str, list[Tensor]], *, power: float) -> Tensor:
            return (self.linear(batch["parts"][1]) ** power).sum()

    module, batch = Module(), {"parts": [torch.ones(2), torch.randn(5, 6)]}
    scaled = lossless_unit_scale(module, batch, power=2.0)
    assert_same_bits(run(scaled, batch, power=2.0), run(module, batch, power=2.0))


def test_compiled_module_is_an_error() -> None:
    for make in (torch.compile, lambda module: module.compile() or module):
        with pytest.raises(ValueError, match=r"module=\w+: it is compiled already. Expected"):
            lossless_unit_scale(make(nn.Linear(2, 2)), torch.ones(1, 2))


@pytest.mark.parametrize("depth", ["all", "everything", None, 3])
def test_unknown_depth_is_an_error(depth: object) -> None:
    expected = rf"^depth={depth!r}: only matmuls are scaled. Expected 'products'\. .*'16-mixed'"
    with pytest.raises(ValueError, match=expected):
        lossless_unit_scale(nn.Linear(2, 2), torch.ones(1, 2), depth=depth)


def test_depth_of_earlier_versions_is_accepted() -> None:
    module, a = nn.Linear(2, 2), torch.ones(1, 2)
    scaled = lossless_unit_scale(module, a, depth="products")
    assert scaled.gauge() == lossless_unit_scale(module, a).gauge()
    assert_same_bits(run(scaled, a), run(module, a))


def test_matmuls_in_opaque_kernels_are_reported() -> None:
    module = Step(lambda a, b: torch.cdist(a, b).relu() + (a @ b.mT), w(4, 3))
    inputs = (x(5, 3),)
    scaled = lossless_unit_scale(module, *inputs)
    with pytest.warns(UserWarning, match=r"Step: 1 of 2 matmuls scaled .50 %.*a kernel of di"):
        found = run(scaled, *inputs)
    assert_same_bits(found, run(module, *inputs))
    assert "3 of 4 matmuls scaled" in scaled.explain()


def test_module_without_matmuls_is_unchanged() -> None:
    module = Step(lambda a, b: a + b, w(3))
    scaled = lossless_unit_scale(module, x(3))
    assert_same_bits(run(scaled, x(3).detach() * 0 + 1), run(module, x(3).detach() * 0 + 1))
    assert len(scaled.gauge()) == 0
    assert "No matmul has run" in scaled.explain()
