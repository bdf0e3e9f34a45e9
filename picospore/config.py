"""The configuration: frozen dataclasses, read from YAML, overridden on the command line, checked whole.

Keys are those people know: Hugging Face's for `model`, plain ones for the rest. Every scalar is read as
the text that stands in the file and converted by the type of its field, so `3e-4` is a number and
`off` or `010` is an error instead of a surprise. All problems are reported together.

    config = load_config("configs/tiny.yaml", overrides=["parallel.dp=2"])
    config.model.hidden_size, config.global_batch_size
"""

import difflib
import math
import re
import types
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Literal

import yaml


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one sentence a problem."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the configuration:"
        super().__init__("\n".join([count, *(f"  - {problem}" for problem in problems)]))


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the network, in the names of Hugging Face's LlamaConfig."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    seq_length: int
    type: Literal["LlamaConfig"] = "LlamaConfig"
    num_key_value_heads: int | None = None  # null: as many as attention heads
    max_position_embeddings: int | None = None  # null: seq_length
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    num_local_experts: int = 0
    num_experts_per_tok: int = 2

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def problems(self) -> list[str]:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        found = _too_small(self, "model", 1, *sizes, "seq_length", "num_key_value_heads")
        if found:
            return found
        if self.hidden_size % self.num_attention_heads:
            found.append(
                f"model.hidden_size {self.hidden_size} is not a multiple of "
                f"model.num_attention_heads {self.num_attention_heads}: every head needs the same width"
            )
        elif self.head_dim % 2:
            found.append(
                f"model.hidden_size / num_attention_heads = {self.head_dim} is odd: rotary embedding turns "
                f"pairs, so choose an even head size"
            )
        if self.num_attention_heads % self.kv_heads:
            found.append(
                f"model.num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"model.num_key_value_heads {self.kv_heads}: each key-value head serves a whole group"
            )
        if self.max_position_embeddings and self.seq_length > self.max_position_embeddings:
            found.append(
                f"model.seq_length {self.seq_length} exceeds model.max_position_embeddings "
                f"{self.max_position_embeddings}: lower the one or raise the other"
            )
        found += _too_small(
            self, "model", 0, "rms_norm_eps", "rope_theta", "initializer_range", strictly=True
        )
        return found


@dataclass(frozen=True)
class TrainingConfig:
    """One optimizer step and how many of them. `batch_size` is per dp rank and micro-step."""

    batch_size: int
    learning_rate: float
    max_steps: int
    gradient_accumulation_steps: int = 1
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    min_learning_rate: float = 0.0
    weight_decay: float = 0.1
    optimizer: Literal["adamw"] = "adamw"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    mixed_precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    grad_clip: float = 1.0  # 0: no clipping
    seed: int = 0
    log_steps: int = 100
    eval_steps: int = 1000  # 0: only at the end
    eval_samples: int = 1024  # at most this many validation samples each time
    jit: bool = True  # false: run operator by operator, for debugging

    def problems(self) -> list[str]:
        counts = ("batch_size", "gradient_accumulation_steps", "max_steps", "log_steps", "eval_samples")
        found = _too_small(self, "training", 1, *counts)
        not_negative = (
            "warmup_steps",
            "eval_steps",
            "seed",
            "weight_decay",
            "grad_clip",
            "min_learning_rate",
        )
        found += _too_small(self, "training", 0, *not_negative)
        found += _too_small(self, "training", 0, "learning_rate", "adam_epsilon", strictly=True)
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"training.{name} is {getattr(self, name)}: expected 0 <= {name} < 1")
        if self.min_learning_rate > self.learning_rate:
            found.append(
                f"training.min_learning_rate {self.min_learning_rate} is above "
                f"training.learning_rate {self.learning_rate}: it is where the schedule ends"
            )
        return found


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, where, and how many to keep."""

    save_steps: int = 1000  # 0: only at the end
    keep_last: int = 5
    save_path: str | None = None  # null: checkpoints/ in the run's folder

    def problems(self) -> list[str]:
        found = _too_small(self, "checkpoint", 0, "save_steps")
        if self.keep_last < 2:
            found.append(
                f"checkpoint.keep_last is {self.keep_last}: expected at least 2, so that a damaged newest "
                f"checkpoint is not the only one"
            )
        return found


@dataclass(frozen=True)
class ParallelConfig:
    """The layout: degrees of data, tensor, pipeline and expert parallelism. ep lies inside dp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    engine: Literal["explicit", "mindformers"] = "explicit"
    sequence_parallel: bool = False
    zero_stage: int = 0
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int | None = None

    def problems(self) -> list[str]:
        found = _too_small(self, "parallel", 1, "dp", "tp", "pp", "ep")
        return found + _too_small(self, "parallel", 0, "zero_stage", "recompute_layers")


