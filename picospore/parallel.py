"""The device mesh, the one interface to collectives, and the layers that are cut by tensor parallelism.

Rank order is decided here: tp fastest, then dp (with ep inside dp), pp slowest, so that tp stays inside a
node. A group of one rank is no special case for anyone: its collectives are the identity.

Legend: B batch, S sequence, T = B*S tokens, H hidden, I in, O out, V vocabulary; a trailing t means this tp
rank's part (Vt = V padded / tp).
"""

import math
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, communication, nn, ops

from picospore.kernels import MASKED, bias_add, column_sum, matmul, matmul_nt, matmul_tn, softmax

row_max_with_index = ops.ArgMaxWithValue(axis=-1)  # five times faster on CPU than ReduceMax
column_max_with_index = ops.ArgMaxWithValue(axis=0)
segment_sum = ops.UnsortedSegmentSum()
zeros_like = ops.ZerosLike()  # the function of that name does not compile inside a bprop


@dataclass(frozen=True)
class ParallelDims:
    """The degrees of each axis. ep divides dp and is no factor of the world size."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ranks along `axis`, each in the order of the axis.

        Axes are pp, dp and tp; inside of dp ep, over which experts are shared out, and edp, whose ranks hold
        the same experts. `world` is everyone.
        """
        pp, dp, ep, tp = self.pp, self.dp, self.ep, self.tp
        mesh, dim = {
            "world": ((1, pp * dp * tp), 1),
            "pp": ((pp, dp, tp), 0),
            "dp": ((pp, dp, tp), 1),
            "tp": ((pp, dp, tp), 2),
            "edp": ((pp, dp // ep, ep, tp), 1),
            "ep": ((pp, dp // ep, ep, tp), 2),
        }[axis]
        ranks = np.arange(self.world_size).reshape(mesh)
        return np.moveaxis(ranks, dim, -1).reshape(-1, mesh[dim]).tolist()


@dataclass(frozen=True)
class Axis:
    """This rank's group along one axis. `ranks` are global, `index` is this rank's place among them."""

    name: str
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def group(self) -> str:
        """The group's name, which MindSpore repeats in its errors: axis and ranks."""
        return f"{self.name}-" + "-".join(map(str, self.ranks))

    def sum_op(self):
        """An operator x -> sum of x over the group, usable inside and outside of jit."""
        return ops.AllReduce(ops.ReduceOp.SUM, self.group) if self.size > 1 else nn.Identity()


class Mesh:
    """The axes that this rank is on; creates their process groups. Without ranks it is one process."""

    def __init__(self, dims: ParallelDims, rank: int = 0):
        self.dims, self.rank = dims, rank
        self.world, self.dp, self.tp, self.pp, self.ep = map(self._axis, ("world", "dp", "tp", "pp", "ep"))
        self.edp = self._axis("edp") if dims.ep > 1 else self.dp

    def _axis(self, name: str) -> Axis:
        ranks = next(group for group in self.dims.groups(name) if self.rank in group)
        axis = Axis(name, tuple(ranks), ranks.index(self.rank))
        if axis.size > 1:
            communication.create_group(axis.group, ranks)
        return axis

    def barrier(self) -> None:
        """Return when every rank has come here."""
        value_of(self.world.sum_op()(Tensor([1.0], ms.float32)))


def value_of(tensor: Tensor) -> float | list:
    """A tensor's value, as a number or a list, once the device has computed it.

    MindSpore waits for a value by spinning, on a core that the kernels of this and other ranks need. Asking
    what follows from the tensor for its shape waits too, but asleep.
    """
    _ = (tensor + 0).shape
    return tensor.asnumpy().tolist()


class CopyToTensorParallel(nn.Cell):
    """Identity forward, all-reduce over tp backward: f in Megatron-LM (Shoeybi et al. 2019, figure 3)."""

    def __init__(self, tp: Axis):
        super().__init__()
        self.sum = tp.sum_op()

    def construct(self, x):
        return x

    def bprop(self, x, out, dout):
        return (self.sum(dout),)


class ReduceFromTensorParallel(nn.Cell):
    """All-reduce over tp forward, identity backward: g in Megatron-LM."""

    def __init__(self, tp: Axis):
        super().__init__()
        self.sum = tp.sum_op()

    def construct(self, x):
        return self.sum(x)

    def bprop(self, x, out, dout):
        return (dout,)


class Linear(nn.Cell):
    """y = x W^T with the weight [O, I] as Hugging Face keeps it, multiplied in `dtype`. Sizes are local."""

    def __init__(self, features_in: int, features_out: int, dtype):
        super().__init__()
        self.weight = empty_parameter((features_out, features_in))
        self.dtype = dtype

    def construct(self, x_TI):
        """x_TI of `dtype` -> [T, O] of `dtype`."""
        return matmul_nt(x_TI, ops.cast(self.weight, self.dtype))


def vocab_rows(vocab_size: int, tp: Axis) -> int:
    """Rows of the vocabulary that a tp rank holds; the last rank's may be padding."""
    return math.ceil(vocab_size / tp.size)


class VocabParallelEmbedding(nn.Cell):
    """Look-up in a table whose rows are shared out over tp: ids of other ranks give zeros, g sums them up."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: Axis, dtype):
        super().__init__()
        self.rows = vocab_rows(vocab_size, tp)
        self.first = tp.index * self.rows
        self.weight = empty_parameter((self.rows, hidden_size))
        self.dtype = dtype
        self.reduce = ReduceFromTensorParallel(tp)

    def construct(self, ids_T):
        """int32 ids_T, global -> x_TH of `dtype`, the same on every tp rank."""
        local_T = ids_T - self.first
        mine_T = ops.logical_and(local_T >= 0, local_T < self.rows)
        x_TH = ops.gather(self.weight, local_T * ops.cast(mine_T, ms.int32), 0)
        return ops.cast(self.reduce(x_TH * ops.cast(mine_T, ms.float32).reshape(-1, 1)), self.dtype)


class VocabParallelHead(nn.Cell):
    """logits = x W^T over this rank's columns, fp32, the padding ones masked."""

    def __init__(self, vocab_size: int, tp: Axis, dtype):
        super().__init__()
        self.rows = vocab_rows(vocab_size, tp)
        column_Vt = tp.index * self.rows + np.arange(self.rows)
        self.dtype = dtype
        self.padding_Vt = Tensor(np.where(column_Vt < vocab_size, 0, MASKED).astype(np.float32))
        self.has_padding = bool(column_Vt[-1] >= vocab_size)

    def construct(self, x_TH, weight_VtH):
        """x_TH of `dtype`, fp32 weight_VtH -> fp32 logits [T, Vt]."""
        logits_TVt = ops.cast(matmul_nt(x_TH, ops.cast(weight_VtH, self.dtype)), ms.float32)
        return bias_add(logits_TVt, self.padding_Vt) if self.has_padding else logits_TVt


class VocabParallelCrossEntropy(nn.Cell):
    """Head and loss in one: the sum over labels >= 0 of -log softmax(x W^T)[label].

    Together they need no pass over [T, Vt] but the product, softmax and a maximum. The gradient of the
    logits, c * (P - onehot) with c the weight of a token, is never formed: its factor c and its one-hot part
    act on [T, H] instead, dx = c (P W - W[label]) and dW = P^T (c x) - scatter_add(c x, label).
    Ranks exchange tp + 1 numbers a token, nothing of size V.
    """

    def __init__(self, vocab_size: int, tp: Axis, dtype):
        super().__init__()
        self.head = VocabParallelHead(vocab_size, tp, dtype)
        self.rows, self.first, self.dtype = self.head.rows, tp.index * self.head.rows, dtype
        self.sum_over_tp = tp.sum_op()
        self.ranks = tp.size
        self.my_row_R1 = Tensor((np.arange(tp.size) == tp.index).astype(np.float32).reshape(-1, 1))

    def label_columns(self, labels_T):
        """The local column of each label (0 where it is another rank's), and 1.0 where it is here."""
        local_T = labels_T - self.first
        here_T = ops.logical_and(ops.logical_and(local_T >= 0, local_T < self.rows), labels_T >= 0)
        return local_T * ops.cast(here_T, ms.int32), ops.cast(here_T, ms.float32)

    def construct(self, x_TH, weight_VtH, labels_T):
        """x_TH of `dtype`, fp32 weight_VtH, int32 labels_T, global -> fp32 loss, the same on every tp rank.

        Also returns this rank's share of each token's probability mass, [T]: the backward pass needs it, and
        to compute it again would cost a collective.
        """
        logits_TVt = self.head(x_TH, weight_VtH)
        column_T, here_T = self.label_columns(labels_T)
        hit_T = look_up(logits_TVt, column_T) * here_T

        # At a row's maximum log P = max - lse: one look-up instead of an exp and a sum over [T, Vt].
        top_T, max_T = row_max_with_index(logits_TVt)
        lse_T = max_T - ops.log(look_up(softmax(logits_TVt), top_T))

        # All-gather of the log-sum-exps and all-reduce of the labels' logits, in one collective.
        mine_RT = self.my_row_R1 * lse_T.reshape(1, -1)
        shared = self.sum_over_tp(ops.concat((mine_RT, hit_T.reshape(1, -1)), 0))
        lse_RT, hit_1T = ops.split(shared, (self.ranks, 1), 0)
        _, peak_T = column_max_with_index(lse_RT)
        full_lse_T = peak_T + ops.log(column_sum(ops.exp(lse_RT - peak_T), 0))

        valid_T = ops.cast(labels_T >= 0, ms.float32)
        loss_sum = column_sum((full_lse_T - hit_1T.reshape(-1)) * valid_T, 0)
        return loss_sum, ops.exp(lse_T - full_lse_T)

    def bprop(self, x_TH, weight_VtH, labels_T, out, dout):
        (_, share_T), (dloss, _) = out, dout
        p_TVt = ops.cast(softmax(self.head(x_TH, weight_VtH)), self.dtype)  # of this rank's columns only
        column_T, here_T = self.label_columns(labels_T)
        valid_T = ops.cast(labels_T >= 0, ms.float32)
        c_T1, hit_T1 = (dloss * valid_T * share_T).reshape(-1, 1), (dloss * here_T).reshape(-1, 1)
        w_VtH = ops.cast(weight_VtH, self.dtype)
        x32_TH = ops.cast(x_TH, ms.float32)
        dx_TH = c_T1 * ops.cast(matmul(p_TVt, w_VtH), ms.float32)
        dx_TH = dx_TH - hit_T1 * ops.gather(weight_VtH, column_T, 0)
        dw_VtH = ops.cast(matmul_tn(p_TVt, ops.cast(c_T1 * x32_TH, self.dtype)), ms.float32)
        dw_VtH = dw_VtH - segment_sum(hit_T1 * x32_TH, column_T, self.rows)
        return ops.cast(dx_TH, x_TH.dtype), dw_VtH, zeros_like(labels_T)


def look_up(table_TC, column_T):
    """table_TC[t, column_T[t]] for every t, [T]."""
    return ops.gather_elements(table_TC, 1, column_T.reshape(-1, 1)).reshape(-1)


def empty_parameter(shape: tuple[int, ...]) -> Parameter:
    """An fp32 parameter; its values are set when its name and its place in the whole are known."""
    return Parameter(Tensor(np.zeros(shape, np.float32)))
