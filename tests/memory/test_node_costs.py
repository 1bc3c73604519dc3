"""Fields of single nodes, against counting by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.profiler import GraphProfile, NodeCosts, profile_graph
from tests.memory.networks import Step
from tests.memory.oracles import measured_saved, sum_of


def _costs(profile: GraphProfile, op: str) -> NodeCosts:
    (found,) = [node for node in profile.nodes if node.op == op]
    return found


def test_multilayer_perceptron_by_hand() -> None:
    rows, narrow, wide = 32, 64, 256
    module = nn.Sequential(nn.Linear(narrow, wide), nn.ReLU(), nn.Linear(wide, narrow))
    profile = profile_graph(module, torch.randn(rows, narrow), loss=lambda y: y.sum())
    first, relu, second, loss = profile.nodes
    assert [node.name for node in profile.nodes] == ["0.linear", "1.relu", "2.linear", "sum"]
    assert first.inputs == ("input[0]", "0.weight", "0.bias")
    # The input is saved; the first layer's own weight is not, since the input needs no gradient.
    assert first.save_fwd_in == ("input[0]",)
    assert (first.fwd_mem_in, first.fwd_mem_out) == (4 * rows * narrow, 4 * rows * wide)
    assert first.fwd_flops == first.bwd_flops == 2 * rows * narrow * wide
    assert first.param_grad_bytes == 4 * (narrow * wide + wide)
    assert first.bwd_mem_out == 0
    # ReLU saves its result, which the second layer has saved too: counted once.
    assert (relu.saved_bytes, relu.fwd_mem_in) == (4 * rows * wide, 0)
    assert second.save_fwd_in == ("1.relu", "2.weight")
    assert second.saved_bytes == 0
    assert second.bwd_flops == 2 * second.fwd_flops
    assert second.bwd_mem_out == 4 * rows * wide
    assert loss.saved_bytes == 0
    assert profile.saved_bytes == 4 * rows * (narrow + wide)
    assert profile.parameter_bytes == profile.gradient_bytes
    assert first.fwd_bytes_moved == 4 * (rows * narrow + wide * narrow + wide + rows * wide)


def test_module_costs_are_sums_of_nodes() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2))
    profile = profile_graph(module, torch.randn(3, 4))
    by_path = {costs.path: costs for costs in profile.modules}
    assert set(by_path) == {"", "0", "0.0", "0.1", "1"}
    root = by_path[""]
    assert root.fwd_flops == profile.fwd_flops
    assert root.saved_bytes == profile.saved_bytes
    assert root.num_nodes == by_path["0"].num_nodes + by_path["1"].num_nodes == 3
    assert by_path["0"].parameter_bytes == 4 * (32 + 8)


def test_shared_attention_input_is_saved_once() -> None:
    mha = nn.MultiheadAttention(32, 4, kdim=32, vdim=32)
    mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight = (
        nn.Parameter(torch.randn(32, 32)) for _ in range(3)
    )
    mha._qkv_same_embed_dim = False  # three matmuls of one input
    module = Step(lambda m, x: m(x, x, x, need_weights=False)[0], mha)
    given = torch.randn(5, 2, 32)
    profile = profile_graph(module, given)
    assert profile.saved_bytes == measured_saved(module, given)
    readers = [node for node in profile.nodes if "input[0]" in node.save_fwd_in]
    assert [node.fwd_mem_in for node in readers] == [4 * given.numel(), 0, 0]


def test_saved_view_keeps_whole_storage() -> None:
    base = torch.randn(100, 8)
    module = Step(lambda linear, x: linear(x[:1]), nn.Linear(8, 4))
    profile = profile_graph(module, base)
    assert _costs(profile, "getitem").fwd_mem_out == 0
    assert _costs(profile, "linear").fwd_mem_in == 4 * 800  # and not the 32 bytes that it reads
    # An input that is a slice is as large as what it was cut from.
    assert profile_graph(nn.Linear(8, 4), base[:1]).input_bytes == 4 * 800


def test_inputs_with_shared_storage_count_once() -> None:
    base = torch.randn(100, 8)
    module = Step(lambda linear, x, y: linear(x).sum() + linear(y).sum(), nn.Linear(8, 4))
    profile = profile_graph(module, base[:50], base[50:])
    assert profile.input_bytes == 4 * 800
    assert profile.saved_bytes == 4 * 800


def test_dropout_mask_size_depends_on_device() -> None:
    module, given = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1)), torch.randn(32, 8)
    on_cpu = _costs(profile_graph(module, given, device="cpu"), "dropout")
    on_gpu = _costs(profile_graph(module, given, device="cuda"), "dropout")
    assert on_cpu.saved_bytes == on_cpu.fwd_mem_tmp == 4 * 32 * 64  # the scaled mask
    assert on_gpu.saved_bytes == on_gpu.fwd_mem_tmp == 32 * 64  # booleans
    assert on_cpu.fwd_mem_out == on_gpu.fwd_mem_out == 4 * 32 * 64
    quiet = _costs(profile_graph(module.eval(), given), "dropout")
    assert quiet.saved_bytes == quiet.fwd_mem_out == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_softmax_and_layer_norm(device: str) -> None:
    module = Step(lambda norm, x: norm(x * 2).softmax(-1), nn.LayerNorm(16))
    profile = profile_graph(module, torch.randn(32, 16), device=device)
    softmax, norm = _costs(profile, "softmax"), _costs(profile, "layer_norm")
    assert softmax.saved_bytes == 4 * 32 * 16  # its result, not its input
    assert softmax.save_fwd_in == ()
    assert norm.saved_bytes == 4 * 32 * 16 + 2 * 4 * 32  # its input, mean and inverse deviation
    assert norm.save_fwd_in == ("mul", "layer0.weight", "layer0.bias")


def test_in_place_operations_allocate_nothing() -> None:
    module = Step(lambda linear, x: linear(x).mul_(2).relu_(), nn.Linear(8, 16))
    profile = profile_graph(module, torch.randn(4, 8))
    assert _costs(profile, "mul").fwd_mem_out == 0
    relu = _costs(profile, "relu")
    assert (relu.fwd_mem_out, relu.saved_bytes) == (0, 4 * 4 * 16)


def test_autocast_dtypes_depend_on_device() -> None:
    def forward(linear: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return norm(linear(x))

    module = Step(forward, nn.Linear(8, 16), nn.LayerNorm(16))
    types = {
        device: [
            node.dtype for node in profile_graph(module, torch.ones(4, 8), device=device).nodes
        ]
        for device in ("cpu", "cuda")
    }
    assert types == {"cpu": ["bfloat16", "bfloat16"], "cuda": ["bfloat16", "float32"]}


def test_loss_under_cuda_autocast() -> None:
    """It keeps the softmax's logarithms as they come, and a copy of them in FP32 to sum."""

    def forward(x: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(x, target)

    given = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(8, dtype=torch.long)
    profile = profile_graph(Step(forward), given, target, device="cuda")
    node = _costs(profile, "cross_entropy")
    # The target, its total weight, and the logarithms in both types.
    assert node.saved_bytes == 8 * 8 + 4 + 8 * 32 * (2 + 4)
    with_float = profile_graph(Step(forward), given.detach().float(), target, device="cuda")
    assert _costs(with_float, "cross_entropy").dtype == "float32"


def test_sum_under_cuda_autocast_has_no_cast_copy() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return x.sum(0) + x.sum(0, dtype=torch.bfloat16)

    profile = profile_graph(Step(forward), torch.randn(8, 32).bfloat16(), device="cuda")
    nodes = [node for node in profile.nodes if node.op == "sum"]
    assert [node.dtype for node in nodes] == ["float32", "bfloat16"]
    assert [node.fwd_mem_tmp for node in nodes] == [0, 0]


def test_positional_arguments_under_cuda_autocast() -> None:
    def forward(x: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            x = torch.softmax(x, 1, None) + F.log_softmax(x, 1, 3, None) + x.softmax(1, None)
            options = (None, None, -100, None, "sum", 0.1)
            return F.cross_entropy(x, target, *options) + F.cross_entropy(x, target, *options[:5])

    given = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    profile = profile_graph(
        Step(forward), given, torch.zeros(8, dtype=torch.long), device="cuda:h100"
    )
    assert {node.dtype for node in profile.nodes if "softmax" in node.op} == {"float32"}


def test_attention_kernel_depends_on_device() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Tensor:
        q = linear(x).view(2, 64, 4, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)

    module = Step(forward, nn.Linear(64, 64)).bfloat16()
    given = torch.randn(2, 64, 64).bfloat16()
    scores = 2 * 2 * 4 * 64 * 64  # BF16
    on_cpu = _costs(profile_graph(module, given), "scaled_dot_product_attention")
    on_gpu = _costs(profile_graph(module, given, device="cuda"), "scaled_dot_product_attention")
    # With dropout the CPU has no fused kernel: it keeps the scores, a GPU a number per row.
    assert on_cpu.saved_bytes > scores
    assert on_gpu.saved_bytes < scores
    assert on_gpu.fwd_flops == on_cpu.fwd_flops


def test_checkpoint_recomputation_counts_as_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    def forward(linear: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda y: linear(y).exp(), x * 2, use_reentrant=False)

    module, given = Step(forward, nn.Linear(8, 8)), torch.randn(16, 8)
    for device in ("cpu", "cuda"):
        profile = profile_graph(module, given, device=device, loss=sum_of)
        assert _costs(profile, "exp").saved_bytes == 0
        assert profile.fwd_flops == 2 * 16 * 8 * 8
        assert profile.bwd_flops == 2 * profile.fwd_flops  # again, and the weight's gradient


def test_custom_autograd_function_saves_its_tensors() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.saved_tensors[0]

    module = Step(lambda linear, x: Square.apply(linear(x)), nn.Linear(8, 8))
    given = torch.randn(4, 8)
    assert profile_graph(module, given).saved_bytes == measured_saved(module, given)


def test_names_are_unique_and_follow_the_modules() -> None:
    block = nn.Linear(8, 8)
    module = Step(lambda a, x: a(a(x)) + 1 - x, block)
    names = [node.name for node in profile_graph(module, torch.randn(2, 8)).nodes]
    assert names == ["layer0.linear", "layer0.linear_1", "add", "sub"]
