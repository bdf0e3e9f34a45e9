"""One optimizer step: gradients summed over micro-steps and dp ranks, clipped by global norm, AdamW.

The loss is a sum over tokens until the end of the step and is divided once, by the number of tokens in the
global batch: micro-batches with unequal numbers of valid tokens give the big batch's gradient.
"""

import math
import time
from dataclasses import dataclass, field

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, ops

from picospore.config import TrainingConfig
from picospore.model import Llama, Placement
from picospore.parallel import Mesh, value_of

BUCKET_BYTES = 64 * 2**20  # gradients are reduced over dp in pieces of about this size
MAX_SKIPPED = 20  # steps in a row without finite gradients before the run gives up


def learning_rate(step: int, training: TrainingConfig) -> float:
    """The rate of step `step` (the first is 1): linear warm-up, then the schedule to min_learning_rate.

    The warm-up reaches the peak at step `warmup_steps`; the schedule reaches its end at step `max_steps`.
    """
    peak, least = training.learning_rate, training.min_learning_rate
    if step <= training.warmup_steps:
        return peak * step / training.warmup_steps
    if training.lr_scheduler == "constant":
        return peak
    done = min(1.0, (step - training.warmup_steps) / max(1, training.max_steps - training.warmup_steps))
    if training.lr_scheduler == "linear":
        return peak + (least - peak) * done
    return least + (peak - least) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass
