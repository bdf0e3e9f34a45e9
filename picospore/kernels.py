"""The operators a Llama spends its time in: fused ones on Ascend, hand-written ones on CPU.

What makes the CPU versions fast: activations stay two-dimensional ([T, H]), because MindSpore's CPU
reductions are several times faster there; nothing is sliced; and where the generated gradient is slow it is
written by hand. A `bprop` may compute from its inputs what the forward pass had already: inside jit the
compiler finds that out, so it is not done twice. What it would not find is returned and handed on.

Legend: B batch, S sequence, T = B*S tokens, H hidden, N query heads, K key-value heads, G = N/K, D head size,
I in, O out. Sizes are local to this rank. Half precision enters only where a docstring says `dtype`.
"""

import math
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

matmul = ops.MatMul()
matmul_tn = ops.MatMul(transpose_a=True)
matmul_nt = ops.MatMul(transpose_b=True)
batch_matmul = ops.BatchMatMul()
batch_matmul_tn = ops.BatchMatMul(transpose_a=True)
batch_matmul_nt = ops.BatchMatMul(transpose_b=True)
softmax = ops.Softmax(axis=-1)
row_sum = ops.ReduceSum(keep_dims=True)
column_sum = ops.ReduceSum()
bias_add = ops.BiasAdd()  # [rows, C] + [C], twice as fast on CPU as a broadcast Add
MASKED = -1e30  # a score that softmax turns into an exact 0


class RMSNorm(nn.Cell):
    """y = x / rms(x) * weight, Zhang & Sennrich 2019; computed in fp32, returned in the dtype of x."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def reciprocal_rms(self, x_TH):
        return ops.rsqrt(row_sum(x_TH * x_TH, 1) * (1.0 / x_TH.shape[1]) + self.eps)

    def construct(self, x_TH, weight_H):
        x32_TH = ops.cast(x_TH, ms.float32)
        return ops.cast(x32_TH * self.reciprocal_rms(x32_TH) * weight_H, x_TH.dtype)

    def bprop(self, x_TH, weight_H, out, dout):
        x32_TH, dout_TH = ops.cast(x_TH, ms.float32), ops.cast(dout, ms.float32)
        r_T1 = self.reciprocal_rms(x32_TH)
        n_TH = x32_TH * r_T1
        dn_TH = dout_TH * weight_H
        mean_T1 = row_sum(dn_TH * n_TH, 1) * (1.0 / x_TH.shape[1])
        dx_TH = (dn_TH - n_TH * mean_T1) * r_T1
        return ops.cast(dx_TH, x_TH.dtype), column_sum(dout_TH * n_TH, 0)


class AscendRMSNorm(nn.Cell):
    """The same through the fused operator of Ascend."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def construct(self, x_TH, weight_H):
        return ops.cast(ops.rms_norm(ops.cast(x_TH, ms.float32), weight_H, self.eps)[0], x_TH.dtype)


