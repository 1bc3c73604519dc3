"""Several steps of many kinds: same bits and statistics as the untracked step."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_unitscale.transforms import lossless_unit_scale, track_scales, unit_scale
from tests.helpers import assert_same_bits, run
from tests.monitor.test_metrics import assert_close, expected
from tests.monitor.tracked import Call, metrics


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)))


class MomentumEncoder(Small):
    """A slow copy of a layer, written through ``.data`` or as one vector."""

    def __init__(self, as_vector: bool) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.a).requires_grad_(False)
        self.as_vector = as_vector

    def forward(self, x: Tensor) -> Tensor:
        if self.as_vector:
            slow, fast = map(parameters_to_vector, (self.slow.parameters(), self.a.parameters()))
            vector_to_parameters(0.9 * slow + 0.1 * fast.detach(), self.slow.parameters())
        else:
            for slow, fast in zip(self.slow.parameters(), self.a.parameters(), strict=True):
                slow.data = 0.9 * slow.data + 0.1 * fast.data
        return super().forward(x) + F.cosine_similarity(self.a(x), self.slow(x), -1)[:, None]


class Swapped(Small):
    """Runs on averaged weights, and puts its own back."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [one.detach() * 0.5 for one in self.a.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        own = [one.data for one in self.a.parameters()]
        for one, average in zip(self.a.parameters(), self.average, strict=True):
            one.data = average
        with torch.no_grad():
            target = super().forward(x)
        for one, data in zip(self.a.parameters(), own, strict=True):
            one.data = data
        return super().forward(x) - target


class DetachedView(Small):
    def forward(self, x: Tensor) -> Tensor:
        x.view(-1)[0] += 0.0
        h = self.a(x)
        head, tail = h.clone().split(4, -1)
        frozen = tail.clone()
        frozen.detach_()
        frozen.mul_(2)
        return self.b(torch.cat([head.mul(3), frozen.view(-1).view_as(tail)], -1))


class HookedParameter(Small):
    """Changes the gradient of a parameter by a method that is a hook."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(self.change)

    def change(self, gradient: Tensor) -> Tensor:
        return gradient * self.factor


@pytest.fixture(autouse=True)
def without_hooks_on_parameters(request: pytest.FixtureRequest) -> Iterator[None]:
    """A parameter whose hook is a method of its module: torch's C++ keeps both for good."""
    yield
    if "hooked parameter" in request.node.name:
        for module in [one for one in gc.get_objects() if type(one) is HookedParameter]:
            module.a.weight._backward_hooks = None


class Compiled(Small):
    def __init__(self) -> None:
        super().__init__()
        self.c = torch.compile(nn.Linear(6, 6), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.c(x) + self.c(x.tanh()))


@dataclass
class Output:
    loss: Tensor
    hidden: list[Tensor]


class ReturnsADataclass(Small):
    def forward(self, x: Tensor) -> Any:
        hidden = self.a(x)
        return Output(self.b(hidden).square().mean(), [hidden, x * 2])


