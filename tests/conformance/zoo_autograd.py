"""Autograd: custom functions, checkpoints, saved tensors, hooks, gradients off and on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.conformance.cases import Zoo, each, linear, noise, rows

zoo = Zoo("autograd")
CASES = zoo.cases


class OwnMatmul(torch.autograd.Function):
    """A matmul with its own matmuls in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.mT @ x


class NewStyle(torch.autograd.Function):
    """The same, with ``setup_context``."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.mT @ x


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_non_differentiable(x > 0)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1.0, 1.0)


class Recomputing(torch.autograd.Function):
    """Runs its layer again in the backward pass, with separate gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.gelu(x @ weight.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = F.gelu(x @ weight.mT)
        return torch.autograd.grad(y, (x, weight), gradient)


class InPlaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2.0


@zoo.step()
def own_matmul(m: Any, x: Tensor) -> Tensor:
    return m.b(OwnMatmul.apply(m.a(x), m.a.weight))


@zoo.step(rows(4, 8, grad=True))
def own_matmul_of_new_style(m: Any, x: Tensor) -> Tensor:
    return m.b(NewStyle.apply(x, m.a.weight))


@zoo.step()
def reversed_gradient(m: Any, x: Tensor) -> Tensor:
    return m.b(Reversal.apply(m.a(x), 0.3))


@zoo.step()
def straight_through(m: Any, x: Tensor) -> Tensor:
    return m.b(StraightThrough.apply(m.a(x)))


@zoo.step()
def recomputing_function(m: Any, x: Tensor) -> Tensor:
    return m.b(Recomputing.apply(m.a(x), m.a.weight))


@zoo.step()
def function_that_writes(m: Any, x: Tensor) -> Tensor:
    return m.b(InPlaceFunction.apply(m.a(x)))


def _checkpointed(reentrant: bool) -> None:
    kind = "reentrant" if reentrant else "recomputed"

    def region(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.b(checkpoint(lambda y: F.dropout(m.b(F.gelu(y)), 0.2), h, use_reentrant=reentrant))

    def shared(m: Any, x: Tensor) -> Tensor:
        def block(y: Tensor) -> Tensor:
            return m.a(torch.tanh(m.a(y))) + m.b(y)

        h = m.a(x)
        for _ in range(3):
            h = checkpoint(block, h, use_reentrant=reentrant)
        return h

    def nested(m: Any, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return F.gelu(m.b(y))

        def outer(y: Tensor) -> Tensor:
            return checkpoint(inner, m.a(y), use_reentrant=reentrant) @ m.a.weight

        return checkpoint(outer, m.a(x), use_reentrant=reentrant)

    def sequence(m: Any, x: Tensor) -> Tensor:
        layers = [m.a, nn.Tanh(), m.b, nn.Tanh()]
        return checkpoint_sequential(layers, 2, m.a(x), use_reentrant=reentrant)

    def with_an_attention(m: Any, x: Tensor) -> Tensor:
        def block(y: Tensor) -> Tensor:
            q = m.a(y).view(1, 2, 4, 4)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(4, 8)

        return m.b(checkpoint(block, m.b(x), use_reentrant=reentrant))

    for function in (region, shared, nested, sequence, with_an_attention):
        zoo.step(name=f"checkpoint_{function.__name__}_{kind}")(function)


_checkpointed(True)
_checkpointed(False)


@zoo.step()
def checkpoint_of_a_frozen_input(m: Any, x: Tensor) -> Tensor:
    return m.b(checkpoint(lambda y: torch.relu(m.a(y)), x, use_reentrant=False))


@zoo.step()
def saved_tensors_are_packed(m: Any, x: Tensor) -> Tensor:
    def pack(tensor: Tensor) -> tuple[Any, torch.device]:
        return tensor.detach().cpu().numpy().copy(), tensor.device

    with saved_tensors_hooks(pack, lambda packed: torch.from_numpy(packed[0]).to(packed[1])):
        return m.b(torch.tanh(m.a(x)))


@zoo.step()
def saved_tensors_are_rounded(m: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return m.b(torch.tanh(m.a(x)))


@zoo.step()
def saved_on_cpu(m: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return m.b(F.gelu(m.a(x)))


@zoo.step()
def tensor_hooks(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda gradient: gradient * 2.0)
    result = m.b(torch.tanh(h))
    result.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    return result


@zoo.step()
def gradients_are_retained(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.retain_grad()
    m.kept = [h]
    return m.b(torch.tanh(h))


class Hooked(nn.Module):
    """Hooks on modules, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.calls: list[str] = []
        self.sums: list[Tensor] = []
        self.first.register_forward_hook(self._after)
        self.second.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.second.register_full_backward_hook(self._backward)
        self.last.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2.0,))
        self.last.register_forward_hook(
            lambda module, args, kwargs, output: output + args[0].mean(), with_kwargs=True
        )

    def _after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls.append("first")
        return output.clamp(-5.0, 5.0)

    def _backward(self, module: nn.Module, grads_in: Any, grads_out: Any) -> Any:
        self.sums.append(grads_out[0].sum())
        return tuple(None if g is None else g * 3.0 for g in grads_in)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.first(x))))


zoo.add("module_hooks", Hooked)


class Accumulated(nn.Module):
    """Hooks on parameters, before and after their gradients are accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norms: list[Tensor] = []
        self.layer.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 1.0))
        self.layer.bias.register_post_accumulate_grad_hook(
            lambda param: self.norms.append(param.grad.norm())
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.layer(x).mT


zoo.add("parameter_hooks", Accumulated)


@zoo.step()
def no_grad_teacher(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.a(x)
    return m.b(x) - target


@torch.inference_mode()
def _statistics(layer: nn.Module, x: Tensor) -> float:
    return float(layer(x).abs().mean())


@zoo.step()
def inference_mode_in_a_helper(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)) / (1.0 + _statistics(m.a, x))


@zoo.step()
def inference_tensors_are_cloned(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        target = m.a(x)
    return m.b(x) - target.clone()


@zoo.step()
def gradients_switched_off_and_on(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x)
        with torch.enable_grad():
            h = m.b(h)
    with torch.set_grad_enabled(bool(x.sum() > 1e9)):
        other = m.a(x)
    return h + other


@zoo.step()
def detect_anomaly(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.set_detect_anomaly(True):
        return m.b(m.a(x))


@zoo.step()
def an_output_that_is_not_used(m: Any, x: Tensor) -> Tensor:
    m.a(x) @ x.mT
    return m.b(x)


@zoo.step(a=linear(), b=linear(), unused=linear())
def parameters_that_are_not_used(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8).requires_grad_(False)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8).requires_grad_(False)
        self.last.bias.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(self.first(x))))


zoo.add("frozen_layers", Frozen)


@zoo.step(each(lambda i: (noise(i, 4, 8), i)))
def layers_thaw(m: Any, x: Tensor, index: int) -> Tensor:
    m.a.requires_grad_(index > 0)
    return m.b(m.a(x))


class SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.y = x.exp()
        return ctx.y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.y


@zoo.step()
def function_that_keeps_its_output(m: Any, x: Tensor) -> Tensor:
    return m.b(SavesItsOutput.apply(-m.a(x).abs()))