class LossScale:
    """Dynamic loss scaling, Micikevicius et al. 2018: fp16 gradients are kept away from zero by a factor.

    Halved when a gradient overflows (that step is skipped), doubled after `window` good steps.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    good_steps: int = 0
    skipped_in_a_row: int = 0

    def update(self, finite: bool) -> None:
        """Count a step; raises FloatingPointError when MAX_SKIPPED in a row were not finite."""
        if finite:
            self.skipped_in_a_row, self.good_steps = 0, self.good_steps + 1
            if self.dynamic and self.good_steps % self.window == 0:
                self.scale *= 2
            return
        self.skipped_in_a_row, self.good_steps = self.skipped_in_a_row + 1, 0
        if self.dynamic:
            self.scale = max(1.0, self.scale / 2)
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise FloatingPointError(
                f"gradients were NaN or infinite in {MAX_SKIPPED} steps in a row (scale {self.scale:g}): "
                f"lower training.learning_rate, lengthen training.warmup_steps, or look at the data there"
            )


@dataclass
class StepResult:
    """Of one optimizer step: mean loss per token and gradient norm before clipping, over the global batch."""

    loss: float
    grad_norm: float
    finite: bool
    comm_time_s: float


@dataclass
class TrainStep:
    """Gradient buffers, AdamW's moments and the compiled pieces of a step, for one rank's part of a model.

    All arrays are fp32. `places` says of each parameter where this rank's part of it lies.
    """

    net: Llama
    training: TrainingConfig
    mesh: Mesh
    places: list[Placement]
    loss_scale: LossScale = field(default_factory=LossScale)
    step: int = 0  # optimizer steps done

    def __post_init__(self):
        self.weights = ParameterTuple(self.net.trainable_params())
        self.grads, self.exp_avg, self.exp_avg_sq = (
            ParameterTuple([_zeros_like(w, f"{kind}.{w.name}") for w in self.weights])
            for kind in ("grad", "exp_avg", "exp_avg_sq")
        )
        self.dp_sum, self.world_sum = self.mesh.dp.sum_op(), self.mesh.world.sum_op()
        self.buckets = _buckets(self.grads)
        compiled = ms.jit if self.training.jit else _as_it_is  # the one place that compiles
        self.accumulate = compiled(_accumulate(self.net, self.weights, self.grads))
        self.squared_norm = compiled(_squared_norm(self.grads, [place.copies for place in self.places]))
        self.apply = compiled(_adamw(self.weights, self.grads, self.exp_avg, self.exp_avg_sq, self.training))
        self.loss_sum = compiled(_loss_sum(self.net))

    def __call__(
        self, micro_batches: list[tuple[np.ndarray, np.ndarray]], learning_rate: float
    ) -> StepResult:
        """One step over this rank's micro-batches of int32 (inputs_BS, labels_BS). A label < 0 has no loss.

        When a gradient is not finite nothing is changed but the loss scale, on all ranks alike.
        """
        scale = self.loss_scale.scale / micro_batches[0][0].size  # keeps fp16 gradients those of a mean loss
        loss_sum, tokens = self._forward_backward(micro_batches, scale)

        start = time.perf_counter()
        self._reduce_gradients()
        comm_time_s = time.perf_counter() - start

        # One exchange for all that a step has to know of the other ranks.
        mine = [loss_sum, tokens] if self.mesh.tp.index == 0 else [0.0, 0.0]
        mine = ops.concat((Tensor(mine, ms.float32), self.squared_norm().reshape(1)))
        loss_sum, tokens, squared_norm = value_of(self.world_sum(mine))
        per_token = 1.0 / (scale * max(tokens, 1.0))  # brings the buffers to the gradient of the mean loss
        norm = math.sqrt(squared_norm) * per_token
        finite = math.isfinite(norm)
        if finite:
            self._update(learning_rate, per_token * clip_factor(norm, self.training.grad_clip))
        else:
            for grad in self.grads:
                ops.assign(grad, ops.zeros_like(grad))  # set_data would not reach the compiled graph
        self.step += finite
        self.loss_scale.update(finite)
        return StepResult(loss_sum / max(tokens, 1.0), norm, finite, comm_time_s)

    def evaluate(self, batches) -> float:
        """The mean loss per token over batches of int32 (inputs_BS, labels_BS) shared out over dp."""
        sums = np.zeros(2, np.float64)
        for inputs, labels in batches:
            sums += value_of(self.loss_sum(Tensor(inputs), Tensor(labels))), (labels >= 0).sum()
        loss_sum, tokens = value_of(self.dp_sum(Tensor(sums, ms.float32)))
        return loss_sum / tokens

    def state(self) -> list[tuple[Parameter, Placement]]:
        """Every array that has to be saved to go on later, and where it lies in the whole."""
        arrays = (self.weights, self.exp_avg, self.exp_avg_sq)
        return [pair for array in arrays for pair in zip(array, self.places, strict=True)]

    def _forward_backward(self, micro_batches, scale: float) -> tuple[float, int]:
        """Add scale x the gradients of all micro-batches to the buffers; -> (summed loss, its tokens)."""
        losses = [self.accumulate(Tensor(x), Tensor(y), _scalar(scale)) for x, y in micro_batches]
        return value_of(sum(losses)), sum(int((y >= 0).sum()) for _, y in micro_batches)

    def _reduce_gradients(self) -> None:
        """Sum the gradient buffers over dp, a bucket at a time."""
        if self.mesh.dp.size == 1:
            return
        for bucket in self.buckets:
            total = self.dp_sum(ops.concat([grad.reshape(-1) for grad in bucket]))
            for grad, part in zip(bucket, ops.split(total, [grad.size for grad in bucket]), strict=True):
                ops.assign(grad, part.reshape(grad.shape))

    def _update(self, learning_rate: float, factor: float) -> None:
        """AdamW with the buffers times `factor`; clears the buffers.

        The fused kernel has no bias correction. With c1 = 1 - beta1^t and c2 = sqrt(1 - beta2^t), giving it
        lr c2 / c1, eps c2 and decay c1 / c2 makes it AdamW exactly (Loshchilov & Hutter 2019).
        """
        t, o = self.step + 1, self.training
        c1, c2 = 1 - o.adam_beta1**t, math.sqrt(1 - o.adam_beta2**t)
        done = self.apply(
            _scalar(learning_rate * c2 / c1), _scalar(o.adam_epsilon * c2), _scalar(o.weight_decay * c1 / c2),
            _scalar(factor),
        )  # fmt: skip
        value_of(done)  # so that a step's time is its own


def clip_factor(norm: float, grad_clip: float) -> float:
    """What gradients of global norm `norm` are multiplied with (Pascanu et al. 2013); grad_clip 0: 1."""
    return min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0


def _accumulate(net, weights, grads):
    def forward(inputs_BS, labels_BS, scale):
        loss_sum = net(inputs_BS, labels_BS)
        return loss_sum * scale, loss_sum

    value_and_grad = ms.value_and_grad(forward, None, weights, has_aux=True)

    def accumulate(inputs_BS, labels_BS, scale):
        """Forward and backward of a micro-batch; gradients are added to the buffers; -> summed loss."""
        (_, loss_sum), new = value_and_grad(inputs_BS, labels_BS, scale)
        for i in range(len(new)):
            ops.assign_add(grads[i], new[i])
        return loss_sum

    return accumulate


def _squared_norm(grads, copies):
    # Row by row: L2Loss adds up millions of squares one by one in fp32 and is off by 1% at 8 million.
    row_sum, total = ops.ReduceSum(keep_dims=True), ops.ReduceSum()

    def squared_norm():
        """This rank's share of the buffers' squared norm: what several ranks hold, each counts a part of."""
        share = Tensor(0.0, ms.float32)
        for i in range(len(grads)):
            rows = grads[i].reshape(-1, grads[i].shape[-1])
            share = share + total(row_sum(rows * rows, 1)) / copies[i]
        return share

    return squared_norm


def _adamw(weights, grads, exp_avg, exp_avg_sq, training: TrainingConfig):
    adam = ops.AdamWeightDecay()
    beta1, beta2 = training.adam_beta1, training.adam_beta2

    def apply(lr, epsilon, weight_decay, factor):
        """Update every weight (norms without decay, as is the custom) and clear the buffers."""
        for i in range(len(weights)):
            decay = weight_decay if weights[i].ndim > 1 else ops.zeros_like(weight_decay)
            adam(weights[i], exp_avg[i], exp_avg_sq[i], lr, beta1, beta2, epsilon, decay, grads[i] * factor)
            ops.assign(grads[i], ops.zeros_like(grads[i]))
        return factor

    return apply


def _loss_sum(net):
    def loss_sum(inputs_BS, labels_BS):
        return net(inputs_BS, labels_BS)

    return loss_sum


def _buckets(grads) -> list[list[Parameter]]:
    """The gradients in order, cut into groups of at most BUCKET_BYTES (or of one that is larger)."""
    buckets, held = [[]], 0
    for grad in grads:
        if buckets[-1] and held + grad.nbytes > BUCKET_BYTES:
            buckets.append([])
            held = 0
        buckets[-1].append(grad)
        held += grad.nbytes
    return buckets


def _zeros_like(weight: Parameter, name: str) -> Parameter:
    return Parameter(Tensor(np.zeros(weight.shape, np.float32)), name=name, requires_grad=False)


def _scalar(value: float) -> Tensor:
    return Tensor(value, ms.float32)


def _as_it_is(function):
    return function
