"""What a model costs: parameters and FLOPs, each with its source.

Legend: V vocabulary, H hidden, F intermediate, N heads, K key-value heads, D head size, L layers, S sequence.
"""

from picospore.config import ModelConfig


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that every token is multiplied with: all but the input embedding (a look-up) and the norms.

    A tied embedding is counted once, as the output head.
    """
    h, d = model.hidden_size, model.head_dim
    attention = 2 * h * model.num_attention_heads * d + 2 * h * model.kv_heads * d  # q, o and k, v
    mlp = 3 * h * model.intermediate_size  # gate, up, down
    return model.num_hidden_layers * (attention + mlp) + model.vocab_size * h


def parameter_count(model: ModelConfig) -> int:
    """All trainable parameters (Llama-2 7B: 6,738,415,616)."""
    norms = (2 * model.num_hidden_layers + 1) * model.hidden_size
    input_embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return matmul_parameters(model) + norms + input_embedding


def flops_per_token(model: ModelConfig) -> int:
    """Training FLOPs per token, forward and backward: 6 x matmul parameters + 12 L H S.

    Chowdhery et al. 2022 (PaLM), appendix B. Attention is counted whole, not halved for the causal mask, and
    recomputed work is not counted: it is the model's FLOPs, not the hardware's.
    """
    attention = 12 * model.num_hidden_layers * model.hidden_size * model.seq_length
    return 6 * matmul_parameters(model) + attention
