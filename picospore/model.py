"""The Llama family in plain MindSpore, cut by tensor parallelism, with Hugging Face's parameter names.

    model = Llama(config.model, mesh, device="CPU", dtype=ms.float32)
    initialize(model, config.model, mesh, seed=0)
    loss_sum = model(inputs_BS, labels_BS)

Legend: B batch, S sequence, T = B*S tokens, H hidden, N query heads, K key-value heads, D head size, F ffn,
V vocabulary; a trailing t means this tp rank's part. The residual stream is [T, H] of the compute dtype;
parameters are fp32 and cast where they are used.
"""

import hashlib
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from picospore.config import ModelConfig
from picospore.kernels import Kernels, attention_scale, kernels_for, swiglu
from picospore.parallel import (
    CopyToTensorParallel,
    Linear,
    Mesh,
    ReduceFromTensorParallel,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    empty_parameter,
)

# The whole of tensor parallelism: which dimension of which weight [out, in] is cut over tp. Column-parallel
# layers are cut in their outputs, row-parallel ones in their inputs; norms are whole on every rank.
TP_DIM = {
    "embed_tokens": 0, "lm_head": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0,
    "o_proj": 1, "down_proj": 1,
}  # fmt: skip


class Norm(nn.Cell):
    """RMSNorm with its weight [H]."""

    def __init__(self, model: ModelConfig, kernels: Kernels):
        super().__init__()
        self.weight = empty_parameter((model.hidden_size,))
        self.rms_norm = kernels.RMSNorm(model.rms_norm_eps)

    def construct(self, x_TH):
        return self.rms_norm(x_TH, self.weight)


class SelfAttention(nn.Cell):
    """x_TH -> [T, H]. q, k, v are column-parallel: a rank has Nt = N/tp whole heads; o is row-parallel."""

    def __init__(self, model: ModelConfig, mesh: Mesh, kernels: Kernels, dtype):
        super().__init__()
        h, d, s = model.hidden_size, model.head_dim, model.seq_length
        nt, kt = model.num_attention_heads // mesh.tp.size, model.kv_heads // mesh.tp.size
        self.q_proj, self.o_proj = Linear(h, nt * d, dtype), Linear(nt * d, h, dtype)
        self.k_proj, self.v_proj = Linear(h, kt * d, dtype), Linear(h, kt * d, dtype)
        self.rope_q = kernels.Rope(s, d, model.rope_theta, attention_scale(d), dtype)
        self.rope_k = kernels.Rope(s, d, model.rope_theta, 1.0, dtype)
        self.attention = kernels.CausalAttention(s, nt)
        self.copy, self.reduce = CopyToTensorParallel(mesh.tp), ReduceFromTensorParallel(mesh.tp)
        self.s, self.d = s, d

    def split_heads(self, x_TA):
        """[T, heads*D] -> [B, heads, S, D]."""
        heads = x_TA.shape[1] // self.d
        return ops.transpose(x_TA.reshape(-1, self.s, heads, self.d), (0, 2, 1, 3))

    def construct(self, x_TH):
        x_TH = self.copy(x_TH)
        q_BNSD = self.rope_q(self.split_heads(self.q_proj(x_TH)))
        k_BKSD = self.rope_k(self.split_heads(self.k_proj(x_TH)))
        v_BKSD = self.split_heads(self.v_proj(x_TH))
        o_BNSD = self.attention(q_BNSD, k_BKSD, v_BKSD)
        o_TA = ops.transpose(o_BNSD, (0, 2, 1, 3)).reshape(x_TH.shape[0], -1)
        return self.reduce(self.o_proj(o_TA))


class MLP(nn.Cell):
    """x_TH -> [T, H]. gate and up are column-parallel, down is row-parallel."""

    def __init__(self, model: ModelConfig, mesh: Mesh, dtype):
        super().__init__()
        h, ft = model.hidden_size, model.intermediate_size // mesh.tp.size
        self.gate_proj, self.up_proj = Linear(h, ft, dtype), Linear(h, ft, dtype)
        self.down_proj = Linear(ft, h, dtype)
        self.copy, self.reduce = CopyToTensorParallel(mesh.tp), ReduceFromTensorParallel(mesh.tp)

    def construct(self, x_TH):
        x_TH = self.copy(x_TH)
        return self.reduce(self.down_proj(swiglu(self.gate_proj(x_TH), self.up_proj(x_TH))))


class DecoderLayer(nn.Cell):
    """One pre-norm layer on the residual stream x_TH."""

    def __init__(self, model: ModelConfig, mesh: Mesh, kernels: Kernels, dtype):
        super().__init__()
        self.input_layernorm = Norm(model, kernels)
        self.self_attn = SelfAttention(model, mesh, kernels, dtype)
        self.post_attention_layernorm = Norm(model, kernels)
        self.mlp = MLP(model, mesh, dtype)

    def construct(self, x_TH):
        x_TH = x_TH + self.self_attn(self.input_layernorm(x_TH))
        return x_TH + self.mlp(self.post_attention_layernorm(x_TH))