@dataclass(frozen=True)
class DataConfig:
    """Where the token shards are: a folder written by make_mindrecord.py."""

    path: str | None = None
    verify_hashes: bool = True  # read all shards once before training; false where that takes too long

    def problems(self) -> list[str]:
        return []


@dataclass(frozen=True)
class HardwareConfig:
    """The device. A peak without a source is refused: an MFU must say what it is measured against."""

    device: Literal["auto", "CPU", "Ascend"] = "auto"
    peak_tflops: float | None = None  # per device, of the precision trained in; null: no MFU on Ascend
    peak_source: str | None = None

    def problems(self) -> list[str]:
        found = _too_small(self, "hardware", 0, "peak_tflops", strictly=True)
        if self.peak_tflops and not self.peak_source:
            found.append("hardware.peak_tflops has no hardware.peak_source: say where the number is from")
        return found


@dataclass(frozen=True)
class Config:
    """All sections, and what follows from more than one of them."""

    model: ModelConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    hardware: HardwareConfig = HardwareConfig()

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all dp ranks and micro-steps."""
        return self.training.batch_size * self.training.gradient_accumulation_steps * self.parallel.dp

    @property
    def world_size(self) -> int:
        """Ranks. ep is not a factor: expert groups are made of dp ranks."""
        return self.parallel.dp * self.parallel.tp * self.parallel.pp

    def problems(self) -> list[str]:
        found = [p for field in fields(self) for p in getattr(self, field.name).problems()]
        if not found:  # divisibility says nothing useful about numbers that are wrong in themselves
            found += self._layout_problems()
        return found

    def _layout_problems(self) -> list[str]:
        found = []
        m, tp = self.model, self.parallel.tp
        cut_by_tp = {
            "num_attention_heads": m.num_attention_heads,
            "num_key_value_heads": m.kv_heads,
            "intermediate_size": m.intermediate_size,
        }
        fitting = [d for d in range(1, m.kv_heads + 1) if all(size % d == 0 for size in cut_by_tp.values())]
        found += [
            f"model.{name} {size} is not divisible by parallel.tp {tp}: "
            f"choose tp from {', '.join(map(str, fitting))} or change the model"
            for name, size in cut_by_tp.items()
            if size % tp
        ]
        # What the schema can say and this version does not do yet is refused, never ignored.
        for key, got, only in (
            ("parallel.pp", self.parallel.pp, 1),
            ("parallel.ep", self.parallel.ep, 1),
            ("parallel.engine", self.parallel.engine, "explicit"),
            ("parallel.sequence_parallel", self.parallel.sequence_parallel, False),
            ("parallel.zero_stage", self.parallel.zero_stage, 0),
            ("parallel.recompute", self.parallel.recompute, "none"),
            ("parallel.recompute_layers", self.parallel.recompute_layers, None),
            ("model.num_local_experts", m.num_local_experts, 0),
        ):
            if got != only:
                found.append(f"{key} is {got}: this version only does {only}, leave the key out")
        return found


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `section.key=value` overrides in order, and check everything.

    Raises ConfigError with all problems; nothing is printed or changed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.BaseLoader)  # BaseLoader: every scalar stays text
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError([f"{path} can't be read: {error}"]) from None
    problems: list[str] = []
    values = _texts(root, str(path), problems)
    for override in overrides or []:
        key, equals, value = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and name):
            problems.append(f"--set {override}: expected section.key=value, as in training.batch_size=8")
            continue
        values.setdefault(section, {})[name] = (value.strip(), f"--set {override}")
    config = _build(values, problems)
    if config is not None:
        problems += config.problems()
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that load_config reads back to the same object."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def _texts(root, path: str, problems: list[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """{section: {key: (text, where)}} of a YAML tree; doubled keys and odd shapes go to `problems`."""
    values: dict[str, dict[str, tuple[str, str]]] = {}
    if not isinstance(root, yaml.MappingNode):
        problems.append(f"{path}: expected sections ({', '.join(SECTIONS)}), got no mapping")
        return values
    for section_node, body in root.value:
        section, where = section_node.value, f"{path}:{section_node.start_mark.line + 1}"
        if section in values:
            problems.append(f"{where}: section {section} stands twice: merge the two")
        if not isinstance(body, yaml.MappingNode):
            problems.append(f"{where}: {section} must be a section with keys, got {_shown(body)}")
            continue
        entries = values.setdefault(section, {})
        for key_node, value_node in body.value:
            key, where = key_node.value, f"{path}:{key_node.start_mark.line + 1}"
            if key in entries:
                problems.append(f"{where}: {section}.{key} stands twice: keep one")
            if not isinstance(value_node, yaml.ScalarNode):
                problems.append(f"{where}: {section}.{key} must be one value, got {_shown(value_node)}")
                continue
            entries[key] = (value_node.value, where)
    return values


def _build(values, problems: list[str]) -> Config | None:
    """The Config of the texts, or None when a section could not be built; problems are collected."""
    for section in values.keys() - SECTIONS.keys():
        where = next((where for _, where in values[section].values()), section)
        problems.append(f"{where}: unknown section {section}{_nearest(section, SECTIONS)}")
    built = {}
    for section, cls in SECTIONS.items():
        kwargs, entries = {}, values.get(section, {})
        kinds = typing.get_type_hints(cls)
        for key, (text, where) in entries.items():
            if key not in kinds:
                problems.append(f"{where}: unknown key {section}.{key}{_nearest_key(section, key)}")
                continue
            try:
                kwargs[key] = _convert(text, kinds[key])
            except ValueError as error:
                problems.append(f"{where}: {section}.{key}: {error}")
        required = [f.name for f in fields(cls) if f.default is f.default_factory]  # both MISSING
        missing = [name for name in required if name not in entries]
        problems += [f"{section}.{name} is missing: it has no default, add it" for name in missing]
        if all(name in kwargs for name in required):
            built[section] = cls(**kwargs)
    return Config(**built) if len(built) == len(SECTIONS) else None


def _convert(text: str, kind):
    """`text` as `kind` (int, float, bool, str, Literal[...] or one of them | None), or ValueError."""
    if isinstance(kind, types.UnionType):
        kind, _none = typing.get_args(kind)
        if text in ("null", "~", ""):
            return None
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise ValueError(f"got {text!r}, expected {' or '.join(choices)}{_nearest(text, choices)}")
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"got {text!r}, expected true or false")
        return text == "true"
    if kind is int:
        if re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", text):
            return int(text)
        if re.fullmatch(r"[-+]?[1-9](\.[0-9]*)?[eE]\+?[0-9]+", text) and float(text).is_integer():
            return int(float(text))  # 1e5 steps
        raise ValueError(f"got {text!r}, expected a whole number in plain decimal digits")
    if kind is float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"got {text!r}, expected a number such as 0.1 or 3e-4")
        return number
    return text


def _too_small(section, name: str, bound: int, *keys: str, strictly: bool = False) -> list[str]:
    """A sentence for each key whose value is below `bound`, or at it if `strictly`; null is no value."""
    values = {key: getattr(section, key) for key in keys}
    expected = f"more than {bound}" if strictly else f"at least {bound}"
    return [
        f"{name}.{key} is {value}: expected {expected}"
        for key, value in values.items()
        if value is not None and (value < bound or (strictly and value == bound))
    ]


def _nearest(word: str, known) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(known)}"


def _nearest_key(section: str, key: str) -> str:
    """The key meant: of the same name in another section, of these initials, or spelled most alike."""
    keys = [field.name for field in fields(SECTIONS[section])]
    elsewhere = [f"{name}.{key}" for name, cls in SECTIONS.items() if key in typing.get_type_hints(cls)]
    initials = [f"{section}.{name}" for name in keys if key == "".join(word[0] for word in name.split("_"))]
    for meant in elsewhere + initials:
        return f"; did you mean {meant}?"
    return _nearest(key, keys).replace("did you mean ", f"did you mean {section}.")


def _shown(node) -> str:
    return {"MappingNode": "a mapping", "SequenceNode": "a list"}.get(type(node).__name__, repr(node.value))


SECTIONS = {name: cls for name, cls in typing.get_type_hints(Config).items() if is_dataclass(cls)}
