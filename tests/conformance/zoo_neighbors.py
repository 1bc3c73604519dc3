"""Other features of torch in the step: scripts, traces, exports, threads, profilers, fakes."""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from tests.conformance.cases import Zoo, linear, noise, rows

zoo = Zoo("neighbors")
CASES = zoo.cases


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@zoo.step(a=linear(), b=lambda: torch.jit.script(_block()))
def a_scripted_block(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@zoo.step(a=linear(), b=lambda: torch.jit.trace(_block(), torch.randn(4, 8)))
def a_traced_block(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@zoo.step(a=linear(), b=lambda: fx.symbolic_trace(_block()))
def a_block_of_fx(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@zoo.step(a=linear(), b=lambda: torch.export.export(_block(), (torch.randn(4, 8),)).module())
def an_exported_block(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@torch.library.custom_op("conformance::scaled_matmul", mutates_args=())
def scaled_matmul(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    return (x @ weight.mT) * factor


@scaled_matmul.register_fake
def _(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep_for_backward(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.factor = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    return gradient @ weight * ctx.factor, gradient.mT @ x * ctx.factor, None


scaled_matmul.register_autograd(_backward, setup_context=_keep_for_backward)


@zoo.step()
def a_custom_operator(m: Any, x: Tensor) -> Tensor:
    return m.b(scaled_matmul(m.a(x), m.a.weight, 0.3))


@zoo.step()
def operators_by_name(m: Any, x: Tensor) -> Tensor:
    h = torch.ops.aten.addmm.default(m.a.bias, x, m.a.weight.t())
    return torch.ops.aten.linear(torch.ops.aten.mm(h, m.b.weight), m.b.weight, m.b.bias)


@zoo.step()
def a_fork_of_the_interpreter(m: Any, x: Tensor) -> Tensor:
    other = torch.jit.fork(m.a, x)
    return m.b(x) @ torch.jit.wait(other).mT


@zoo.step()
def matmuls_on_a_thread(m: Any, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return m.b(pool.submit(m.a, x).result())


@zoo.step()
def a_gradient_on_a_thread(m: Any, x: Tensor) -> Tensor:
    def gradient(y: Tensor) -> Tensor:
        y = y.clone().requires_grad_()
        return torch.autograd.grad(torch.tanh(m.a(y)).sum(), y)[0]

    with ThreadPoolExecutor(1) as pool:
        return m.b(pool.submit(gradient, x).result())


@zoo.step()
def meta_tensors(m: Any, x: Tensor) -> Tensor:
    shape = (torch.empty(4, 8, device="meta") @ torch.empty(8, 3, device="meta")).shape
    return m.b(m.a(x)) * shape[1]


@zoo.step()
def fake_tensors(m: Any, x: Tensor) -> Tensor:
    with FakeTensorMode():
        shape = (torch.empty(4, 8) @ torch.empty(8, 3)).shape
    return m.b(m.a(x)) * shape[1]


@zoo.step()
def flops_counted_by_the_user(m: Any, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        h = m.b(m.a(x))
    return h * counter.get_total_flops()


@zoo.step()
def profiled_by_the_user(m: Any, x: Tensor) -> Tensor:
    with profile(activities=[ProfilerActivity.CPU]), record_function("step"):
        return m.b(m.a(x))


@zoo.step(a=linear(8, 24), batches=rows(2, 5, 8))
def attention_by_the_kernel_that_the_user_names(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.a(x).unsqueeze(1).chunk(3, -1)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@zoo.step(a=linear(8, 24), b=linear(), batches=rows(2, 5, 8))
def flexible_attention_of_a_teacher(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        q, k, v = (part.unsqueeze(1) for part in m.a(x).chunk(3, -1))
        target = flex_attention(q, k, v, lambda score, b, h, i, j: score - 0.1 * (i - j).abs())
    return m.b(x) - target[:, 0]


class FastPath(nn.Module):
    """A teacher in evaluation, for which torch has an encoder layer in one kernel."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.teacher = nn.TransformerEncoder(layer, 2, **options).requires_grad_(False)
        self.student = nn.Linear(8, 8)

    def train(self, mode: bool = True) -> FastPath:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(5) > torch.tensor([[4], [2]])
        with torch.no_grad():
            target = self.teacher(x, src_key_padding_mask=padding)
        return self.student(x)[:, : target.shape[1]] - target


zoo.add("encoder_in_one_kernel", lambda: FastPath(enable_nested_tensor=False), rows(2, 5, 8))
zoo.add("encoder_of_nested_rows", lambda: FastPath(enable_nested_tensor=True), rows(2, 5, 8))


class Pickled(nn.Module):
    """A frozen copy of itself by way of bytes, once in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        buffer = io.BytesIO()
        torch.save(self.layer.state_dict(), buffer)
        buffer.seek(0)
        saved = torch.load(buffer)
        copied = pickle.loads(pickle.dumps(self.layer)).requires_grad_(False)
        return self.last(copied(x)) + F.linear(x, saved["weight"])


zoo.add("saved_and_loaded_in_the_step", Pickled)


@zoo.step()
def parameters_as_one_vector(m: Any, x: Tensor) -> Tensor:
    vector = nn.utils.parameters_to_vector(m.parameters()).detach().clamp(-0.3, 0.3)
    nn.utils.vector_to_parameters(vector, m.parameters())
    return m.b(m.a(x))


@zoo.step()
def gradients_clipped_in_the_step(m: Any, x: Tensor) -> Tensor:
    m.a(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(m.a.parameters(), 0.1)
    return m.b(m.a(x)) * norm.clamp(max=2.0)


@zoo.step(a=linear(), b=linear(), teacher=lambda: _block().requires_grad_(False))
def integer_kernels_of_a_teacher(m: Any, x: Tensor) -> Tensor:
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    with torch.no_grad():
        target = m.teacher(quantized.dequantize())
    return m.b(m.a(x)) - target


@zoo.step(a=linear(), b=linear())
def memory_of_another_library(m: Any, x: Tensor) -> Tensor:
    h = torch.from_dlpack(m.a(x).detach())
    h.mul_(0.5)
    return m.b(m.a(x)) + (h @ x.mT).mean()


@zoo.step()
def deterministic_algorithms(m: Any, x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    try:
        return m.b(torch.zeros(4, 8).index_add(0, torch.tensor([0, 0, 1, 1]), m.a(x)))
    finally:
        torch.use_deterministic_algorithms(False)


@zoo.step()
def many_threads(m: Any, x: Tensor) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return m.b(m.a(x))
    finally:
        torch.set_num_threads(before)


class CountsCalls(nn.Module):
    """A call that fails in the middle of a matmul's way, and is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.failures = 0

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.layer(noise(0, 4, 7))
        except RuntimeError:
            self.failures += 1
        return self.last(self.layer(x))


zoo.add("a_layer_that_fails_and_goes_on", CountsCalls)
