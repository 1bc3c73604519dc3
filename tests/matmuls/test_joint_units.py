"""Units in the joint graph: shared copies, saved copies, and factors."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_unitscale.matmuls.coverage import CoverageCounter
from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from tests.helpers import assert_same_bits

pytestmark = [
    pytest.mark.slow,  # Inductor compiles C++
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Block(nn.Module):
    """A residual block whose second matmul Inductor adds to the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks, each within a checkpoint of these options if there are any."""

    def __init__(self, **checkpoint: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.checkpoint) if self.checkpoint else block(x)
        return x.square().mean()


ALL = {"use_reentrant": False}
_ATEN = torch.ops.aten
BUT_MATMULS = {
    "use_reentrant": False,
    "context_fn": functools.partial(
        create_selective_checkpoint_contexts, [_ATEN.mm.default, _ATEN.addmm.default]
    ),
}


class Module(nn.Module):
    """Calls a net that its user has compiled."""

    def __init__(self, net: nn.Module, **options: Any) -> None:
        super().__init__()
        self.net = net
        self.net.compile(**options)

    def step(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gauge_of(module: nn.Module, exponent: int) -> Gauge:
    """Other units for each operand and gradient."""
    pairs = {}
    for index in range(3):
        for layer, shift in (("up", 0), ("down", 2)):
            name = f"net.blocks.{index}.{layer}.linear"
            pairs[f"{name}:input"] = GaugePair(log2_sigma=exponent + shift)
            pairs[f"{name}:weight"] = GaugePair(log2_sigma=-exponent)
            pairs[name] = GaugePair(log2_gamma=-exponent - index)
    return Gauge(pairs)


def gradients(module: Module, x: Tensor) -> list[Tensor]:
    """Loss and gradients of a step."""
    loss = module.step(x)
    loss.backward()
    return taken(module, loss)


def taken(module: Module, loss: Tensor) -> list[Tensor]:
    found = [loss.detach(), *[p.grad for p in module.parameters() if p.grad is not None]]
    module.zero_grad()
    return found


def assert_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second) == 1 + 3 * 5
    assert_same_bits(first, second)


def plain(make: Callable[[], Module], x: Tensor) -> list[Tensor]:
    found = gradients(make(), x)
    torch._dynamo.reset()
    return found


def assert_same_bits_in_units(num_matmuls: int, **options: Any) -> None:
    x = torch.randn(64, 32)
    expected = plain(lambda: Module(Net(**options)), x)
    module = Module(Net(**options))
    attached = AttachedSession(module, ["step"])
    for exponent in (0, 5, -9):
        attached.session.units.set_gauge(gauge_of(module, exponent))
        counter = attached.session.counter = CoverageCounter()
        assert_equal(gradients(module, x), expected)
        coverage = counter.result()
        assert coverage.num_matmuls == coverage.num_in_units == num_matmuls
    attached.detach()


def test_all_matmuls_are_scaled_and_bit_identical() -> None:
    assert_same_bits_in_units(18)


def test_checkpoint_recomputes_scaled_copies(torch_kernels: None) -> None:
    # Of what a block ends with nothing is computed again but in the last one.
    assert_same_bits_in_units(18 + 4, **ALL)


def test_backward_pass_uses_units_of_its_forward_pass(torch_kernels: None) -> None:
    """Two steps are under way when units change, and change again between their backward passes."""
    x, y = torch.randn(2, 64, 32)
    expected = [plain(lambda: Module(Net()), batch) for batch in (x, y)]
    module = Module(Net())
    attached = AttachedSession(module, ["step"])
    losses = []
    for exponent, batch in ((3, x), (-4, y)):
        attached.session.units.set_gauge(gauge_of(module, exponent))
        losses.append(module.step(batch))
    for loss, of_batch in zip(losses, expected, strict=True):
        attached.session.units.set_gauge(gauge_of(module, 7))
        loss.backward()
        assert_equal(taken(module, loss), of_batch)
    attached.detach()


def saved_tensors(module: Module, x: Tensor) -> list[Tensor]:
    """Return the tensors that a step saves for its backward pass, without its parameters."""
    saved: list[Tensor] = []
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved.append(tensor.detach().clone())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        gradients(module, x)
    return saved


def saved_bytes(module: Module, x: Tensor) -> int:
    return sum(tensor.nbytes for tensor in saved_tensors(module, x))


@pytest.mark.parametrize(
    "options", [{}, ALL, BUT_MATMULS], ids=["saved", "computed again", "but matmuls"]
)
def test_scaled_copies_are_saved_instead_of_originals(
    options: dict[str, Any], torch_kernels: None
) -> None:
    x = torch.randn(4096, 32)
    module = Module(Net(**options))
    expected = saved_bytes(module, x)
    torch._dynamo.reset()
    module = Module(Net(**options))
    attached = AttachedSession(module, ["step"])
    attached.session.units.set_gauge(gauge_of(module, 50))
    saved = saved_tensors(module, x)
    copies = [tensor for tensor in saved if tensor.is_floating_point() and tensor.dim() == 2]
    copies = [tensor for tensor in copies if 0 < tensor.abs().max() < 2.0**-40]
    # The input of the first layer of a block, unless a checkpoint recomputes it.
    assert len(copies) == (0 if options else 3)
    # The factors are a few numbers.
    assert sum(tensor.nbytes for tensor in saved) <= expected + 1000
    attached.detach()


class Attention(nn.Module):
    """Reads slices of a matmul, and passes a permuted result of attention to another matmul."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.inputs = nn.Linear(32, 96)
        self.output = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            self.inputs(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        )
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        loss: Tensor = (x + self.output(y.transpose(1, 2).flatten(2))).square().mean()
        return loss