class OwnThread(Small):
    """Has its gradients computed by a thread."""

    def forward(self, x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        energy = super().forward(leaf).square().sum()
        found: list[Tensor] = []
        one = threading.Thread(
            target=lambda: found.extend(torch.autograd.grad(energy, leaf, create_graph=True))
        )
        one.start()
        one.join()
        return found[0] + super().forward(x)


class Recursive(Small):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            return torch.cat([self(x[:2]), self(x[2:])])
        return super().forward(x)


class SharedBody(Small):
    """Several calls, a checkpoint, nested modules, and one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(self.a, nn.ReLU(), self.b), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.blocks[0](x)
        return self.blocks[1](checkpoint(super().forward, x, use_reentrant=False))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6, sparse=True)
        self.bag = nn.EmbeddingBag(5, 6, sparse=True, mode="sum")
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.argmax(-1) % 5
        weights = torch.eye(len(x)).to_sparse()
        return self.a(self.table(ids) + self.bag(ids[:, None])) + torch.sparse.mm(weights, x)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "momentum encoder": lambda: MomentumEncoder(False),
    "vector to parameters": lambda: MomentumEncoder(True),
    "swapped": Swapped,
    "detached view": DetachedView,
    "hooked parameter": HookedParameter,
    "compiled": Compiled,
    "dataclass": ReturnsADataclass,
    "thread": OwnThread,
    "recursive": Recursive,
    "shared": SharedBody,
    "sparse": Sparse,
}
WRAPS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "tracked": lambda module, x: track_scales(module),
    "in units, tracked": lambda module, x: track_scales(lossless_unit_scale(module, x)),
    "tracked, in units": lambda module, x: lossless_unit_scale(track_scales(module), x),
}


def _loss(output: Any) -> Tensor:
    if isinstance(output, Output):
        return output.loss + sum(one.square().mean() for one in output.hidden)
    return output.square().mean()


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_tracked_training_matches_plain_training(kind: str, wrap: str) -> None:
    torch.manual_seed(1)
    plain = KINDS[kind]()
    batches = [torch.randn(4, 6) * scale for scale in (3.0, 0.1, 20.0)]
    tracked = WRAPS[wrap](plain, batches[0])
    optimizers = [torch.optim.SGD(one.parameters(), 0.01) for one in (plain, tracked)]
    for batch in batches:
        results = []
        for module, optimizer in zip((plain, tracked), optimizers, strict=True):
            optimizer.zero_grad()
            given = batch.clone()
            loss = _loss(module(given))
            loss.backward()
            results.append((loss, {n: _dense(p.grad) for n, p in module.named_parameters()}))
            assert not given.requires_grad
        assert_same_bits(
            *[(loss, {k: _dense(g) for k, g in some.items()}) for loss, some in results]
        )
        found = metrics(tracked)
        for name, gradient in results[0][1].items():
            if gradient is not None and name in found and kind != "sparse":
                one = found[name]
                assert one is not None
                assert_close(one.bwd, expected(gradient))
        assert found["a.linear"] is not None
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(tracked.state_dict(), plain.state_dict())


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or not gradient.is_sparse else gradient.to_dense()


def test_tracked_module_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="Small: its scales are tracked"):
        pickle.dumps(track_scales(Small()))


def test_partly_known_input_gradient_is_left_out() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * gradient, gradient

    def through(*, function: bool, transform: bool, cell: bool) -> Any:
        def step(a: nn.Linear, c: nn.LSTMCell, x: Tensor) -> Tensor:
            total = a(x).sum()
            if function:
                total = total + Double.apply(x, a.weight[0]).sum()
            if transform:
                total = total + torch.vmap(lambda one: one @ a.weight[0])(x).sum()
            return total + sum(one.sum() for one in c(x)) if cell else total

        return step

    kinds = dict(function=False, transform=False, cell=False)
    for kind in (None, *kinds):
        step = through(**{**kinds, **({kind: True} if kind else {})})
        module = track_scales(Call(step, nn.Linear(6, 6), nn.LSTMCell(6, 3)))
        module(torch.randn(4, 6)).backward()
        found = metrics(module)["input.args_0"]
        assert found is not None
        assert (found.bwd is None) == (kind is not None), kind


def test_input_gradient_passes_writes_and_dropout() -> None:
    def step(a: nn.Linear, x: Tensor) -> Tensor:
        x = x * 2
        x += 1
        x[:, 0] = x[:, 1]
        h = F.dropout(x, 0.5)
        h.relu_()
        return (a(h) * h[:, :1]).square().sum()

    plain, x = Call(step, nn.Linear(6, 6)), torch.randn(8, 6)
    tracked = track_scales(plain)
    assert_same_bits(run(tracked, x), run(plain, x))
    asking = x.clone().requires_grad_()
    run(plain, asking)
    torch.manual_seed(3)
    plain(asking).backward()
    found = metrics(tracked)["input.args_0"]
    assert found is not None and asking.grad is not None
    assert_close(found.bwd, expected(asking.grad))


def test_failed_backward_pass_does_not_affect_next() -> None:
    def fail(gradient: Tensor) -> None:
        raise LookupError("on purpose")

    plain = Call(lambda a, b, x: b(x) + a(x), nn.Linear(6, 6), nn.Linear(6, 6))
    module: Any = track_scales(plain)
    loss = module(torch.randn(4, 6)).sum()
    handle = module.parts[0].weight.register_hook(fail)
    with pytest.raises(LookupError):
        loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()
    found = metrics(module)["input.args_0"]
    assert found is not None
    weights = sum(one.weight.detach().sum(0) for one in module.parts)
    assert_close(found.bwd, expected(torch.as_tensor(weights).expand(4, 6)))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_around_tracked_module(use_reentrant: bool) -> None:
    plain = Small()
    tracked, x = track_scales(plain), torch.randn(4, 6)
    gradients = []
    for module in (plain, tracked):
        given = x.clone().requires_grad_()
        checkpoint(module, given, use_reentrant=use_reentrant).square().sum().backward()
        gradients.append([given.grad, *(one.grad for one in module.parameters())])
    assert_same_bits(*gradients)
    found = metrics(tracked)
    for name, one in plain.named_parameters():
        number = found[name]
        assert number is not None and one.grad is not None
        assert_close(number.bwd, expected(one.grad))


@pytest.mark.parametrize("is_first", [True, False])
def test_tracking_composes_with_rules(is_first: bool) -> None:
    plain, x = Call(lambda one, x: one(x).square().mean(), Small()), torch.randn(4, 6)
    scaled = unit_scale(plain)
    module = track_scales(scaled) if is_first else unit_scale(track_scales(plain))
    wanted = run(scaled, x)
    assert_same_bits(run(module, x), wanted)
    found = metrics(module)
    assert found["parts.0.a.linear"] is not None
    for name, one in scaled.named_parameters():
        number = found[name]
        assert number is not None and number.bwd is not None
        assert_close(number.fwd, expected(one))
    assert "track scales" in module.explain()


def test_reentrant_checkpoint_restores_torch() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x.tanh(), use_reentrant=True).sum()

    before = CheckpointFunction.forward, CheckpointFunction.backward
    tracked = track_scales(Checkpointed())
    loss = tracked(torch.randn(3, 4, requires_grad=True))
    assert (CheckpointFunction.forward, CheckpointFunction.backward) == before
    loss.backward()
    names = {node.meta["tensor_name"]: node for node in tracked.scales_graph().nodes}  # type: ignore[operator]
    assert names["layer.linear"].meta["metrics"].bwd is not None
    assert (CheckpointFunction.forward, CheckpointFunction.backward) == before
