"""Every layer of torch.nn that has a matmul, in its usual and its less usual forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conformance.cases import Batches, Zoo, each, noise, rows

zoo = Zoo("layers")
CASES = zoo.cases

SEQUENCE = each(lambda index: (noise(index, 5, 2, 8) / 10,))

for _kind in (nn.RNN, nn.LSTM, nn.GRU):
    _name = _kind.__name__.lower()
    zoo.add(_name, lambda kind=_kind: kind(8, 8), SEQUENCE)
    zoo.add(
        f"{_name}_deep_and_bidirectional",
        lambda kind=_kind: kind(
            8, 6, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True
        ),
        SEQUENCE,
    )
    zoo.add(f"{_name}_of_one_sequence", lambda kind=_kind: kind(8, 4, bias=False), rows(5, 8))

zoo.add("rnn_relu", lambda: nn.RNN(8, 8, nonlinearity="relu"), SEQUENCE)
zoo.add("lstm_with_a_projection", lambda: nn.LSTM(8, 8, proj_size=4), SEQUENCE)
zoo.add("rnn_cell", lambda: nn.RNNCell(8, 8))
zoo.add("lstm_cell", lambda: nn.LSTMCell(8, 8))
zoo.add("gru_cell", lambda: nn.GRUCell(8, 8))


@zoo.step(SEQUENCE, a=lambda: nn.LSTM(8, 8), b=lambda: nn.Linear(8, 8))
def lstm_of_packed_sequences(m: Any, x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3], device="cpu"))
    out, _ = nn.utils.rnn.pad_packed_sequence(m.a(packed)[0])
    return m.b(out)


@zoo.step(SEQUENCE, a=lambda: nn.GRU(8, 8), b=lambda: nn.Linear(8, 8))
def gru_that_carries_its_state(m: Any, x: Tensor) -> Tensor:
    out, m.state = m.a(x, getattr(m, "state", None))
    m.state = m.state.detach()
    return m.b(out)


def _attention(**options: Any) -> Any:
    return lambda: nn.MultiheadAttention(8, 2, **options)


def _three(index: int) -> tuple[Tensor, Tensor, Tensor]:
    # Not so large that weights of attention underflow, which is a case among the numbers.
    return noise(index, 5, 2, 8) / 10, noise(index, 4, 2, 8) / 10, noise(index, 4, 2, 8) / 10


zoo.add("multi_head_attention", _attention(), each(_three))
zoo.add(
    "multi_head_attention_of_itself",
    _attention(batch_first=True),
    each(lambda i: (noise(i, 2, 5, 8) / 10,) * 3),
)
zoo.add("multi_head_attention_dropout", _attention(dropout=0.3), each(_three))
zoo.add(
    "multi_head_attention_extra_keys",
    _attention(add_bias_kv=True, add_zero_attn=True),
    each(_three),
)
zoo.add(
    "multi_head_attention_other_widths",
    _attention(kdim=6, vdim=4, bias=False),
    each(lambda i: (noise(i, 5, 2, 8), noise(i, 4, 2, 6), noise(i, 4, 2, 4))),
)


@zoo.step(each(_three), a=_attention())
def multi_head_attention_without_weights(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    padding = torch.tensor([[False, False, False, True], [False, False, True, True]])
    return m.a(q, k, v, key_padding_mask=padding, need_weights=False)[0]


@zoo.step(rows(5, 2, 8), a=_attention())
def multi_head_attention_causal(m: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return m.a(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


@zoo.step(rows(5, 2, 8), a=_attention())
def multi_head_attention_each_head_its_mask(m: Any, x: Tensor) -> Any:
    mask = torch.ones(4, 5, 5, dtype=torch.bool).triu(1)
    return m.a(x, x, x, attn_mask=mask, average_attn_weights=False)


def _encoder(**options: Any) -> Any:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, **{"dropout": 0.1, **options})
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    return make


def _masked(kind: str) -> Any:
    floats = nn.Transformer.generate_square_subsequent_mask(5)
    return floats if kind == "float" else floats < 0


zoo.add("encoder", _encoder(), SEQUENCE)
zoo.add("encoder_norm_first", _encoder(norm_first=True, activation="gelu"), SEQUENCE)
zoo.add("encoder_without_bias_or_dropout", _encoder(bias=False, dropout=0.0), SEQUENCE)
zoo.add("encoder_batch_first", _encoder(batch_first=True), rows(2, 5, 8))
for _kind in ("float", "bool"):
    zoo.step(SEQUENCE, name=f"encoder_{_kind}_mask", a=_encoder())(
        lambda m, x, kind=_kind: m.a(x, mask=_masked(kind))
    )


@zoo.step(SEQUENCE, a=_encoder())
def encoder_causal_hint(m: Any, x: Tensor) -> Tensor:
    return m.a(x, mask=_masked("float"), is_causal=True)


@zoo.step(rows(2, 5, 8), a=_encoder(batch_first=True))
def encoder_padding(m: Any, x: Tensor) -> Tensor:
    padding = torch.arange(5) > torch.tensor([[4], [2]])
    return m.a(x, src_key_padding_mask=padding)


@zoo.step(
    each(lambda i: (noise(i, 5, 2, 8) / 10, noise(i, 4, 2, 8) / 10)),
    a=lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.1), 2),
)
def decoder_causal(m: Any, x: Tensor, memory: Tensor) -> Tensor:
    return m.a(x, memory, tgt_mask=_masked("float"), tgt_is_causal=True)


@zoo.step(
    each(lambda i: (noise(i, 5, 2, 8) / 10, noise(i, 4, 2, 8) / 10)),
    a=lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.1), 1),
)
def decoder_bool_mask(m: Any, x: Tensor, memory: Tensor) -> Tensor:
    return m.a(x, memory, tgt_mask=_masked("bool"))


@zoo.step(
    each(lambda i: (noise(i, 4, 2, 8) / 10, noise(i, 5, 2, 8) / 10)),
    a=lambda: nn.Transformer(8, 2, 1, 1, 16),
)
def transformer_whole(m: Any, source: Tensor, target: Tensor) -> Tensor:
    return m.a(source, target, tgt_mask=_masked("float"))


def _scaled(name: str, mask: Callable[[], Tensor | None] = lambda: None, **options: Any) -> None:
    layers = {"a": lambda: nn.Linear(8, 24), "b": lambda: nn.Linear(8, 8)}

    @zoo.step(rows(2, 5, 8), name=f"attention_{name}", **layers)
    def attention(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.a(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, mask(), **options)
        return m.b(h.transpose(1, 2).flatten(2))


_scaled("plain")
_scaled("causal", is_causal=True)
_scaled("with_a_scale", scale=0.3)
_scaled("float_mask", lambda: torch.linspace(-2.0, 1.0, 25).view(5, 5))
_scaled("bool_mask", lambda: torch.ones(5, 5).tril().bool())
_scaled("dropout", dropout_p=0.2)


@zoo.step(rows(2, 5, 8), a=lambda: nn.Linear(8, 24))
def attention_with_grouped_queries(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).unflatten(-1, (12, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(h[:, :8], h[:, 8:10], h[:, 10:], enable_gqa=True)


@zoo.step(rows(2, 5, 8), a=lambda: nn.Linear(8, 24), bias=lambda: nn.Parameter(torch.zeros(5, 5)))
def attention_with_a_learned_bias(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.a(x).unsqueeze(1).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias)


CONVOLUTIONS: dict[str, tuple[Any, Batches]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), rows(2, 4, 9)),
    "conv1d_of_one_sample": (lambda: nn.Conv1d(4, 6, 3), rows(4, 9)),
    "conv1d_causal": (lambda: nn.Conv1d(4, 4, 3, padding=4, dilation=2), rows(2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), rows(2, 3, 7, 7)),
    "conv2d_strided": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), rows(2, 3, 7, 7)),
    "conv2d_dilated": (lambda: nn.Conv2d(3, 4, 3, dilation=2, bias=False), rows(2, 3, 7, 7)),
    "conv2d_grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), rows(2, 4, 7, 7)),
    "conv2d_depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), rows(2, 4, 7, 7)),
    "conv2d_pointwise": (lambda: nn.Conv2d(4, 8, 1), rows(2, 4, 7, 7)),
    "conv2d_same": (lambda: nn.Conv2d(3, 4, (2, 3), padding="same"), rows(2, 3, 6, 6)),
    "conv2d_reflect": (
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        rows(2, 3, 6, 6),
    ),
    "conv2d_circular": (
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        rows(2, 3, 6, 6),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=2), rows(1, 2, 4, 4, 4)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), rows(2, 4, 5)),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, padding=1),
        rows(2, 4, 5, 5),
    ),
    "conv_transpose2d_grouped": (
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2),
        rows(2, 4, 5, 5),
    ),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), rows(1, 2, 3, 3, 3)),
}
for _name, (_make, _batches) in CONVOLUTIONS.items():
    zoo.add(_name, _make, _batches)


@zoo.step(rows(2, 3, 6, 6), a=lambda: nn.Conv2d(3, 8, 3), b=lambda: nn.Linear(8, 4))
def conv2d_channels_last(m: Any, x: Tensor) -> Tensor:
    h = m.a(x.to(memory_format=torch.channels_last))
    return m.b(F.adaptive_avg_pool2d(torch.relu(h), 1).flatten(1))


@zoo.step(rows(7, 2, 4), a=lambda: nn.Parameter(torch.randn(3, 4, 5)), b=lambda: torch.ones(5))
def conv_tbc(m: Any, x: Tensor) -> Tensor:
    return torch.conv_tbc(x, m.a, m.b)


@zoo.step(rows(2, 3, 6, 6), a=lambda: nn.Linear(12, 5))
def unfold_and_fold(m: Any, x: Tensor) -> Tensor:
    patches = m.a(F.unfold(x, 2).mT)
    return F.fold(patches[..., :4].mT, (6, 6), 2)


zoo.add("linear_without_bias", lambda: nn.Linear(8, 4, bias=False))
zoo.add("linear_of_a_vector", lambda: nn.Linear(8, 4), rows(8))
zoo.add("linear_of_many_dimensions", lambda: nn.Linear(8, 4), rows(2, 3, 2, 8))
zoo.add("bilinear", lambda: nn.Bilinear(8, 6, 4), each(lambda i: (noise(i, 4, 8), noise(i, 4, 6))))


def _tokens(*shape: int) -> Batches:
    return each(lambda index: (torch.randint(0, 9, shape),))


@zoo.step(_tokens(2, 6), a=lambda: nn.Embedding(9, 8, padding_idx=0))
def embedding_tied_to_the_readout(m: Any, tokens: Tensor) -> Tensor:
    return F.linear(m.a(tokens), m.a.weight)


@zoo.step(
    _tokens(3, 4),
    a=lambda: nn.EmbeddingBag(9, 8, mode="mean"),
    b=lambda: nn.Linear(8, 4),
)
def embedding_bag(m: Any, tokens: Tensor) -> Tensor:
    return m.b(m.a(tokens))


@zoo.step(
    _tokens(3, 4),
    a=lambda: nn.Embedding(9, 8, sparse=True),
    b=lambda: nn.Linear(8, 4),
)
def embedding_with_sparse_gradients(m: Any, tokens: Tensor) -> Tensor:
    return m.b(m.a(tokens))


@zoo.step(
    _tokens(3, 4),
    a=lambda: nn.Embedding(9, 8, max_norm=0.5, scale_grad_by_freq=True),
    b=lambda: nn.Linear(8, 4),
)
def embedding_with_a_largest_norm(m: Any, tokens: Tensor) -> Tensor:
    return m.b(m.a(tokens))


class Softmaxes(nn.Module):
    """A readout with an adaptive softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8])

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(self.layer(x), torch.tensor([0, 5, 9, 11])).loss