def codes_of(module: Module, x: Tensor) -> tuple[list[Tensor], list[str]]:
    """Loss and gradients of a step, and the code of its forward and of its backward graph."""
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False):
        return run_and_get_code(gradients, module, x)


def allocated(code: str) -> int:
    """How many elements the code of a graph makes room for."""
    shapes = re.findall(r"empty_strided_cpu\(\((.*?)\),", code)
    return sum(math.prod(map(int, re.findall(r"\d+", shape))) for shape in shapes)


def assert_looks_read_what_matmuls_read(codes: list[str]) -> None:
    """Measuring a copy in another layout would make Inductor write the copy twice."""
    for code in codes:
        looked_at = re.findall(r"look\.default\(\[(.*?)\], buf", code)
        read = re.findall(r"(?:extern_kernels\.|attention.*\.default\()(.*)", code)
        names, of_matmuls = (set(re.findall(r"\bbuf\d+", str(text))) for text in (looked_at, read))
        assert names and names <= of_matmuls


def test_scaled_copies_are_written_once_in_16_bits() -> None:
    module = Module(Attention())
    attached = AttachedSession(module, ["step"])
    with torch.autocast("cpu", torch.bfloat16):
        _, codes = codes_of(module, torch.randn(4, 16, 32))
    assert_looks_read_what_matmuls_read(codes)
    attached.detach()


def test_copies_are_written_once_and_attention_outputs_are_saved() -> None:
    x = torch.randn(4, 16, 32)
    expected, (_, plain_backward) = codes_of(Module(Attention()), x)
    module = Module(Attention())
    attached = AttachedSession(module, ["step"])
    site = "net.scaled_dot_product_attention"
    pairs = {f"{site}:{name}": GaugePair(log2_sigma=40) for name in ("query", "key", "value")}
    attached.session.units.set_gauge(Gauge({site: GaugePair(log2_gamma=3), **pairs}))
    found, codes = codes_of(module, x)
    assert_same_bits(found, expected)
    assert_looks_read_what_matmuls_read(codes)
    # All readers of a gradient read the copy, so the gradient itself is never written.
    assert 0 < allocated(codes[1]) <= allocated(plain_backward)
    # In the unit of its values, in which the backward pass reads it.
    saved = [tensor for tensor in saved_tensors(module, x) if tensor.shape == (4, 4, 16, 8)]
    assert [float(tensor.abs().max()) < 2.0**-30 for tensor in saved] == [False, False, True, True]
    attached.detach()


