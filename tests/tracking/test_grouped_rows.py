"""Rows that one call takes are those that many calls would, and fewer calls take them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_unitscale.capture.attach import captured_forward
from lightning_unitscale.dynamo.backend import inductor_options
from lightning_unitscale.graph.nodes import is_whole_view
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.statistics import ROW_OPERATOR, ROWS_OPERATOR, functional_row
from lightning_unitscale.tracking.fuse_rows import group_rows
from lightning_unitscale.tracking.probes import ScaleProbes

LAYOUT, OTHER = RowLayout(sample_size=None), RowLayout(histogram=False)
SUMS = slice(LAYOUT.index("sum"), LAYOUT.index("square_sum") + 1)


def row(tensor: Tensor, layout: RowLayout = LAYOUT, factor: Tensor | None = None) -> Tensor:
    return ROW_OPERATOR(tensor, [] if factor is None else [factor], layout.key)


def _of_inputs(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    first = row(x)
    return first, row(y * 2), row(y)


def _of_outputs(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    a = x.exp()
    first = row(a)
    b = y.sin()
    return a, b, first, row(b)


def _of_parts(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    a, b = (x @ y).chunk(2, dim=-1)
    return row(a), row(b), a + b


def _one_after_the_other(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    a = x.exp()
    first = row(a)
    b = a.sin()
    return first, row(b)


def _of_other_kinds(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return row(x), row(y, OTHER)


def _with_factors(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    one, two = torch.full((), 0.5), torch.full((), 2.0**-6)
    return row(x, LAYOUT, one), row(y), row(x, LAYOUT, two), row(y, LAYOUT, one)


def _near_each_other(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    a = x.repeat(400, 1)
    first = row(a)
    b = y.repeat(400, 1)
    return a, first, b, row(b)


def _large_and_apart(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    a = x.repeat(4000, 1)
    first = row(a)
    b = y.repeat(4000, 1)
    return a, first, b, row(b)


def _the_last_one_soon_gone(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    a = x.repeat(400, 1)
    first = row(a)
    b = y.repeat(400, 1)
    second = row(b)
    c = b.sum(0).repeat(4000)
    return a, first, second, c, row(c)


def _of_large_parts(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    a, b = (x @ y).repeat(4000, 2).chunk(2, dim=-1)
    return row(a), row(b), a + b


def _read_in_between(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    a = x.exp()
    b = a.sin() * row(a)[0]
    return row(b), b.sum()


def _of_outputs_read_in_between(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    a = x.exp()
    b = a.sin() * row(a)[0]
    return a, b, row(b)


def _written_in_between(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    a = x.exp()
    first = row(a)
    a.mul_(2.0)
    return first, row(y.sin()), a.sum()


def _of_inputs_written_in_between(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    first = row(x)
    x.mul_(2.0)
    return first, row(y), x


# Calls for one row and sizes of the calls for several.
EXPECTED = {
    _of_inputs: (1, [2]),
    _of_outputs: (0, [2]),
    _of_parts: (0, [2]),
    _one_after_the_other: (2, []),
    _of_other_kinds: (2, []),
    _with_factors: (0, [4]),
    _near_each_other: (0, [2]),
    _large_and_apart: (2, []),
    _the_last_one_soon_gone: (1, [2]),
    _of_large_parts: (0, [2]),
    _read_in_between: (2, []),
    _of_outputs_read_in_between: (2, []),
    _written_in_between: (2, []),
    _of_inputs_written_in_between: (2, []),
}


@pytest.mark.parametrize("function", EXPECTED)
def test_what_is_taken_together(function: Callable[..., Sequence[Tensor]]) -> None:
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    module = make_fx(function, tracing_mode="fake")(x, y)
    group_rows(module.graph)
    module.graph.lint()
    module.recompile()
    single = module.graph.find_nodes(op="call_function", target=ROW_OPERATOR)
    several = module.graph.find_nodes(op="call_function", target=ROWS_OPERATOR)
    assert (len(single), [len(node.args[0]) for node in several]) == EXPECTED[function]
    expected_rows = function(x.clone(), y.clone())
    for found, expected in zip(module(x, y), expected_rows, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_operator() -> None:
    ordinary = [torch.randn(300), torch.randn(8, 9).half(), torch.randn(70, 1000).bfloat16()]
    factors = [torch.tensor(2.0**-8), torch.tensor(4.0)]
    odd = [torch.randn(5).double(), torch.randn(0), torch.randn(6, 7)[:, ::2]]
    for tensors in (ordinary, [*ordinary, *odd]):
        factor_of = [-1, 1, 0, 1, 0, 1][: len(tensors)]
        rows = ROWS_OPERATOR(tensors, factors, factor_of, LAYOUT.key)
        expected = torch.stack(
            [
                functional_row(one, LAYOUT, factor=factors[place] if place >= 0 else None)
                for one, place in zip(tensors, factor_of, strict=True)
            ]
        )
        torch.testing.assert_close(rows[:, SUMS], expected[:, SUMS], rtol=1e-5, atol=1e-3)
        rows[:, SUMS] = expected[:, SUMS] = 0
        torch.testing.assert_close(rows, expected, rtol=0, atol=0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(4, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 8, 16)
        return self.out(y).square().sum()


def test_inductor_makes_fewer_calls() -> None:
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(4, 8, 16)
    snapshots, calls = [], []
    for executor in ("eager", "inductor"):
        probes = ScaleProbes(LAYOUT, lambda node: not is_whole_view(node))
        monitored, step = captured_forward(module, "test", probes)
        step.owner.use_executor(executor)  # type: ignore[arg-type]
        step.owner.observe("test", True)
        monitored(x).backward()  # to trace and to compile calls them as well
        probes.clear()
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu], acc_events=True) as profile:
            monitored(x).backward()
        snapshot = probes.take(0)
        assert snapshot is not None
        snapshots.append(snapshot)
        names = [one.name for one in profile.events()]
        calls.append([names.count(f"lightning_unitscale::statistics_row{s}") for s in ("", "s")])
    eager, inductor = snapshots
    assert eager.names == inductor.names
    assert calls[0][0] > 0 and calls[0][1] == 0
    assert 0 < sum(calls[1]) < 0.6 * sum(calls[0])
    for direction in ("forward", "backward"):
        ours, theirs = getattr(inductor, direction), getattr(eager, direction)
        # Inductor's own arithmetic differs in the last digits.
        np.testing.assert_allclose(ours[:, SUMS], theirs[:, SUMS], rtol=1e-4, atol=1e-3)
        # Whether an element that is all rounding is zero is up to it as well.
        counts = [LAYOUT.index(name) for name in ("numel", "nans", "infs")]
        np.testing.assert_array_equal(ours[:, counts], theirs[:, counts])


def test_a_pass_of_the_user_comes_first() -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    seen = []

    class Theirs(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(len(graph.find_nodes(op="call_function", target=ROW_OPERATOR)))

        def uuid(self) -> str:
            return "theirs"

    module = make_fx(_of_inputs, tracing_mode="fake")(torch.randn(3, 3), torch.randn(3, 3))

    def options_beside(theirs: Any) -> CustomGraphPass:
        with config.patch(post_grad_custom_post_pass=theirs):
            return inductor_options(group_rows)["post_grad_custom_post_pass"]

    own = options_beside(Theirs())
    own(module.graph)
    assert seen == [3]
    assert len(module.graph.find_nodes(op="call_function", target=ROW_OPERATOR)) == 1
    assert own.uuid() == (*options_beside(None).uuid(), "theirs")
    for unknown in (seen.append, [Theirs(), seen.append]):  # nothing to know it by: no caching
        assert options_beside(unknown).uuid() is None