def rope_tables(seq_length: int, head_dim: int, theta: float, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, [S, D] each and times `scale`; Su et al. 2021 in Hugging Face's rotate-half layout."""
    frequency_D = theta ** (-2.0 * (np.arange(head_dim) % (head_dim // 2)) / head_dim)
    angle_SD = np.outer(np.arange(seq_length), frequency_D)
    return np.cos(angle_SD) * scale, np.sin(angle_SD) * scale


class Rope(nn.Cell):
    """Rotary position embedding of x_BNSD, of its dtype. `scale` multiplies the result.

    rotate_half(x) is x @ R with a constant signed permutation R: cheaper than cutting x in two.
    """

    def __init__(self, seq_length: int, head_dim: int, theta: float, scale: float, dtype):
        super().__init__()
        cos_SD, sin_SD = rope_tables(seq_length, head_dim, theta, scale)
        half, one = head_dim // 2, np.eye(head_dim // 2)
        rotate_DD = np.zeros((head_dim, head_dim))
        rotate_DD[half:, :half], rotate_DD[:half, half:] = -one, one
        self.cos, self.sin = Tensor(cos_SD.reshape(-1), dtype), Tensor(sin_SD.reshape(-1), dtype)
        self.rotate_DD = Tensor(rotate_DD, dtype)

    def construct(self, x_BNSD):
        b, n, s, d = x_BNSD.shape
        turned = matmul(x_BNSD.reshape(-1, d), self.rotate_DD).reshape(b * n, s * d)
        return (x_BNSD.reshape(b * n, s * d) * self.cos + turned * self.sin).reshape(b, n, s, d)


class AscendRope(nn.Cell):
    """The same through the fused operator of Ascend (mode 0 is rotate-half)."""

    def __init__(self, seq_length: int, head_dim: int, theta: float, scale: float, dtype):
        super().__init__()
        cos_SD, sin_SD = rope_tables(seq_length, head_dim, theta, scale)
        self.cos, self.sin = Tensor(cos_SD[None, None], dtype), Tensor(sin_SD[None, None], dtype)

    def construct(self, x_BNSD):
        return ops.rotary_position_embedding(x_BNSD, self.cos, self.sin, 0)


class CausalAttention(nn.Cell):
    """softmax(q k^T + causal mask) v for q_BNSD (already scaled), k_BKSD, v_BKSD of one dtype -> o_BNSD."""

    def __init__(self, seq_length: int, heads: int):
        super().__init__()
        self.core = AttentionCore(seq_length)

    def construct(self, q_BNSD, k_BKSD, v_BKSD):
        o_BNSD, _ = self.core(q_BNSD, k_BKSD, v_BKSD)
        return o_BNSD


class AttentionCore(nn.Cell):
    """CausalAttention that also returns P, its probabilities: they are for the backward pass.

    Grouped queries cost nothing: the G query heads of a key-value head are G*S rows of one batched product.
    Softmax is fp32. The backward pass is FlashAttention's (Dao et al. 2022): dS = P * (dP - rowsum(dO * O)).
    """

    def __init__(self, seq_length: int):
        super().__init__()
        mask_SS = np.triu(np.full((seq_length, seq_length), MASKED, np.float32), 1)
        self.mask = Tensor(mask_SS.reshape(-1))

    def construct(self, q_BNSD, k_BKSD, v_BKSD):
        b, kv, s, d = k_BKSD.shape
        q, k, v = q_BNSD.reshape(b * kv, -1, d), k_BKSD.reshape(b * kv, s, d), v_BKSD.reshape(b * kv, s, d)
        score = ops.cast(batch_matmul_nt(q, k), ms.float32)  # [B*K, G*S, S]
        p = softmax(bias_add(score.reshape(-1, s * s), self.mask).reshape(score.shape))
        return batch_matmul(ops.cast(p, v.dtype), v).reshape(q_BNSD.shape), p

    def bprop(self, q_BNSD, k_BKSD, v_BKSD, out, dout):
        b, kv, s, d = k_BKSD.shape
        q, k, v = q_BNSD.reshape(b * kv, -1, d), k_BKSD.reshape(b * kv, s, d), v_BKSD.reshape(b * kv, s, d)
        (o, p), (do, _) = out, dout
        o32, do32 = ops.cast(o.reshape(-1, d), ms.float32), ops.cast(do.reshape(-1, d), ms.float32)
        delta = row_sum(do32 * o32, 1).reshape(b * kv, -1, 1)
        do = do.reshape(q.shape)
        ds = ops.cast(p * (ops.cast(batch_matmul_nt(do, v), ms.float32) - delta), q.dtype)
        dq, dk, dv = batch_matmul(ds, k), batch_matmul_tn(ds, q), batch_matmul_tn(ops.cast(p, v.dtype), do)
        return dq.reshape(q_BNSD.shape), dk.reshape(k_BKSD.shape), dv.reshape(v_BKSD.shape)


class AscendCausalAttention(nn.Cell):
    """The same through Ascend's flash attention, which takes half precision only."""

    def __init__(self, seq_length: int, heads: int):
        super().__init__()
        self.heads = heads
        # Sparse mode 2 means causal; the operator asks for a triangular mask of exactly 2048 x 2048.
        self.mask = Tensor(np.triu(np.ones((2048, 2048), np.bool_), 1))

    def construct(self, q_BNSD, k_BKSD, v_BKSD):
        return ops.flash_attention_score(
            q_BNSD, k_BKSD, v_BKSD, self.heads, attn_mask=self.mask, input_layout="BNSD", sparse_mode=2
        )


def swiglu(gate_TF, up_TF):
    """silu(gate) * up, Shazeer 2020."""
    return ops.silu(gate_TF) * up_TF


@dataclass(frozen=True)
class Kernels:
    """The Cell classes that a model is built from on one device."""

    RMSNorm: type
    Rope: type
    CausalAttention: type


def kernels_for(device: str, dtype) -> Kernels:
    """The one place that chooses. Ascend's flash attention has no fp32, so fp32 runs take the plain one."""
    if device == "Ascend":
        attention = CausalAttention if dtype == ms.float32 else AscendCausalAttention
        return Kernels(AscendRMSNorm, AscendRope, attention)
    return Kernels(RMSNorm, Rope, CausalAttention)


def attention_scale(head_dim: int) -> float:
    """1 / sqrt(D), Vaswani et al. 2017; folded into the rotary tables of the queries."""
    return 1.0 / math.sqrt(head_dim)
