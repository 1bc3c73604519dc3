"""``track_scales`` changes no bit, no input tensor, no module state and no other transform."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.transforms import (
    lossless_unit_scale,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    track_scales,
)
from tests.helpers import assert_same_bits, run
from tests.monitor.tracked import Call, directions, metrics
from tests.zoo import NETWORKS

graph_break = torch._dynamo.graph_break


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_tracked_module_is_bit_identical(name: str) -> None:
    module, inputs = NETWORKS[name]()
    tracked = track_scales(module)
    assert_same_bits(run(tracked, *inputs), run(module, *inputs))
    graph = tracked.scales_graph()
    graph.lint()
    assert any(node.meta["metrics"] and node.meta["metrics"].bwd for node in graph.nodes)
    prune_same_scale_tensors(prune_non_float_tensors(graph)).lint()


def test_inputs_of_caller_are_not_changed() -> None:
    model = track_scales(Call(lambda a, x, y: (a(x) * y["scale"]).sum(), nn.Linear(4, 3)))
    x, scale = torch.randn(5, 4), torch.randn(3)
    model(x, {"scale": scale}).backward()
    assert not x.requires_grad and x.grad is None
    assert not scale.requires_grad and scale.grad is None
    found = metrics(model)
    inputs = [one for name, one in found.items() if name.startswith("input.")]
    assert len(inputs) == 2
    assert all(one is not None and one.bwd is not None for one in inputs)
    asking = x.clone().requires_grad_()
    model(asking, {"scale": scale}).backward()
    assert asking.grad is not None and scale.grad is None


def test_gradient_penalty_is_bit_identical() -> None:
    plain = Call(lambda a, x: a(x).pow(2).sum(), nn.Linear(4, 3))
    results = []
    for model in (plain, track_scales(plain)):
        x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
        loss = model(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.pow(2).sum()).backward()
        results.append((x.grad, [one.grad for one in model.parameters()]))
    assert_same_bits(*results)


def test_module_state_is_unchanged_by_tracking() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("replaced", torch.zeros(4))
            self.register_buffer("written", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.replaced = 0.9 * self.replaced + 0.1 * x.mean(0)
            self.written.mul_(0.9).add_(x.mean(0))
            return (self.linear(x - self.replaced) * self.written.sum()).sum()

    plain = Running()
    tracked = track_scales(plain)
    x = torch.randn(5, 4)
    for model in (plain, tracked):
        for _ in range(3):
            model.zero_grad()
            model(x).backward()
    assert_same_bits(dict(tracked.named_buffers()), dict(plain.named_buffers()))
    assert_same_bits(tracked.linear.weight.grad, plain.linear.weight.grad)
    assert not any(one.requires_grad for one in tracked.buffers())
    copy.deepcopy(tracked)


def test_gradient_dependent_kernels_do_not_change() -> None:
    def function(a: nn.Linear, x: Tensor, mask: Tensor, small: Tensor) -> Tensor:
        q = a(x)[None, None]
        h = F.scaled_dot_product_attention(q, q, q, mask)[0, 0]
        return (h.view(2, 8, 24).transpose(1, 2) @ small).square().mean()

    plain = Call(function, nn.Linear(24, 24))
    args = (torch.randn(16, 24), torch.randn(16, 16), torch.randn(8, 3))
    model = track_scales(plain)
    assert_same_bits(run(plain, *args), run(model, *args))
    found = directions(model)
    assert set(found.values()) == {"both"}


def test_tensors_without_gradient_are_tracked_forward_only() -> None:
    """Class weights of a loss, which torch refuses if they require a gradient."""

    def function(a: nn.Linear, x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        logits, weight = a(x), weight * 2
        likely = F.binary_cross_entropy_with_logits(logits, x, pos_weight=weight)
        return F.cross_entropy(logits, labels, weight=weight) + likely

    plain = Call(function, nn.Linear(4, 4))
    args = (torch.rand(6, 4), torch.randint(4, (6,)), torch.rand(4))
    model = track_scales(plain)
    assert_same_bits(run(plain, *args), run(model, *args))
    found = directions(model)
    assert found["input.args_0"] == "both"
    assert found["input.args_2"] == found["mul"] == "fwd"


def test_no_op_results_share_one_gradient() -> None:
    """Autograd sums the gradients of ``x.float()`` and of ``x`` in one go: they are one tensor."""

    def function(a: nn.Linear, x: Tensor) -> Tensor:
        h = a(x)
        same = F.dropout(h.float().contiguous(), 0.0)
        return (h + same * same.pow(2).mean(-1, keepdim=True).rsqrt() + same.exp()).sum()

    plain = Call(function, nn.Linear(64, 64))
    model, x = track_scales(plain), torch.randn(32, 64)
    assert_same_bits(run(plain, x), run(model, x))
    found = metrics(model)
    assert found["parts.0.linear"] == found["float"] == found["contiguous"] == found["dropout"]
    assert found["dropout"] is not None and found["dropout"].bwd is not None


class ReturnsItsInput(nn.Module):
    """The caller reads the input as well, in results or directly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, self.linear(x), x.view(-1)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_input_gradients_are_added_in_plain_order(is_leaf: bool) -> None:
    module = ReturnsItsInput()
    tracked = track_scales(module)
    # Which sums round differently is a matter of luck.
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 16, generator=generator)
        seeds = [torch.randn(one.shape, generator=generator) for one in module(x)]
        gradients = []
        for one in (module, tracked):
            leaf = x.clone().requires_grad_()
            given = leaf if is_leaf else leaf * 1
            torch.autograd.backward(one(given), seeds)
            gradients.append(leaf.grad)
        assert torch.equal(gradients[1], gradients[0])
        (node,) = (one for one in tracked.scales_graph().nodes if one.meta["clean_name"] == "x")
        found = node.meta["metrics"].bwd
        assert found.abs_max == gradients[0].abs().max()
        assert found.numel == x.numel()


