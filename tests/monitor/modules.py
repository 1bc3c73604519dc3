"""Modules whose steps are hard to observe without changing them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from tests.callbacks.modules import Regression


class Small(Regression):
    """A ``Regression`` with what a step needs made in ``build``."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.build()

    def build(self) -> None:
        """Make submodules."""

    def hidden(self, x: Tensor) -> Tensor:
        """Between the two layers."""
        return F.gelu(self.first(x))


MODULES: dict[str, Callable[[], Small]] = {}


def odd(kind: type[Small]) -> type[Small]:
    MODULES[kind.__name__] = kind
    return kind


class Tagged(Tensor):
    """A batch that carries a note, as MONAI's do: every function hands it on."""

    note: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Tagged) and args and isinstance(args[0], Tagged):
            result.note = (args[0].note or 0) + 1
        return result


@odd
class Subclass(Small):
    def forward(self, x: Tensor) -> Tensor:
        tagged = x.as_subclass(Tagged)
        tagged.note = 1
        result = self.second(self.hidden(tagged * 2))
        assert isinstance(result, Tagged)
        self.log("note", float(result.note))
        return result.as_subclass(Tensor)


@odd
class Teacher(Small):
    """An average of the weights, written through ``.data``, that teaches."""

    def build(self) -> None:
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for average, one in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
            average.data.mul_(0.9).add_(one.data, alpha=0.1)
        with torch.no_grad():
            target = F.gelu(self.teacher(batch[0]))
        return self.loss(batch) + F.mse_loss(self.hidden(batch[0]), target)


