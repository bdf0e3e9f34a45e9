"""A configuration is read as it is meant, or refused with everything that is wrong with it."""

from pathlib import Path

import pytest

from picospore.config import ConfigError, dump_config, load_config

CONFIGS = sorted(Path(__file__).parent.parent.glob("configs/*.yaml"))

ARTICLE = """
model: {type: LlamaConfig, vocab_size: 32000, hidden_size: 4096, num_hidden_layers: 32,
  num_attention_heads: 32, intermediate_size: 11008, rms_norm_eps: 1.0e-6, rope_theta: 10000.0,
  seq_length: 4096, max_position_embeddings: 4096}
training: {batch_size: 8, gradient_accumulation_steps: 8, learning_rate: 3.0e-4, lr_scheduler: cosine,
  warmup_steps: 200, weight_decay: 0.1, max_steps: 100000, optimizer: adamw, mixed_precision: bf16,
  grad_clip: 1.0}
checkpoint: {save_steps: 1000, keep_last: 5, save_path: checkpoints/llama_7b}
"""


@pytest.fixture
def article(tmp_path):
    path = tmp_path / "article.yaml"
    path.write_text(ARTICLE)
    return path


def problems_of(path, *overrides):
    with pytest.raises(ConfigError) as error:
        load_config(path, list(overrides))
    return error.value.problems


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_that_we_ship_loads(path):
    assert load_config(path).model.type == "LlamaConfig"


def test_the_articles_yaml_loads_unchanged_and_its_global_batch_is_128_at_dp2(article):
    config = load_config(article, ["parallel.dp=2", "parallel.tp=4"])
    assert (config.global_batch_size, config.world_size) == (128, 8)
    assert config.model.rms_norm_eps == 1e-6 and config.training.mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("text", "number"),
    [("3e-4", 3e-4), ("1e4", 1e4), ("1.e4", 1e4), ("3", 3.0), (".5", 0.5), ("1_000", 1000.0)],
)
def test_a_float_may_be_written_as_people_write_it(article, text, number):
    article.write_text(ARTICLE.replace("learning_rate: 3.0e-4", f"learning_rate: {text}"))
    learning_rate = load_config(article).training.learning_rate
    assert learning_rate == number and isinstance(learning_rate, float)


@pytest.mark.parametrize(("text", "number"), [("1_000", 1000), ("1e4", 10000), ("100000", 100000)])
def test_a_whole_number_may_be_written_as_people_write_it(article, text, number):
    assert load_config(article, [f"training.max_steps={text}"]).training.max_steps == number


@pytest.mark.parametrize(
    "override",
    ["training.max_steps=010", "training.max_steps=1.5", "training.max_steps=1e-3", "training.max_steps=true",
     "training.jit=off", "training.jit=1", "training.learning_rate=nan", "training.learning_rate=fast",
     "training.lr_scheduler=cosin", "training.max_steps="],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_with_what_was_expected(article, override):
    (problem,) = problems_of(article, override)
    key, _, value = override.partition("=")
    assert f"{key}: got {value!r}, expected" in problem


def test_a_misspelled_key_is_refused_with_its_line_and_the_nearest_key(article):
    article.write_text(ARTICLE.replace("warmup_steps", "warmup_step"))
    (problem,) = problems_of(article)
    assert problem == f"{article}:6: unknown key training.warmup_step; did you mean training.warmup_steps?"


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(article):
    (problem,) = problems_of(article, "training.tp=4")
    assert "did you mean parallel.tp?" in problem


def test_initials_are_understood_and_a_key_like_no_other_gets_the_list(article):
    assert "did you mean training.learning_rate?" in problems_of(article, "training.lr=1")[0]
    assert "expected one of save_steps, keep_last, save_path" in problems_of(article, "checkpoint.xyz=1")[0]


def test_all_problems_are_reported_at_once(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(
        "model: {vocab_size: 010, colour: red}\ntraning: {batch_size: 1}\ntraining: {jit: off, jit: on}\n"
    )
    text = "\n".join(problems_of(path))
    for part in ("vocab_size: got '010'", "model.colour", "did you mean training?",
                 "training.jit stands twice", "model.hidden_size is missing"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "parallel.tp=3",
            "num_attention_heads 32 is not divisible by parallel.tp 3: choose tp from 1",
        ),
        ("parallel.dp=0", "parallel.dp is 0: expected at least 1"),
        ("checkpoint.keep_last=1", "checkpoint.keep_last is 1: expected at least 2"),
        (
            "model.num_key_value_heads=5",
            "is not a multiple of model.num_key_value_heads 5",
        ),
        ("model.hidden_size=4100", "hidden_size 4100 is not a multiple"),
        ("model.seq_length=8192", "exceeds model.max_position_embeddings 4096"),
        ("hardware.peak_tflops=300", "no hardware.peak_source"),
        ("parallel.pp=2", "parallel.pp is 2: this version only does 1"),
        ("learning_rate=1", "expected section.key=value"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused_with_the_arithmetic(article, override, sentence):
    assert any(sentence in problem for problem in problems_of(article, override))


def test_a_file_that_is_missing_or_not_yaml_is_one_clear_problem(tmp_path):
    (tmp_path / "torn.yaml").write_text("model: {vocab_size: 1")
    for name in ("missing.yaml", "torn.yaml"):
        (problem,) = problems_of(tmp_path / name)
        assert name in problem and "can't be read" in problem


def test_the_saved_resolved_config_reads_back_to_the_same(article, tmp_path):
    config = load_config(article, ["parallel.dp=2", "data.path=data/x", "model.tie_word_embeddings=true"])
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_config(config))
    assert load_config(saved) == config
