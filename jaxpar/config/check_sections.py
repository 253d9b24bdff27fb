"""Rules within and between sections that hold on any mesh."""

from collections.abc import Iterator
from pathlib import Path

from jaxpar.config.data import FILE_SOURCES, TEXT_SOURCES, DataConfig, SourceConfig, SourceFields
from jaxpar.config.model import ModelConfig
from jaxpar.config.problem import Problem, divisors, near_multiples
from jaxpar.config.run import RunConfig
from jaxpar.config.train import REMAT_NAMES

# Keys that only some sources read.
ONLY_FOR = {"field": ("jsonl",), "dtype": ("tokens",), "encoding_errors": ("text", "jsonl"), "num_tokens": ("synthetic",)}
BYTES_VOCAB = 257  # 256 byte values and end-of-document


def section_problems(config: RunConfig) -> Iterator[Problem]:
    """Everything that can be told without a mesh."""
    yield from _model_problems(config)
    yield from _attention_problems(config)
    yield from _data_problems(config)
    yield from _optimizer_problems(config)
    yield from _run_problems(config)


def _model_problems(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.mla is None:
        yield from _head_problems(model)
    if model.positions == "learned" and (model.max_positions or 0) < config.data.seq_len:
        text = f"model.max_positions: {model.max_positions}, but data.seq_len={config.data.seq_len} needs a learned position for each token"
        yield Problem(("model.max_positions", "data.seq_len"), f"{text}; try model.max_positions={config.data.seq_len}")
    if model.positions == "learned" and model.rope_scaling is not None:
        yield Problem(
            ("model.rope_scaling", "model.positions"), "model.rope_scaling: has no effect with positions: learned; set it to null"
        )
    if (scaling := model.rope_scaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
        text = f"model.rope_scaling.high_freq_factor: {scaling.high_freq_factor} is not above low_freq_factor={scaling.low_freq_factor}"
        yield Problem(("model.rope_scaling",), f"{text}; try {4 * scaling.low_freq_factor}")


def _head_problems(model: ModelConfig) -> Iterator[Problem]:
    """Widths and numbers of heads of plain attention."""
    if model.head_dim is None and model.embed_dim % model.num_heads:
        near = near_multiples(model.embed_dim, model.num_heads)
        text = f"model.embed_dim: {model.embed_dim} is not a multiple of model.num_heads={model.num_heads}"
        yield Problem(("model.embed_dim", "model.num_heads", "model.head_dim"), f"{text}; {near} would work, or set model.head_dim")
    elif model.positions == "rope" and model.head_size % 2:
        key = "model.head_dim" if model.head_dim else "model.embed_dim"
        text = f"{key}: gives heads of {model.head_size}, but positions: rope rotates pairs and needs an even model.head_dim"
        yield Problem(("model.embed_dim", "model.num_heads", "model.head_dim"), f"{text}; try model.head_dim={model.head_size + 1}")
    if model.num_heads % model.kv_heads:
        legal = ", ".join(map(str, divisors(model.num_heads)))
        text = f"model.num_kv_heads: {model.kv_heads} does not divide model.num_heads={model.num_heads}; {legal} would work"
        yield Problem(("model.num_kv_heads", "model.num_heads"), text)


def _attention_problems(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if config.compute_dtype == "float64" and config.param_dtype != "float64":
        text = "compute_dtype: float64 needs param_dtype=float64, or the parameters' rounding stays; set param_dtype=float64"
        yield Problem(("compute_dtype", "param_dtype"), text)
    if model.attention_dropout and config.attention != "reference":
        text = f"attention: {config.attention} cannot take our random bits for model.attention_dropout={model.attention_dropout}"
        yield Problem(("attention", "model.attention_dropout"), f"{text}; set attention=reference, or model.attention_dropout=0")
    if model.attention_dropout and config.mesh.context != 1 and config.context.method == "ring":
        text = "context.method: ring never holds the attention probabilities that model.attention_dropout needs"
        yield Problem(("context.method", "model.attention_dropout", "mesh.context"), f"{text}; set context.method=all_gather")
    if config.attention == "cudnn" and config.compute_dtype != "bfloat16":
        text = f"attention: cudnn has no {config.compute_dtype} kernel; set compute_dtype=bfloat16, or attention=auto"
        yield Problem(("attention", "compute_dtype"), text)
    if config.attention == "cudnn" and model.attention_softcap is not None:
        text = "attention: cudnn has no soft cap; set attention=auto, or model.attention_softcap=null"
        yield Problem(("attention", "model.attention_softcap"), text)
    unknown = [name for name in config.remat.save if name not in REMAT_NAMES]
    if unknown:
        text = f"remat.save: unknown name {', '.join(unknown)}; known: {', '.join(REMAT_NAMES)}"
        yield Problem(("remat.save",), text)
    if config.remat.policy == "selective" and not config.remat.save:
        yield Problem(("remat.save", "remat.policy"), "remat.save: empty, so everything is recomputed; that is remat.policy=full")


def _data_problems(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if data.source is None and not data.mixture:
        yield Problem(
            ("data.source", "data.mixture"), "data.source: not given; one source (e.g. data.source=stdlib) or a data.mixture of several"
        )
    if data.source is not None and data.mixture:
        text = f"data.source: {data.source} and data.mixture are both given; keep one (data.source=null for the mixture)"
        yield Problem(("data.source", "data.mixture"), text)
    if data.mixture:
        fields = SourceFields.model_fields
        for name in (name for name in fields if getattr(data, name) != fields[name].default):
            yield Problem((f"data.{name}", "data.mixture"), f"data.{name}: has no effect beside data.mixture; set data.mixture[...].{name}")
    for prefix, part in _parts(data):
        if part.source in FILE_SOURCES and not part.path:
            text = f"{prefix}.path: required for source {part.source}; a file, a folder or a pattern, e.g. {prefix}.path=data/*.txt"
            yield Problem((f"{prefix}.path", f"{prefix}.source"), text)
        for name in ("path", "eval_path") if part.source not in FILE_SOURCES else ():
            if getattr(part, name):
                text = f"{prefix}.{name}: source {part.source} reads no files of yours; set {prefix}.{name}=null, or {prefix}.source=text"
                yield Problem((f"{prefix}.{name}", f"{prefix}.source"), text)
        for name, readers in ONLY_FOR.items():
            if part.source not in readers and (value := getattr(part, name)) != (default := SourceFields.model_fields[name].default):
                text = f"{prefix}.{name}: {value} has no effect with source {part.source}, only with {' and '.join(readers)}"
                yield Problem((f"{prefix}.{name}", f"{prefix}.source"), f"{text}; set {prefix}.{name}={default}")
    sources = [part.source for _, part in _parts(data)]
    if data.tokenizer == "bytes" and config.model.vocab_size < BYTES_VOCAB and any(source in TEXT_SOURCES for source in sources):
        text = f"model.vocab_size: {config.model.vocab_size}, but tokenizer bytes has {BYTES_VOCAB} ids (256 bytes and end-of-document)"
        yield Problem(("model.vocab_size", "data.tokenizer", "data.source"), f"{text}; try model.vocab_size={BYTES_VOCAB}")
    if config.train.eval_every and not data.has_eval:
        text = f"train.eval_every: {config.train.eval_every}, but data.eval_fraction=0 holds nothing out; try data.eval_fraction=0.02"
        yield Problem(("train.eval_every", "data.eval_fraction", "data.eval_path"), text)


def _parts(data: DataConfig) -> list[tuple[str, SourceConfig | DataConfig]]:
    if data.mixture:
        return [(f"data.mixture[{i}]", part) for i, part in enumerate(data.mixture)]
    return [("data", data)] if data.source else []


def _optimizer_problems(config: RunConfig) -> Iterator[Problem]:
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.warmup_steps > steps:
        text = f"optimizer.warmup_steps: {optimizer.warmup_steps} is more than train.steps={steps}; at most {steps} would work"
        yield Problem(("optimizer.warmup_steps", "train.steps"), text)
    if optimizer.decay_steps is not None and optimizer.schedule != "wsd":
        text = f"optimizer.decay_steps: only schedule wsd has a decay of its own length, not {optimizer.schedule}; set it to null"
        yield Problem(("optimizer.decay_steps", "optimizer.schedule"), text)
    elif optimizer.decay_steps is not None and optimizer.warmup_steps <= steps < optimizer.warmup_steps + optimizer.decay_steps:
        left = steps - optimizer.warmup_steps
        text = f"optimizer.decay_steps: {optimizer.decay_steps} + warmup_steps={optimizer.warmup_steps} is more than train.steps={steps}"
        works = f"at most {left} would work" if left else "optimizer.schedule=constant would work"
        yield Problem(("optimizer.decay_steps", "optimizer.warmup_steps", "train.steps"), f"{text}; {works}")
    if optimizer.momentum is not None and optimizer.name not in ("sgd", "muon"):
        text = f"optimizer.momentum: only sgd and muon have it, not {optimizer.name}; set optimizer.momentum=null"
        yield Problem(("optimizer.momentum", "optimizer.name"), text)


def _run_problems(config: RunConfig) -> Iterator[Problem]:
    saved = config.checkpoint
    if saved.keep_every and not saved.save_every:
        text = f"checkpoint.keep_every: {saved.keep_every}, but save_every=0 saves only at the end"
        yield Problem(("checkpoint.keep_every", "checkpoint.save_every"), f"{text}; try checkpoint.save_every={saved.keep_every}")
    elif saved.keep_every and saved.keep_every % saved.save_every:
        near = near_multiples(saved.keep_every, saved.save_every)
        text = f"checkpoint.keep_every: {saved.keep_every} is not a multiple of checkpoint.save_every={saved.save_every}"
        yield Problem(("checkpoint.keep_every", "checkpoint.save_every"), f"{text}, so those steps are not saved; {near} would work")
    resume = saved.resume
    if resume not in ("auto", "never") and "://" not in resume and not Path(resume).is_dir():
        text = f"checkpoint.resume: {resume!r} is not auto, never or an existing folder of checkpoints; try auto"
        yield Problem(("checkpoint.resume",), text)