class Uneven(nn.Module):
    """Gradients of a thousand, and in one column of numbers that have no room below them."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(6, 4)
        self.register_buffer("weights", torch.tensor([1e3, -2e3, 3e3, 1.1e-40]))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.first(x) + self.second(x).sin()) * self.weights).sum()


def test_gradient_copy_is_used_only_where_exact() -> None:
    x = torch.randn(64, 6)
    expected = plain(lambda: Module(Uneven()), x)
    assert 0 < expected[2][3].abs() < 2.0**-126
    module = Module(Uneven())
    attached = AttachedSession(module, ["step"])
    for is_plain in (False, True):
        attached.session.begin_step()
        counter = attached.session.counter = CoverageCounter()
        assert_same_bits(gradients(module, x), expected)
        attached.session.units.settle()
        assert any("below" in reason for reason in counter.result().reasons) == is_plain
    attached.detach()


class Twice(nn.Module):
    """A weight whose two gradients Inductor adds up within a matmul, of many terms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).sin()).square().mean()


def test_gradient_sum_is_fused_into_matmul_as_without_units() -> None:
    x = torch.randn(5000, 24)
    expected = plain(lambda: Module(Twice()), x)
    module = Module(Twice())
    attached = AttachedSession(module, ["step"])
    for exponent in (0, 6):
        names = [f"net.layer.linear{number}" for number in ("", "_1")]
        pairs = {f"{name}:input": GaugePair(log2_sigma=exponent) for name in names}
        pairs |= {f"{name}:weight": GaugePair(log2_sigma=-1) for name in names}
        pairs |= {name: GaugePair(log2_gamma=-exponent) for name in names}
        attached.session.units.set_gauge(Gauge(pairs))
        assert_same_bits(gradients(module, x), expected)
    attached.detach()


class Images(nn.Module):
    """Inductor chooses the layout of the first convolution by the saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()


def test_one_channel_convolution_is_unscaled() -> None:
    x = torch.randn(6, 1, 8, 8)
    expected = plain(lambda: Module(Images()), x)
    module = Module(Images())
    attached = AttachedSession(module, ["step"])
    for _ in range(2):
        attached.session.begin_step()
        counter = attached.session.counter = CoverageCounter()
        assert_same_bits(gradients(module, x), expected)
        attached.session.units.settle()
    coverage = counter.result()
    assert (coverage.num_matmuls, coverage.num_in_units) == (4, 2)
    assert "a convolution of one channel" in next(iter(coverage.reasons))
    attached.detach()


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_user_activation_memory_budget_is_kept(budget: float, torch_kernels: None) -> None:
    x = torch.randn(4096, 32)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        module = Module(Net())
        expected, size = gradients(module, x), saved_bytes(module, x)
        torch._dynamo.reset()
        module = Module(Net())
        attached = AttachedSession(module, ["step"])
        attached.session.units.set_gauge(gauge_of(module, 3))
        assert_equal(gradients(module, x), expected)
        assert saved_bytes(module, x) <= size + 1000
        attached.detach()


def test_autocast_is_bit_identical(torch_kernels: None) -> None:
    def run(module: Module) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(module, x)

    x = torch.randn(64, 32)
    expected = run(Module(Net()))
    torch._dynamo.reset()
    module = Module(Net())
    attached = AttachedSession(module, ["step"])
    attached.session.units.set_gauge(gauge_of(module, 3))
    assert_equal(run(module), expected)
    attached.detach()
