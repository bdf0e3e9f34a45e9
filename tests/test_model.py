"""The Llama computes what MindFormers' does, and its hand-written gradients are the generated ones."""

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from picospore.config import ModelConfig
from picospore.kernels import (
    AscendCausalAttention,
    AscendRMSNorm,
    AscendRope,
    CausalAttention,
    RMSNorm,
    Rope,
    kernels_for,
    rope_tables,
)
from picospore.model import Llama, Placement, initial_value, initialize, placements
from picospore.parallel import Axis, Mesh, ParallelDims, VocabParallelCrossEntropy

draw = np.random.default_rng(0)


def tensor(*shape):
    return Tensor(draw.standard_normal(shape), ms.float32)


def small(**changes) -> ModelConfig:
    shape = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
             "intermediate_size": 96, "seq_length": 32, "num_key_value_heads": 2}  # fmt: skip
    return ModelConfig(**(shape | changes))


def llama(model: ModelConfig, seed=0) -> Llama:
    net = Llama(model, Mesh(ParallelDims()), "CPU", ms.float32)
    initialize(net, model, Mesh(ParallelDims()), seed)
    return net


# ---- MindFormers -----------------------------------------------------------------------------------------

MINDFORMERS_NAMES = {
    "tok_embeddings.embedding_weight": "embed_tokens.weight", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "norm_out": "norm", "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 8}, {"tie_word_embeddings": True}])
def test_logits_are_those_of_mindformers_with_the_same_weights(changes, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # MindFormers writes output/log where it is imported
    from mindformers import LlamaConfig, LlamaForCausalLM

    model = small(initializer_range=0.2, **changes)  # logits of size 10, so that 1e-4 says something
    ours = llama(model)
    theirs = LlamaForCausalLM(config=LlamaConfig(
        batch_size=2, seq_length=32, hidden_size=64, num_layers=2, num_heads=8, n_kv_heads=model.kv_heads,
        vocab_size=101, intermediate_size=96, rms_norm_eps=model.rms_norm_eps, pad_token_id=-1,
        tie_word_embeddings=model.tie_word_embeddings,
        use_flash_attention=False, fused_rms_norm=False, use_rope_slice=True,  # what runs on CPU
        **{f"{kind}_type": "float32" for kind in ("param_init", "layernorm_compute", "softmax_compute",
                                                  "embedding_init")},
        compute_dtype="float32", rotary_dtype="float32",
    ))  # fmt: skip
    weights = {parameter.name: parameter for parameter in ours.trainable_params()}
    for parameter in theirs.trainable_params():
        name = parameter.name
        for mindformers, hugging_face in MINDFORMERS_NAMES.items():
            name = name.replace(mindformers, hugging_face)
        parameter.set_data(weights.pop(name).value())
    assert not weights
    ids = Tensor(draw.integers(0, 101, (2, 32)), ms.int32)
    theirs.set_train(False)
    expected = theirs(ids)[0].asnumpy().reshape(2, 32, 101)
    assert np.abs(expected).max() > 5
    np.testing.assert_allclose(ours.logits(ids).asnumpy(), expected, atol=1e-4)


# ---- hand-written gradients ------------------------------------------------------------------------------


def assert_same_value_and_gradients(cell, plain, *inputs, differentiable):
    """A Cell with its own bprop, compiled and not, against the generated gradient of a plain function."""
    weights = Tensor(draw.standard_normal(plain(*inputs).shape), ms.float32)

    def through(function):
        def scalar(*arguments):
            return ops.sum(function(*arguments) * weights)

        return ms.value_and_grad(scalar, tuple(range(differentiable)))

    expected_value, expected = through(plain)(*inputs)
    for gradient in (through(cell), ms.jit(through(cell))):
        value, got = gradient(*inputs)
        np.testing.assert_allclose(value.asnumpy(), expected_value.asnumpy(), rtol=1e-4)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-4, atol=1e-5)


def test_rms_norm():
    def plain(x_TH, weight_H):
        return x_TH / ops.sqrt(ops.mean(x_TH**2, -1, True) + 1e-5) * weight_H

    assert_same_value_and_gradients(RMSNorm(1e-5), plain, tensor(6, 16), tensor(16), differentiable=2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_causal_attention_with_grouped_queries(kv_heads):
    s = 8
    mask = Tensor(np.triu(np.full((s, s), -1e9), 1), ms.float32)

    def plain(q_BNSD, k_BKSD, v_BKSD):
        k, v = (x.repeat_interleave(4 // kv_heads, 1) for x in (k_BKSD, v_BKSD))
        return ops.softmax(ops.matmul(q_BNSD, k.swapaxes(2, 3)) + mask, -1) @ v

    inputs = tensor(2, 4, s, 16), tensor(2, kv_heads, s, 16), tensor(2, kv_heads, s, 16)
    assert_same_value_and_gradients(CausalAttention(s, 4), plain, *inputs, differentiable=3)


def test_attention_sees_no_future_token():
    q, k, v = (draw.standard_normal((1, 2, 8, 4)).astype(np.float32) for _ in range(3))
    attention = CausalAttention(8, 2)
    before = attention(Tensor(q), Tensor(k), Tensor(v)).asnumpy()
    k[:, :, 5:], v[:, :, 5:] = 9, 9
    after = attention(Tensor(q), Tensor(k), Tensor(v)).asnumpy()
    np.testing.assert_array_equal(before[:, :, :5], after[:, :, :5])
    assert not np.allclose(before[:, :, 5:], after[:, :, 5:])


def test_rope_is_hugging_faces_rotate_half():
    s, d = 6, 8
    cos, sin = (Tensor(table, ms.float32) for table in rope_tables(s, d, 10000.0, 0.5))

    def plain(x_BNSD):
        first, second = ops.split(x_BNSD, d // 2, -1)
        return x_BNSD * cos + ops.concat((-second, first), -1) * sin

    cell = Rope(s, d, 10000.0, 0.5, ms.float32)
    assert_same_value_and_gradients(cell, plain, tensor(2, 3, s, d), differentiable=1)


def plain_cross_entropy(x_TH, weight_VH, labels_T):
    logits = ops.matmul(x_TH, weight_VH.T)
    return ops.cross_entropy(logits, labels_T, ignore_index=-1, reduction="sum")


@pytest.mark.parametrize("masked", [[], [0], [2, 5], list(range(6))], ids=len)
def test_cross_entropy_under_any_mask(masked):
    labels = draw.integers(0, 11, 6)
    labels[masked] = -1
    head = VocabParallelCrossEntropy(11, Axis("tp", (0,), 0), ms.float32)

    def loss(x_TH, weight_VH, labels_T):
        return head(x_TH, weight_VH, labels_T)[0]

    x, weight, labels = tensor(6, 16), tensor(11, 16), Tensor(labels, ms.int32)
    assert_same_value_and_gradients(loss, plain_cross_entropy, x, weight, labels, differentiable=2)


def test_logits_far_from_zero_neither_overflow_nor_lose_the_loss():
    head = VocabParallelCrossEntropy(11, Axis("tp", (0,), 0), ms.float32)
    x, weight, labels = tensor(6, 16) * 200, tensor(11, 16), Tensor(list(range(6)), ms.int32)
    expected = plain_cross_entropy(x, weight, labels).asnumpy()
    np.testing.assert_allclose(head(x, weight, labels)[0].asnumpy(), expected, rtol=1e-5)


# ---- parameters ------------------------------------------------------------------------------------------


def test_parameters_have_hugging_faces_names_and_shapes():
    named = {parameter.name: parameter.shape for parameter in llama(small()).trainable_params()}
    assert len(named) == 2 * 9 + 3
    assert named["model.embed_tokens.weight"] == named["lm_head.weight"] == (101, 64)
    assert named["model.layers.1.self_attn.k_proj.weight"] == (16, 64)
    assert named["model.layers.0.mlp.down_proj.weight"] == (64, 96)
    assert named["model.norm.weight"] == named["model.layers.0.post_attention_layernorm.weight"] == (64,)
    tied = llama(small(tie_word_embeddings=True)).trainable_params()
    assert "lm_head.weight" not in {parameter.name for parameter in tied}


def test_first_weights_depend_on_seed_and_name_alone():
    one = initial_value("model.layers.0.mlp.up_proj.weight", (96, 64), 0.02, seed=0)
    assert (one == initial_value("model.layers.0.mlp.up_proj.weight", (96, 64), 0.02, seed=0)).all()
    assert (one != initial_value("model.layers.1.mlp.up_proj.weight", (96, 64), 0.02, seed=0)).all()
    assert (one != initial_value("model.layers.0.mlp.up_proj.weight", (96, 64), 0.02, seed=1)).all()
    assert abs(one.std() - 0.02) < 0.001 and abs(one.mean()) < 0.001


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_parts_of_all_ranks_make_the_whole_whatever_the_vocabulary(tp):
    whole = draw.standard_normal((101, 8)).astype(np.float32)
    local = -(-101 // tp)
    borders = [(i * local, min(101, (i + 1) * local)) for i in range(tp)]
    places = [Placement((101, 8), (a, 0), (b, 8), (local, 8), 1, True) for a, b in borders]
    parts = [place.cut(whole) for place in places]
    assert {part.shape for part in parts} == {(local, 8)}
    joined = np.concatenate([place.strip(part) for place, part in zip(places, parts, strict=True)])
    np.testing.assert_array_equal(joined, whole)


def test_row_parallel_weights_are_cut_in_their_inputs_and_norms_not_at_all():
    mesh = Mesh(ParallelDims())
    mesh.tp, mesh.dp = Axis("tp", (2, 3), 1), Axis("dp", (1, 3), 1)
    model = small()
    net = Llama(model, mesh, "CPU", ms.float32)
    places = dict(zip([p.name for p in net.trainable_params()], placements(net, model, mesh), strict=True))
    o_proj, q_proj, norm = (
        places[f"model.{name}.weight"]
        for name in ("layers.0.self_attn.o_proj", "layers.0.self_attn.q_proj", "norm")
    )
    h = model.hidden_size
    assert (o_proj.shape, o_proj.start, o_proj.stop) == ((h, h), (0, h // 2), (h, h))
    assert (q_proj.shape, q_proj.start, q_proj.stop) == ((h, h), (h // 2, 0), (h, h))
    assert (norm.start, norm.stop) == ((0,), (h,))
    assert (o_proj.copies, norm.copies) == (2, 4)  # over dp, and over dp and tp


def test_one_of_the_ranks_that_hold_the_same_part_writes_it():
    writers = []
    for dp, tp in itertools.product((0, 1), (0, 1)):
        mesh = Mesh(ParallelDims())
        mesh.tp, mesh.dp = Axis("tp", (2 * dp, 2 * dp + 1), tp), Axis("dp", (tp, tp + 2), dp)
        net = Llama(small(), mesh, "CPU", ms.float32)
        writers.append([place.writer for place in placements(net, small(), mesh)])
    names = [p.name for p in net.trainable_params()]
    expected = [1 if "norm" in name else 2 for name in names]
    assert np.sum(writers, axis=0).tolist() == expected


# ---- Ascend: what would be called; not run on Ascend by us -----------------------------------------------


def test_ascend_gets_fused_operators_and_fp32_there_the_plain_attention():
    half = kernels_for("Ascend", ms.bfloat16)
    assert (half.RMSNorm, half.Rope, half.CausalAttention) == (
        AscendRMSNorm,
        AscendRope,
        AscendCausalAttention,
    )
    assert kernels_for("Ascend", ms.float32).CausalAttention is CausalAttention
    assert kernels_for("CPU", ms.float16).RMSNorm is RMSNorm


def test_the_fused_operators_are_called_with_causal_mask_layout_and_tables(monkeypatch):
    calls = {}

    def record(name, result):
        def operator(*arguments, **keywords):
            calls[name] = (arguments, keywords)
            return result

        monkeypatch.setattr(ops, name, operator)

    q = tensor(2, 4, 8, 16)
    record("flash_attention_score", q)
    record("rms_norm", (q, None))
    record("rotary_position_embedding", q)
    AscendCausalAttention(8, 4)(q, q, q)
    AscendRMSNorm(1e-5)(q, tensor(16))
    AscendRope(8, 16, 10000.0, 0.25, ms.float16)(q)
    (_, _, _, heads), keywords = calls["flash_attention_score"]
    assert heads == 4 and keywords["input_layout"] == "BNSD" and keywords["sparse_mode"] == 2
    np.testing.assert_array_equal(keywords["attn_mask"].asnumpy(), np.triu(np.ones((2048, 2048), bool), 1))
    assert calls["rms_norm"][0][2] == 1e-5
    _, cos, sin, mode = calls["rotary_position_embedding"][0]
    assert cos.shape == sin.shape == (1, 1, 8, 16) and mode == 0 and cos.dtype == ms.float16
    assert cos.asnumpy()[0, 0, 0, 0] == 0.25
