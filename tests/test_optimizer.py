"""A step is AdamW on the clipped gradient of the mean loss, however the batch was cut up."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from picospore.config import ModelConfig, TrainingConfig
from picospore.model import Llama, Placement, initialize, placements
from picospore.optimizer import MAX_SKIPPED, LossScale, TrainStep, clip_factor, learning_rate
from picospore.parallel import Mesh, ParallelDims

draw = np.random.default_rng(0)
MODEL = ModelConfig(vocab_size=53, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                    intermediate_size=48, seq_length=16)  # fmt: skip


def training(**changes) -> TrainingConfig:
    return TrainingConfig(**({"batch_size": 2, "learning_rate": 1e-2, "max_steps": 100} | changes))


def train_step(**changes) -> TrainStep:
    mesh = Mesh(ParallelDims())
    net = Llama(MODEL, mesh, "CPU", ms.float32)
    initialize(net, MODEL, mesh, 0)
    return TrainStep(net, training(**changes), mesh, placements(net, MODEL, mesh))


def whole(net, copies: int = 1) -> list[Placement]:
    """Places of a net that is no Llama: every parameter is whole."""
    shapes = [parameter.shape for parameter in net.trainable_params()]
    return [Placement(shape, (0,) * len(shape), shape, shape, copies, True) for shape in shapes]


def batch(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, 53, (rows, 17)).astype(np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


# ---- schedule --------------------------------------------------------------------------------------------


def test_the_warm_up_rises_evenly_to_the_peak_and_never_starts_at_zero():
    t = training(warmup_steps=4, learning_rate=1.0)
    assert [learning_rate(step, t) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("scheduler", "half_way"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)]
)  # fmt: skip
def test_a_schedule_goes_from_the_peak_to_the_minimum(scheduler, half_way):
    t = training(lr_scheduler=scheduler, warmup_steps=20, learning_rate=1.0, min_learning_rate=0.1)
    assert learning_rate(20, t) == 1.0
    assert learning_rate(60, t) == pytest.approx(half_way)
    end = 1.0 if scheduler == "constant" else 0.1
    assert learning_rate(100, t) == learning_rate(150, t) == pytest.approx(end)


def test_cosine_leaves_the_peak_slower_than_linear():
    cosine, linear = (
        learning_rate(10, training(lr_scheduler=s, learning_rate=1.0)) for s in ("cosine", "linear")
    )
    assert cosine > linear


# ---- AdamW -----------------------------------------------------------------------------------------------


class Quadratic(nn.Cell):
    """loss = sum over the batch of <weight, inputs>: its gradient is known, and is what the test says."""

    def __init__(self):
        super().__init__()
        self.matrix = Parameter(Tensor(np.full((1, 3), 0.5, np.float32)), name="matrix")
        self.norm = Parameter(Tensor(np.full(3, 0.5, np.float32)), name="norm")

    def construct(self, inputs_BS, labels_BS):
        return ops.sum(
            ops.cast(inputs_BS, ms.float32) * self.matrix + ops.cast(inputs_BS, ms.float32) * self.norm
        )


def test_adamw_is_the_textbooks_with_decay_on_matrices_only():
    t = training(adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.1, grad_clip=0.0)
    net = Quadratic()
    step = TrainStep(net, t, Mesh(ParallelDims()), whole(net))
    matrix, norm, m, v = np.full(3, 0.5), np.full(3, 0.5), np.zeros(3), np.zeros(3)
    for i, row in enumerate([[1, -2, 3], [2, 2, 0], [-3, 1, 1]], start=1):
        step([(np.array([row], np.int32), np.zeros((1, 3), np.int32))], 0.1)
        gradient = np.array(row) / 3  # three labels
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        update = m / (1 - 0.9**i) / (np.sqrt(v / (1 - 0.95**i)) + 1e-6)
        matrix, norm = matrix - 0.1 * (update + 0.1 * matrix), norm - 0.1 * update
        np.testing.assert_allclose(step.weights[0].asnumpy()[0], matrix, rtol=1e-5)
        np.testing.assert_allclose(step.weights[1].asnumpy(), norm, rtol=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(100.0, 0.0) == 1.0  # 0: no clipping
    gentle, harsh = train_step(grad_clip=0.0), train_step(grad_clip=1e-3)
    norms = [step([batch(2)], 1e-2).grad_norm for step in (gentle, harsh)]
    assert norms[0] == norms[1] > 1e-3  # what is reported is the norm before
    ratio = harsh.exp_avg[0].asnumpy().ravel() @ gentle.exp_avg[0].asnumpy().ravel()
    ratio /= np.square(gentle.exp_avg[0].asnumpy()).sum()
    assert ratio == pytest.approx(1e-3 / norms[0], rel=1e-3)


def test_the_norm_of_millions_of_gradients_is_right_to_six_digits():
    net = nn.Dense(2048, 2048)  # 4 million: a plain fp32 sum of that many squares is off by 1e-3
    step = TrainStep(net, training(), Mesh(ParallelDims()), whole(net, copies=4))
    values = [draw.standard_normal(grad.shape).astype(np.float32) for grad in step.grads]
    for grad, value in zip(step.grads, values, strict=True):
        grad.set_data(Tensor(value))
    expected = sum(np.square(value, dtype=np.float64).sum() for value in values)
    np.testing.assert_allclose(step.squared_norm().asnumpy(), expected / 4, rtol=1e-6)


# ---- a batch in parts ------------------------------------------------------------------------------------


def test_unequal_micro_batches_give_the_big_batchs_step():
    """3 + 13 valid tokens of two rows are a batch of 16, not the mean of two means."""
    inputs, labels = batch(2)
    labels[0, 3:], labels[1, 13:] = -1, -1
    whole, parts = train_step(), train_step()
    a = whole([(inputs, labels)], 1e-2)
    b = parts([(inputs[:1], labels[:1]), (inputs[1:], labels[1:])], 1e-2)
    assert a.loss == pytest.approx(b.loss, rel=1e-6) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    for one, other in zip(whole.weights, parts.weights, strict=True):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-4, atol=1e-6)


def test_a_row_without_valid_tokens_weighs_nothing():
    inputs, labels = batch(2)
    alone = train_step()([(inputs[:1], labels[:1])], 1e-2)
    labels[1] = -1
    masked = train_step()([(inputs, labels)], 1e-2)
    assert masked.loss == pytest.approx(alone.loss, rel=1e-6)
    assert masked.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


def test_masked_labels_change_neither_loss_nor_gradients():
    inputs, labels = batch(2)
    labels[:, 8:] = -1
    other_inputs = inputs.copy()
    other_inputs[:, 8:] = 7  # causal: nothing that has a loss sees these
    a, b = train_step()([(inputs, labels)], 1e-2), train_step()([(other_inputs, labels)], 1e-2)
    assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
    assert a.loss != train_step()([batch(2)], 1e-2).loss


def test_evaluation_is_the_mean_over_tokens_and_changes_nothing():
    step, (inputs, labels) = train_step(), batch(4)
    labels[3], labels[0, 5:] = -1, -1
    before = [weight.asnumpy().copy() for weight in step.weights]
    whole = step.evaluate([(inputs, labels)])
    assert whole == pytest.approx(
        step.evaluate([(inputs[:2], labels[:2]), (inputs[2:], labels[2:])]), rel=1e-6
    )
    assert whole == pytest.approx(np.log(53), rel=0.02)
    assert all((one == weight.asnumpy()).all() for one, weight in zip(before, step.weights, strict=True))


# ---- gradients that are not finite -----------------------------------------------------------------------


def test_a_step_with_infinite_gradients_changes_nothing_and_halves_the_scale():
    step = train_step()
    step.loss_scale = LossScale(2.0**10, dynamic=True)
    good = step([batch(2)], 1e-2)
    weights = [weight.asnumpy().copy() for weight in step.weights]
    step.loss_scale.scale = 1e38
    bad = step([batch(2)], 1e-2)
    assert good.finite and not bad.finite
    assert step.step == 1 and step.loss_scale.scale == 5e37
    assert all((one == weight.asnumpy()).all() for one, weight in zip(weights, step.weights, strict=True))
    step.loss_scale.scale = 2.0**10
    assert step([batch(2)], 1e-2).finite  # the buffers were cleared


def test_the_scale_doubles_after_a_window_of_good_steps():
    scale = LossScale(4.0, dynamic=True, window=3)
    for finite in (True, True, False, True, True):
        scale.update(finite)
    assert scale.scale == 2.0
    scale.update(True)
    assert scale.scale == 4.0


def test_a_run_whose_gradients_stay_infinite_ends_with_advice():
    scale = LossScale(1.0)
    with pytest.raises(FloatingPointError, match="lower training.learning_rate"):
        for _ in range(MAX_SKIPPED):
            scale.update(False)