zoo.add("adaptive_softmax", Softmaxes)

OPERATIONS = {
    "einsum": lambda m, x: torch.einsum("bi,oi,bo->o", x, m.a.weight, m.b(x)),
    "tensordot": lambda m, x: torch.tensordot(m.a(x).view(2, 2, 8), m.b.weight, 1),
    "multi_dot": lambda m, x: torch.linalg.multi_dot([x, m.a.weight, m.b.weight]),
    "chain_matmul": lambda m, x: torch.linalg.matrix_power(m.a(x) @ m.b(x).mT / 1000, 3),
    "inner_and_outer": lambda m, x: torch.inner(m.a(x), x) + torch.outer(m.b(x)[0, :4], x[1, :4]),
    "kron_and_vdot": lambda m, x: torch.kron(m.a(x), x) * torch.vdot(m.b(x)[0], x[0]),
    "cdist": lambda m, x: torch.cdist(m.a(x), m.b(x), compute_mode="use_mm_for_euclid_dist"),
    "pairwise_distance": lambda m, x: F.pairwise_distance(m.a(x), m.b(x)),
    "solve": lambda m, x: torch.linalg.solve(torch.eye(8) + m.a.weight * 0.1, m.b(x).mT),
    "cholesky": lambda m, x: (
        torch.linalg.cholesky(torch.eye(8) + m.a.weight @ m.a.weight.mT) @ m.b(x).mT
    ),
    "svd_and_qr": lambda m, x: torch.linalg.qr(m.a.weight)[0] * torch.linalg.svdvals(m.b(x)).sum(),
    "covariance": lambda m, x: torch.cov(m.a(x)) @ torch.corrcoef(m.b(x)),
    "vectors": lambda m, x: torch.mv(m.a.weight, x[0]) @ m.b(x)[1] + torch.dot(x[0], m.a(x)[2]),
    "addmv_and_addbmm": lambda m, x: torch.addbmm(
        m.a(x), x.view(2, 4, 4), m.b(x).view(2, 4, 4).repeat(1, 1, 2), beta=0.5, alpha=0.2
    ),
    "matmul_of_integers_and_floats": lambda m, x: (
        (m.a(x) @ torch.arange(16).view(8, 2).float())
        @ (torch.eye(2).int() @ torch.ones(2, 2).int()).float()
    ),
    "matmul_broadcast": lambda m, x: m.a(x).view(2, 1, 2, 8) @ m.b.weight.view(1, 2, 4, 8).mT,
    "fft": lambda m, x: torch.fft.irfft(torch.fft.rfft(m.a(x)) * torch.fft.rfft(m.b(x))),
    "low_rank": lambda m, x: torch.baddbmm(
        m.a(x)[None], x[None], (m.b.weight[:, :2] @ m.b.weight[:2])[None], beta=0.3
    ),
}
for _name, _function in OPERATIONS.items():
    zoo.step(name=_name)(_function)