def test_inputs_have_no_hooks() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    track_scales(ReturnsItsInput())(x)
    assert not x._backward_hooks


def test_results_between_graph_breaks_match_plain_module() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.seen: list[bool] = []

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = x.exp()
            graph_break()
            self.seen.append(h.requires_grad)
            h.requires_grad = True  # as models do for their checkpoints
            graph_break()
            return self.linear(h).sum(), x.cos()

    plain, x = Asking(), torch.randn(5, 4)
    model = track_scales(plain)
    loss, other = model(x)
    plain(x)[0].backward()
    loss.backward()
    assert model.seen == [False]
    assert_same_bits(model.linear.weight.grad, plain.linear.weight.grad)
    # The caller's backward pass reaches the result that has no parameter in it.
    other.sum().backward()
    assert directions(model)["cos"] == "both"


def test_tensors_of_step_are_freed() -> None:
    class Keeping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    model = track_scales(Keeping())
    alive = []
    for _ in range(3):
        result = model(torch.randn(4, requires_grad=True))
        result.sum().backward()
        alive.append(weakref.ref(result))
    del result
    gc.collect()
    assert [one() for one in alive] == [None] * 3


def test_copied_and_twice_tracked_modules() -> None:
    plain = nn.Linear(4, 3)
    model = track_scales(track_scales(plain))
    assert model.weight is not plain.weight
    model(torch.randn(5, 4)).sum().backward()
    assert len(metrics(model)) == 4
    other = copy.deepcopy(model)
    assert len(other.scales_graph().nodes) == 0
    other(torch.randn(5, 4))
    assert set(directions(other).values()) == {"fwd"}
    assert set(directions(model).values()) == {"both"}


def test_compiled_module_is_an_error() -> None:
    with pytest.raises(ValueError, match="compiled already"):
        track_scales(torch.compile(nn.Linear(2, 2)))


def test_error_in_step_keeps_last_graph() -> None:
    class Failing(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("no")
            return x.exp()

    model = track_scales(Failing())
    model(torch.ones(3))
    model.fails = True
    with pytest.raises(KeyError):
        model(torch.ones(4))
    found = metrics(model)["exp"]
    assert found is not None and found.fwd.numel == 3


def test_with_lossless_unit_scaling_in_either_order() -> None:
    plain = Call(
        lambda a, b, x: b(a(x).relu()).square().mean(), nn.Linear(64, 64), nn.Linear(64, 8)
    )
    x = torch.randn(32, 64) * 50
    wanted, reference = run(plain, x), track_scales(plain)
    run(reference, x)
    graphs = []
    for model in (
        track_scales(lossless_unit_scale(plain, x)),
        lossless_unit_scale(track_scales(plain), x),
    ):
        assert_same_bits(run(model, x), wanted)
        assert model.gauge()
        found = metrics(model)
        for name in ("parts.0.linear:input", "parts.0.linear:weight", "parts.1.linear:input"):
            one = found[name]
            assert one is not None and 0.5 < one.fwd.std < 2.0
        for name in ("parts.0.linear:stored", "parts.1.linear:stored"):
            one = found[name]
            assert one is not None and one.bwd is not None and 0.5 < one.bwd.std < 2.0
        truth = metrics(reference)
        assert all(repr(found[name]) == repr(truth[name]) for name in truth)  # some have NaN
        graphs.append(model.scales_graph().tabulate())
    assert graphs[0] == graphs[1]


def test_units_that_are_still_being_measured() -> None:
    """Without an initial loss, lossless unit scaling measures in the first real step."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(5, 8)
    model = track_scales(lossless_unit_scale(plain, x))
    for _ in range(2):
        assert_same_bits(run(model, x), run(plain, x))
        assert set(directions(model).values()) == {"both"}
        assert "0.linear" in directions(model)


def test_two_losses_with_a_backward_pass_each() -> None:
    """The losses share only parameters and inputs, as in a GAN."""

    def losses(a: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
        return a(x).sum(), 2 * a(x).tanh().sum()

    model = track_scales(Call(losses, nn.Linear(4, 3)))
    first, second = model(torch.randn(5, 4))
    first.backward()
    assert directions(model)["tanh"] == "fwd"
    assert directions(model)["parts.0.linear"] == "both"
    second.backward()
    assert set(directions(model).values()) == {"both"}
