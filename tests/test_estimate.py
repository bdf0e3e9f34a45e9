"""Parameters and FLOPs are those that are published."""

import pytest

from picospore.config import load_config
from picospore.estimate import flops_per_token, matmul_parameters, parameter_count


@pytest.mark.parametrize(
    ("config", "published"),
    [
        ("llama_1b", 1_100_048_384),  # TinyLlama 1.1B
        ("llama_7b", 6_738_415_616),  # Llama 2 7B
        ("llama_13b", 13_015_864_320),  # Llama 2 13B
    ],
)
def test_parameter_counts_are_the_published_ones(config, published):
    assert parameter_count(load_config(f"configs/{config}.yaml").model) == published


def test_flops_are_six_per_matmul_weight_and_attention_counted_whole():
    model = load_config("configs/llama_7b.yaml").model
    assert matmul_parameters(model) == 6_738_415_616 - 32000 * 4096 - 65 * 4096  # no look-up, no norms
    assert flops_per_token(model) == 6 * matmul_parameters(model) + 12 * 32 * 4096 * 4096


def test_a_tied_embedding_is_counted_once_and_multiplied_with_once():
    tied = load_config("configs/tiny.yaml", ["model.tie_word_embeddings=true"]).model
    untied = load_config("configs/tiny.yaml", ["model.tie_word_embeddings=false"]).model
    assert parameter_count(untied) - parameter_count(tied) == 4096 * 256
    assert flops_per_token(untied) == flops_per_token(tied)