class Decoder(nn.Cell):
    """int32 ids_T -> x_TH after the last norm."""

    def __init__(self, model: ModelConfig, mesh: Mesh, kernels: Kernels, dtype):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(model.vocab_size, model.hidden_size, mesh.tp, dtype)
        layers = [DecoderLayer(model, mesh, kernels, dtype) for _ in range(model.num_hidden_layers)]
        self.layers = nn.CellList(layers)
        self.norm = Norm(model, kernels)

    def construct(self, ids_T):
        x_TH = self.embed_tokens(ids_T)
        for layer in self.layers:
            x_TH = layer(x_TH)
        return self.norm(x_TH)


class Llama(nn.Cell):
    """inputs_BS, labels_BS (int32; a label below 0 has no loss) -> the loss summed over tokens, fp32."""

    def __init__(self, model: ModelConfig, mesh: Mesh, device: str, dtype):
        super().__init__()
        self.model = Decoder(model, mesh, kernels_for(device, dtype), dtype)
        self.tied = model.tie_word_embeddings
        self.copy = CopyToTensorParallel(mesh.tp)
        self.cross_entropy = VocabParallelCrossEntropy(model.vocab_size, mesh.tp, dtype)
        if not self.tied:
            self.lm_head = Linear(model.hidden_size, self.cross_entropy.rows, dtype)

    def head_weight(self):
        return self.model.embed_tokens.weight if self.tied else self.lm_head.weight

    def construct(self, inputs_BS, labels_BS):
        x_TH = self.copy(self.model(inputs_BS.reshape(-1)))
        loss_sum, _ = self.cross_entropy(x_TH, self.head_weight(), labels_BS.reshape(-1))
        return loss_sum

    def logits(self, inputs_BS):
        """int32 inputs_BS -> this rank's columns of the logits, fp32 [B, S, Vt]."""
        logits_TVt = self.cross_entropy.head(self.model(inputs_BS.reshape(-1)), self.head_weight())
        return logits_TVt.reshape(*inputs_BS.shape, -1)


@dataclass(frozen=True)
class Placement:
    """Where a rank's part of a parameter lies in the whole: the box [start, stop) of an array of `shape`.

    `local` is the shape held: what it has beyond the box is padding. `copies` ranks hold the same box, and
    `writer` is one of them, which writes it to checkpoints.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    local: tuple[int, ...]
    copies: int
    writer: bool

    def cut(self, whole: np.ndarray) -> np.ndarray:
        """This rank's part of the whole array, padded with zeros."""
        return self.pad(whole[tuple(map(slice, self.start, self.stop))])

    def pad(self, box: np.ndarray) -> np.ndarray:
        """The box as it is held."""
        return np.pad(box, [(0, held - n) for held, n in zip(self.local, box.shape, strict=True)])

    def strip(self, part: np.ndarray) -> np.ndarray:
        """The inverse: the box without its padding."""
        return part[tuple(slice(b - a) for a, b in zip(self.start, self.stop, strict=True))]


def placements(net: Llama, model: ModelConfig, mesh: Mesh) -> list[Placement]:
    """Where this rank's part of each parameter lies, in the order of the parameters."""
    return [_placement(parameter, model, mesh) for parameter in net.trainable_params()]


def _placement(parameter, model: ModelConfig, mesh: Mesh) -> Placement:
    module, local = parameter.name.split(".")[-2], parameter.shape
    shape, start, stop = list(local), [0] * len(local), list(local)
    dim = TP_DIM.get(module)
    if dim is not None:
        shape[dim] = model.vocab_size if module in ("embed_tokens", "lm_head") else local[dim] * mesh.tp.size
        start[dim] = min(mesh.tp.index * local[dim], shape[dim])
        stop[dim] = min(start[dim] + local[dim], shape[dim])
    copies = mesh.dp.size * (1 if dim is not None else mesh.tp.size)
    writer = mesh.dp.index == 0 and (dim is not None or mesh.tp.index == 0)
    return Placement(tuple(shape), tuple(start), tuple(stop), local, copies, writer)


def initial_value(name: str, shape: tuple[int, ...], std: float, seed: int) -> np.ndarray:
    """A parameter's first value, a function of (seed, name) alone so that every layout starts equal.

    Norms are 1, the rest is normal with deviation `std`, as in Hugging Face's Llama. fp32, whole.
    """
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32) * np.float32(std)


def initialize(net: Llama, model: ModelConfig, mesh: Mesh, seed: int) -> None:
    """Set every parameter to this rank's part of its initial value."""
    for parameter, place in zip(net.trainable_params(), placements(net, model, mesh), strict=True):
        whole = initial_value(parameter.name, place.shape, model.initializer_range, seed)
        parameter.set_data(Tensor(place.cut(whole), ms.float32))