@odd
class Codebook(Small):
    def build(self) -> None:
        self.register_buffer("codes", torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        nearest = torch.cdist(hidden.detach(), self.codes).argmin(1)
        found = F.embedding(nearest, self.codes)
        self.codes.data[nearest] = 0.9 * found + 0.1 * hidden.detach()
        return self.second(hidden + (found - hidden).detach())


@odd
class Views(Small):
    """Writes into views, and into tensors that have views."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        part = hidden[:, 2:5]
        hidden[:, 0] += 1.0
        part.mul_(2)
        hidden[:, 1] = hidden[:, 7].clone()
        hidden = hidden.clone()
        hidden.t()[3].add_(part[:, 0].detach())
        hidden.relu_()
        total = torch.empty(0)
        torch.add(x.detach(), 1, out=total)
        return self.second(hidden) + total.mean()


@odd
class Breaks(Small):
    """Prints, branches on values, leaves to NumPy, has metrics."""

    def build(self) -> None:
        self.register_buffer("matrix", torch.zeros(2, 2, dtype=torch.int64))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        scale = float(hidden.abs().max().item())
        self.seen.append(scale + float(hidden.detach().numpy().sum()))
        if scale > 0.1:
            hidden = hidden / scale
        result = self.second(hidden)
        classes = (result.detach() > 0).long()
        counted = torch.bincount(2 * classes[:, 0] + classes[:, 1], minlength=4)
        self.matrix += counted.reshape(2, 2)
        return torch.stack([row * (1 + i) for i, row in enumerate(result)])


class _Checkpointed(Small):
    options: ClassVar[dict[str, Any]] = {}

    def body(self, x: Tensor) -> Tensor:
        return self.dropout(self.hidden(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.body, x.clone().requires_grad_(), **self.options))


@odd
class Reentrant(_Checkpointed):
    options: ClassVar[dict[str, Any]] = {"use_reentrant": True}


@odd
class NonReentrant(_Checkpointed):
    options: ClassVar[dict[str, Any]] = {"use_reentrant": False}


def _keep_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@odd
class Selective(_Checkpointed):
    """Keeps every result by its order: one more operation would mix them up."""

    options: ClassVar[dict[str, Any]] = {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(_keep_all),
    }

    def body(self, x: Tensor) -> Tensor:
        # torch does not take a dropout here, whose mask is written in place.
        return self.hidden(x).sin()


@odd
class NestedReentrant(_Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            return self.second(checkpoint(self.body, x * 2, use_reentrant=True))

        return checkpoint(outer, x.clone().requires_grad_(), use_reentrant=True)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return (gradient * gate) @ weight.T + gradient * x * gate, x.T @ (gradient * gate)


@odd
class OwnFunction(Small):
    def build(self) -> None:
        self.mix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Swish.apply(self.first(x), self.mix))


@odd
class Penalty(Small):
    """A gradient of the input in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        result = self.forward(x)
        (slope,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        return F.mse_loss(result, batch[1]) + (slope.norm(2, dim=1) - 1).square().mean()


@odd
class Attack(Small):
    """A gradient of the input that is no part of the loss's graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(self.forward(x), batch[1]), x)
        return self.loss((x.detach() + 0.01 * slope.sign(), batch[1]))


@odd
class Functorch(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parameters = dict(self.second.named_parameters())

        def one(hidden: Tensor, target: Tensor) -> Tensor:
            result = torch.func.functional_call(self.second, parameters, (hidden,))
            return F.mse_loss(result, target)

        hidden = self.hidden(batch[0])
        losses = torch.func.vmap(one)(hidden, batch[1])
        slopes = torch.func.vmap(torch.func.grad(one))(hidden, batch[1])
        _, tangent = torch.func.jvp(lambda x: one(x, batch[1][0]), (hidden[0],), (hidden[1],))
        return losses.mean() + 0.1 * slopes.square().mean() + 0.1 * tangent


@odd
class ForwardDerivative(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(batch[0], torch.ones_like(batch[0]))
            result, tangent = forward_ad.unpack_dual(self.forward(dual))
            return F.mse_loss(result, batch[1]) + 0.1 * tangent.square().mean()


@odd
class Hooks(Small):
    """Hooks of every kind, some of which change what they see."""

    def build(self) -> None:
        self.first.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.first.register_forward_hook(lambda *args: args[2] + 1)
        self.second.register_full_backward_hook(lambda _, given, __: (given[0] * 0.5,))
        self.second.weight.register_hook(lambda gradient: gradient * 0.5)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        hidden.register_hook(lambda gradient: self.seen.append(float(gradient.sum())))
        hidden.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        hidden.retain_grad()
        return self.second(hidden)


@odd
class Lazy(Small):
    def build(self) -> None:
        self.lazy = nn.LazyLinear(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.hidden(x) + self.lazy(x))

    def configure_optimizers(self) -> Any:
        self.lazy(torch.zeros(1, 6))
        return super().configure_optimizers()


@odd
class Adversaries(Small):
    """Two optimizers, stepped by hand."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.critic = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        made = self.forward(batch[0])
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(-self.critic(made).mean(), retain_graph=True)
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        self.untoggle_optimizer(first)
        second.zero_grad()
        loss = self.critic(made.detach()).mean() - self.critic(batch[1]).mean()
        self.manual_backward(loss)
        second.step()
        self.log("critic", loss)

    def configure_optimizers(self) -> Any:
        model = [*self.first.parameters(), *self.second.parameters()]
        critic = torch.optim.RMSprop(self.critic.parameters(), lr=1e-2)
        return torch.optim.AdamW(model, lr=1e-2), critic


@odd
class ManualReentrant(_Checkpointed):
    options: ClassVar[dict[str, Any]] = {"use_reentrant": True}

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@odd
class Closures(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@odd
class FrozenEncoder(Small):
    """A module in evaluation, where torch uses one fused kernel for a layer."""

    def build(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.encoder.eval()
        with torch.no_grad():
            code = self.encoder(self.first(x)[None])[0]
        return self.second(self.hidden(x) + code)


@odd
class Encoder(Small):
    def build(self) -> None:
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        sequence = self.hidden(x)[None]
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        return self.second(self.encoder(sequence, src_mask=mask, is_causal=True)[0])


@odd
class Recurrent(Small):
    """Carries its state from step to step."""

    def build(self) -> None:
        self.memory = nn.LSTM(8, 8)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.memory(self.hidden(x)[:, None], self.state)
        self.state = tuple(one.detach() for one in state)
        return self.second(out[:, 0])


@odd
class Parametrized(Small):
    def build(self) -> None:
        parametrizations.weight_norm(self.first)
        parametrizations.spectral_norm(self.second)


@odd
class Packed(Small):
    def forward(self, x: Tensor) -> Tensor:
        def pack(one: Tensor) -> Any:
            return one.to(torch.float64) if one.is_floating_point() else one

        def unpack(one: Tensor) -> Any:
            return one.to(torch.float32) if one.is_floating_point() else one

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.second(self.hidden(x))


@odd
class Inference(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        with torch.inference_mode():
            self.log("error", (self.forward(batch[0]) - batch[1]).abs_().mean())
        return loss


@odd
class Autocast(Small):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.hidden(x)
            with torch.autocast("cpu", enabled=False):
                hidden = hidden.float() + self.first(x)
            return self.second(hidden).float()


@odd
class Tied(Small):
    def build(self) -> None:
        self.back = nn.Linear(8, 6, bias=False)
        self.back.weight = nn.Parameter(self.first.weight.detach().T.clone())
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.again(self.back(self.hidden(x))))


@odd
class Sparse(Small):
    def build(self) -> None:
        self.table = nn.Embedding(7, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.hidden(x) + self.table((x[:, 0] > 0).long()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@odd
class Complex(Small):
    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.hidden(x))
        return self.second(
            torch.fft.irfft(spectrum * spectrum.conj(), n=8).to(torch.float64).float()
        )


@odd
class Modes(Small):
    """Modes of the user's own around parts of the step."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"), FlopCounterMode(display=False) as counter:
            hidden = self.hidden(x) + torch.ones(8)
        self.log("flops", float(counter.get_total_flops()))
        return self.second(hidden)


@odd
class Copies(Small):
    """Copies, saves and loads in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        before = copy.deepcopy(self.second)
        file = io.BytesIO()
        torch.save({"weights": before.state_dict(), "hidden": self.hidden(batch[0]).detach()}, file)
        file.seek(0)
        hidden = torch.load(file)["hidden"]
        return loss + F.mse_loss(before(hidden).detach(), self.second(hidden) + 1)


@odd
class Threads(Small):
    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(self.hidden, x.chunk(2)))
        return self.second(torch.cat(parts))


@odd
class Skips(Small):
    """Returns a dictionary, or nothing at all."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else {"loss": self.loss(batch), "batch": batch_idx}


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@odd
class Named(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pair = Pair(*batch)
        x, y = torch.split(torch.cat(pair, 1), [6, 2], dim=1)
        return self.loss((x, y)) + 0 * sum(one.sum() for one in self.hidden(x))


@odd
class Script(Small):
    def build(self) -> None:
        with torch.no_grad():
            self.traced = torch.jit.trace(nn.Linear(8, 8), torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.traced(self.hidden(x)))


@odd
class Averages(Small):
    """Batch statistics, and another average, in buffers."""

    def build(self) -> None:
        self.batch_norm = nn.BatchNorm1d(8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.batch_norm(self.first(x))
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.second(hidden - self.average)
