"""Run by test_parallel.py on 4 real ranks: each layer that tp cuts, against the whole layer in NumPy."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from picospore.launch import rank_main  # noqa: E402

V, H, F, T = 101, 16, 24, 12  # 4 does not divide V: the last rank holds 23 rows and 3 of padding
close = {"rtol": 1e-5, "atol": 1e-5}


def cross_entropy(x, weight, labels):
    """The loss summed over labels >= 0 and its gradients, from the textbook, in float64."""
    logits = x @ weight.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    valid = labels >= 0
    loss = -np.log(p[valid, labels[valid]]).sum()
    p[np.arange(T)[valid], labels[valid]] -= 1
    p[~valid] = 0
    return loss, p @ weight, p.T @ x


def main() -> int:
    import mindspore as ms
    from mindspore import Tensor, nn

    from picospore.parallel import (
        CopyToTensorParallel,
        Linear,
        Mesh,
        ParallelDims,
        ReduceFromTensorParallel,
        VocabParallelCrossEntropy,
        VocabParallelEmbedding,
    )

    ms.set_device("CPU")
    ms.communication.init()
    rank = ms.communication.get_rank()
    tp = Mesh(ParallelDims(tp=4), rank).tp
    draw = np.random.default_rng(0)
    table, x = draw.standard_normal((V, H)), draw.standard_normal((T, H))
    ids = np.array([0, 25, 26, 51, 52, 77, 78, 100, 3, 30, 60, 99], np.int32)

    # ---- embedding and its gradient, ids on every border between ranks
    embedding = VocabParallelEmbedding(V, H, tp, ms.float32)
    mine = slice(tp.index * 26, min(V, tp.index * 26 + 26))
    part = np.zeros((26, H), np.float32)
    part[: mine.stop - mine.start] = table[mine]
    embedding.weight.set_data(Tensor(part))
    np.testing.assert_allclose(embedding(Tensor(ids)).asnumpy(), table[ids], **close)

    # ---- head and loss: two labels masked, the padding columns invisible
    labels = ids[::-1].copy()
    labels[[2, 7]] = -1
    loss, dx, dweight = cross_entropy(x, table, labels)
    head = VocabParallelCrossEntropy(V, tp, ms.float32)
    copy = CopyToTensorParallel(tp)

    def loss_of(x_TH, weight_VtH):
        loss_sum, _ = head(copy(x_TH), weight_VtH, Tensor(labels))
        return loss_sum

    gradient = ms.jit(ms.value_and_grad(loss_of, (0, 1)))
    got, (got_dx, got_dweight) = gradient(Tensor(x, ms.float32), Tensor(part))
    np.testing.assert_allclose(got.asnumpy(), loss, rtol=1e-5)
    np.testing.assert_allclose(got_dx.asnumpy(), dx, **close)
    np.testing.assert_allclose(got_dweight.asnumpy()[: mine.stop - mine.start], dweight[mine], **close)
    assert not got_dweight.asnumpy()[mine.stop - mine.start :].any()  # padding learns nothing

    # ---- column-parallel, then row-parallel: y = (x A^T) B^T
    a, b = draw.standard_normal((F, H)), draw.standard_normal((H, F))

    class TwoLayers(nn.Cell):
        def __init__(self):
            super().__init__()
            self.column, self.row = Linear(H, F // 4, ms.float32), Linear(F // 4, H, ms.float32)
            self.copy, self.reduce = CopyToTensorParallel(tp), ReduceFromTensorParallel(tp)

        def construct(self, x_TH):
            return self.reduce(self.row(self.column(self.copy(x_TH))))

    layers, cut = TwoLayers(), slice(tp.index * F // 4, (tp.index + 1) * F // 4)
    layers.column.weight.set_data(Tensor(a[cut], ms.float32))
    layers.row.weight.set_data(Tensor(b[:, cut], ms.float32))
    np.testing.assert_allclose(layers(Tensor(x, ms.float32)).asnumpy(), x @ a.T @ b.T, rtol=1e-4, atol=1e-4)
    got_dx, (got_da, got_db) = ms.grad(layers, 0, layers.trainable_params())(Tensor(x, ms.float32))
    ones = np.ones((T, H))
    np.testing.assert_allclose(got_dx.asnumpy(), ones @ b @ a, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got_da.asnumpy(), ((ones @ b).T @ x)[cut], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got_db.asnumpy(), (ones.T @ (x @ a.T))[:, cut], rtol=1e-4, atol=1e-4)
    return 0


if __name__ == "__main__":
    sys.exit(rank_main(main))
