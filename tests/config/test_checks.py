"""Cross-checks: each kind of violation has its message, and what is legal passes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config.checks import check, layout_of, resolve_sizes
from jaxpar.config.errors import ConfigError
from jaxpar.config.layout import plan_leaf
from jaxpar.config.mesh import MeshConfig
from jaxpar.config.parameters import parameter_table
from jaxpar.config.run import RunConfig


def config(changes: dict[str, Any] | None = None) -> RunConfig:
    """A legal config with dotted changes."""
    tree: dict[str, Any] = {
        "model": {"num_layers": 2, "embed_dim": 64, "num_heads": 8, "mlp_dim": 128, "vocab_size": 264},
        "data": {"source": "stdlib", "seq_len": 64, "global_batch_size": 16},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 10},
    }
    for key, value in (changes or {}).items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return RunConfig.model_validate(tree)


def test_the_base_is_legal():
    assert check(config(), None) == []
    assert check(config(), 1) == []


# MSH-01, MSH-03
@pytest.mark.parametrize(
    ("mesh", "num_devices", "said"),
    [
        ({"data": 4, "tensor": 4}, 8, "mesh: data 4 x tensor 4 = 16, but there are 8 devices; mesh.data=2 would work"),
        (
            {"data": 3},
            8,
            "mesh: data 3 = 3, but there are 8 devices; a mesh smaller than the devices would leave some idle; mesh.data=8 would",
        ),
        ({}, 8, "mesh: all axes 1 = 1, but there are 8 devices"),
        ({"data": 8, "tensor": 2}, 8, "mesh.tensor=1 would work"),
        (
            {"data": -1, "tensor": 3},
            8,
            "mesh.data: -1, but 8 devices do not divide by the other axes: tensor 3 = 3; their product may be 1, 2, 4, 8",
        ),
        ({"data": -1, "tensor": -1}, None, "mesh.data and mesh.tensor are -1; only one axis"),
        ({"data": 0}, None, "mesh.data: 0 is not a size; 1 or more, or -1"),
        ({"tensor": -2}, 8, "mesh.tensor: -2 is not a size"),
        ({"expert": 3}, 8, "mesh: expert 3 = 3, but there are 8 devices"),  # MOE-14
    ],
)
def test_mesh(mesh, num_devices, said):
    found = check(config({"mesh": mesh}), num_devices)
    assert sum(said in problem for problem in found) == 1, found


def test_sizes_resolve():
    assert resolve_sizes(MeshConfig(data=-1, tensor=4), 8)["data"] == 2
    assert resolve_sizes(MeshConfig(data=2, context=2), None)["context"] == 2
    with pytest.raises(ConfigError, match="needs the number of devices"):
        resolve_sizes(MeshConfig(data=-1), None)
    with pytest.raises(ConfigError, match="16, but there are 8"):
        resolve_sizes(MeshConfig(data=16), 8)


CASES: list[tuple[dict[str, Any], str]] = [
    # dims against `tensor` (MSH-05, MSH-08)
    (
        {"model.num_heads": 6, "model.head_dim": 16, "mesh.tensor": 4},
        "model.num_heads: 6 does not divide over mesh.tensor=4; model.num_heads=4 or 8 would, or mesh.tensor of 1, 2, 3",
    ),
    (
        {"model.num_heads": 20, "model.head_dim": 8, "model.num_kv_heads": 10, "mesh.tensor": 4},
        "model.num_kv_heads: 10 does not divide over mesh.tensor=4; mesh.tensor may be 1, 2, 5, 10, 20",
    ),
    (
        {"model.vocab_size": 257, "mesh.tensor": 8},
        "model.vocab_size: 257 (stored as 257) does not divide over mesh.tensor=8; "
        "model.vocab_multiple=8 pads it to 264, or mesh.tensor of 1",
    ),
    ({"model.vocab_size": 257, "model.vocab_multiple": 3, "mesh.tensor": 4}, "model.vocab_multiple=12 pads it to 264"),
    (
        {"model.mlp_dim": 100, "mesh.tensor": 8},
        "model.mlp_dim: 100 does not divide over mesh.tensor=8; model.mlp_dim=96 or 104 would, or mesh.tensor of 1, 2, 4, 5",
    ),
    # ZeRO (MSH-13)
    (
        {"mesh.data": 5, "data.global_batch_size": 20, "model.vocab_size": 257, "model.mlp_dim": 64},
        "zero_stage: 1 cannot shard embed.tokens.table (257 x 64) and 8 more over mesh.data=5 = 5: no free dim divides; "
        "zero_stage=0 would work, or data x context of 1, 2, 4, 8, 16, 32, 64",
    ),
    # sequence (CTX-05)
    (
        {"data.seq_len": 2999, "mesh.context": 4},
        "data.seq_len: 2999 is not a multiple of 8 (ring attention: 2 x mesh.context=4); 2992 or 3000 would work",
    ),
    (
        {"data.seq_len": 30, "mesh.context": 4, "context.method": "all_gather"},
        "data.seq_len: 30 is not a multiple of 4 (mesh.context=4); 28 or 32 would work",
    ),
    (
        {"data.seq_len": 36, "mesh.context": 2, "mesh.tensor": 4},
        "data.seq_len: 36 is not a multiple of 8 (ring attention: 2 x mesh.context=2; "
        "sequence_parallel: context 2 x mesh.tensor=4); 32 or 40",
    ),
    ({"data.seq_len": 3, "mesh.tensor": 8}, "8 would work"),
    (
        {
            "model.num_heads": 12,
            "model.head_dim": 8,
            "zero_stage": 0,
            "model.num_kv_heads": 4,
            "mesh.context": 6,
            "data.seq_len": 66,
            "context.method": "ulysses",
        },
        "mesh.context: 6 neither divides nor is a multiple of the 4 key-value heads of a tensor rank, as context.method=ulysses needs; "
        "mesh.context may be 1, 2, 4, 12, or context.method=ring",
    ),
    (
        {"mesh.context": 4, "mesh.tensor": 4, "context.method": "ulysses"},
        "mesh.context: 4 does not divide the 2 heads of a tensor rank, which context.method=ulysses needs; "
        "mesh.context may be 1, 2, or context.method=ring",
    ),
    # batch (MSH-04, MSH-15)
    (
        {"data.global_batch_size": 1, "mesh.data": 8},
        "data.global_batch_size: 1 is not a multiple of num_microbatches=1 x batch shards 8 (mesh.data=8); "
        "data.global_batch_size=8 would work",
    ),
    (
        {"data.global_batch_size": 9, "mesh.data": 4, "mesh.replica": 2},
        "batch shards 8 (mesh.replica=2 x mesh.data=4); data.global_batch_size=8 or 16 would work",
    ),
    ({"data.global_batch_size": 8, "num_microbatches": 3}, "data.global_batch_size=6 or 9 would work, or num_microbatches of 1, 2, 4, 8"),
    # model
    ({"model.embed_dim": 65}, "model.embed_dim: 65 is not a multiple of model.num_heads=8; 64 or 72 would work, or set model.head_dim"),
    ({"model.embed_dim": 72}, "model.embed_dim: gives heads of 9, but positions: rope rotates pairs"),
    (
        {"model.head_dim": 7},
        "model.head_dim: gives heads of 7, but positions: rope rotates pairs and needs an even model.head_dim; try model.head_dim=8",
    ),
    ({"model.num_kv_heads": 3}, "model.num_kv_heads: 3 does not divide model.num_heads=8; 1, 2, 4, 8 would work"),
    ({"model.positions": "learned"}, "model.max_positions: None, but data.seq_len=64 needs"),
    (
        {"model.positions": "learned", "model.max_positions": 63},
        "model.max_positions: 63, but data.seq_len=64 needs a learned position for each token; try model.max_positions=64",
    ),
    ({"model.positions": "learned", "model.max_positions": 64, "model.rope_scaling": {}}, "model.rope_scaling: has no effect"),
    (
        {"model.rope_scaling": {"high_freq_factor": 1.0}},
        "model.rope_scaling.high_freq_factor: 1.0 is not above low_freq_factor=1.0; try 4.0",
    ),
    # attention and precision
    ({"compute_dtype": "float64"}, "compute_dtype: float64 needs param_dtype=float64"),
    (
        {"model.attention_dropout": 0.1},
        "attention: auto cannot take our random bits for model.attention_dropout=0.1; set attention=reference",
    ),
    (
        {"model.attention_dropout": 0.1, "attention": "reference", "mesh.context": 2},
        "context.method: ring never holds the attention probabilities",
    ),
    ({"attention": "cudnn", "compute_dtype": "float32"}, "attention: cudnn has no float32 kernel; set compute_dtype=bfloat16"),
    ({"attention": "cudnn", "model.attention_softcap": 30.0}, "attention: cudnn has no soft cap"),
    ({"remat.save": ["query", "keys"]}, "remat.save: unknown name keys; known: query, key, value, attention, mlp_hidden"),
    ({"remat": {"policy": "selective", "save": []}}, "remat.save: empty, so everything is recomputed; that is remat.policy=full"),
    # data
    ({"data.source": None}, "data.source: not given; one source"),
    ({"data.mixture": [{"source": "stdlib"}]}, "data.source: stdlib and data.mixture are both given; keep one"),
    ({"data.source": "text"}, "data.path: required for source text"),
    ({"data.source": "jsonl"}, "data.path: required for source jsonl"),
    ({"data.source": "tokens"}, "data.path: required for source tokens"),
    ({"data.path": "x"}, "data.path: source stdlib reads no files of yours; set data.path=null, or data.source=text"),
    ({"data.eval_path": "x"}, "data.eval_path: source stdlib reads no files of yours"),
    ({"data.field": "body"}, "data.field: body has no effect with source stdlib, only with jsonl; set data.field=text"),
    ({"data.num_tokens": 9}, "data.num_tokens: 9 has no effect with source stdlib, only with synthetic; set data.num_tokens=1000000"),
    ({"data.dtype": "uint32"}, "data.dtype: uint32 has no effect with source stdlib, only with tokens"),
    ({"data.encoding_errors": "replace"}, "data.encoding_errors: replace has no effect with source stdlib, only with text and jsonl"),
    ({"data.source": None, "data.mixture": [{"source": "stdlib"}, {"source": "text"}]}, "data.mixture[1].path: required for source text"),
    ({"data.source": None, "data.mixture": [{"source": "stdlib"}], "data.path": "x"}, "data.path: has no effect beside data.mixture"),
    (
        {"model.vocab_size": 256},
        "model.vocab_size: 256, but tokenizer bytes has 257 ids (256 bytes and end-of-document); try model.vocab_size=257",
    ),
    ({"train.eval_every": 5, "data.eval_fraction": 0.0}, "train.eval_every: 5, but data.eval_fraction=0 holds nothing out"),
    # optimizer (RES-08)
    ({"optimizer.warmup_steps": 11}, "optimizer.warmup_steps: 11 is more than train.steps=10; at most 10 would work"),
    ({"optimizer.decay_steps": 3}, "optimizer.decay_steps: only schedule wsd has a decay of its own length, not cosine"),
    (
        {"optimizer.decay_steps": 9, "optimizer.warmup_steps": 4, "optimizer.schedule": "wsd"},
        "optimizer.decay_steps: 9 + warmup_steps=4 is more than train.steps=10; at most 6 would work",
    ),
    ({"optimizer.momentum": 0.9}, "optimizer.momentum: only sgd and muon have it, not adamw"),
    # checkpoints
    (
        {"checkpoint": {"save_every": 0, "keep_every": 50}},
        "checkpoint.keep_every: 50, but save_every=0 saves only at the end; try checkpoint.save_every=50",
    ),
    (
        {"checkpoint": {"save_every": 30, "keep_every": 50}},
        "checkpoint.keep_every: 50 is not a multiple of checkpoint.save_every=30, so those steps are not saved; 30 or 60 would work",
    ),
    ({"checkpoint.resume": "nevr"}, "checkpoint.resume: 'nevr' is not auto, never or an existing folder"),
    # rules (MSH-10)
    ({"rules.mlp": "tensr"}, "rules.mlp: unknown mesh axis 'tensr'; did you mean tensor?"),
    ({"rules.mlp": ["tensor", "tensor"]}, "rules.mlp: mesh axis tensor is used twice; write [tensor]"),
    ({"rules.embde": "tensor"}, "rules.embde: unknown dim, nearly the name of 'embed'"),
    ({"rules.embed": "data"}, "rules.embed: embed cannot be split over data; write null (zero_stage: 3 shards parameters"),
    ({"rules.mlp": "data"}, "rules.mlp: mlp cannot be split over data; write [tensor] or null (zero_stage: 3"),
    (
        {"rules.batch": "data"},
        "rules.batch: lacks replica, expert, whose devices would all compute the same; write [replica, data, expert]",
    ),
    ({"rules.seq": None}, "rules.seq: lacks context"),
    (
        {"rules.heads": None, "mesh.tensor": 2, "sequence_parallel": False},
        "rules.kv_heads: split over tensor while heads are whole; set rules.kv_heads=null as well",
    ),
    (
        {"rules.mlp": None, "mesh.tensor": 2},
        "rules.mlp: null, but sequence_parallel splits the sequence over mesh.tensor=2 and needs mlp split with it; write [tensor]",
    ),
    ({"rules.vocab": None, "mesh.tensor": 2}, "rules.vocab: null, but sequence_parallel splits the sequence"),
    (
        {"rules.kv_heads": None, "model.num_kv_heads": 4, "mesh.tensor": 2},
        "rules.kv_heads: null, but model.num_kv_heads=4, kept whole, would have to divide mesh.tensor=2; leave rules.kv_heads out",
    ),
]


@pytest.mark.parametrize(("changes", "said"), CASES, ids=[f"{i}-{next(iter(changes))}" for i, (changes, _) in enumerate(CASES)])
def test_one_violation_one_line(changes, said):
    found = check(config(changes), None)
    assert len(found) == 1, found
    assert said in found[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer.warmup_steps": 10},
        {"optimizer.warmup_steps": 0},
        {"optimizer": {"lr": 1.0, "schedule": "wsd", "warmup_steps": 4, "decay_steps": 6}},
        {"optimizer": {"lr": 1.0, "name": "muon", "momentum": 0.95}},
        {"zero_stage": 3},  # no axis to shard over: does nothing
        {"model.num_kv_heads": 2, "mesh.tensor": 4},
        {"model.num_kv_heads": 1, "mesh.tensor": 8},
        {"model.num_kv_heads": 4, "mesh.tensor": 2, "mesh.context": 4, "context.method": "ulysses"},
        {"model.vocab_size": 257, "model.vocab_multiple": 8, "mesh.tensor": 8},
        {"model.vocab_size": 100, "data.source": "synthetic"},
        {"compute_dtype": "float64", "param_dtype": "float64"},
        {"model.attention_dropout": 0.1, "attention": "reference", "mesh.context": 2, "context.method": "all_gather"},
        {"model.sliding_window": 4096},
        {"data.seq_len": 30, "mesh.tensor": 4, "sequence_parallel": False},
        {"rules": {"heads": None, "kv_heads": None, "mlp": None, "vocab": None}, "mesh.tensor": 3, "sequence_parallel": False},
        {"rules.channels": "tensor"},  # a dim of the user's own model
        {"data.source": "text", "data.path": ["a", "b"], "data.eval_path": "c", "data.eval_fraction": 0.0, "train.eval_every": 5},
        {"checkpoint": {"save_every": 50, "keep_every": 100}},
        {"checkpoint.resume": "gs://bucket/run"},
    ],
)
def test_legal(changes):
    assert check(config(changes), None) == []


def test_kv_heads_are_replicated_only_where_tensor_is_a_multiple():
    def kv_axes(tensor: int) -> tuple[str, ...]:
        return layout_of(config({"model.num_kv_heads": 2, "mesh.tensor": tensor}), tensor).split("kv_heads")

    assert (kv_axes(1), kv_axes(2), kv_axes(4), kv_axes(8)) == ((), ("tensor",), (), ())


def test_layout_carries_rules_and_stage():
    layout = layout_of(config({"rules.mlp": None, "zero_stage": 2, "mesh": {"data": -1, "tensor": 2}, "sequence_parallel": False}), 8)
    assert (layout.sizes["data"], layout.split("mlp"), layout.split("heads"), layout.zero_stage) == (4, (), ("tensor",), 2)
    assert layout.block_seq_axes == ()
    with pytest.raises(ConfigError, match="unknown mesh axis"):
        layout_of(config({"rules.mlp": "tenso"}), 1)


def test_many_violations_come_together():
    wrong = {
        "mesh": {"data": 3, "tensor": 16},
        "data.seq_len": 100,
        "data.global_batch_size": 7,
        "optimizer.warmup_steps": 99,
        "model.num_kv_heads": 3,
    }
    found = check(config(wrong), 8)
    for key in (
        "mesh:",
        "data.seq_len:",
        "data.global_batch_size:",
        "optimizer.warmup_steps:",
        "model.num_kv_heads: 3 does not divide model.num_heads",
        "model.num_heads:",
        "model.vocab_size:",
    ):
        assert any(problem.startswith(key) for problem in found), (key, found)


SIZE = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(max_examples=200, deadline=None)
@given(
    mesh=st.fixed_dictionaries({"replica": SIZE, "data": SIZE, "context": SIZE, "tensor": SIZE}),
    heads=SIZE,
    kv_heads=SIZE,
    mlp=st.sampled_from([96, 100, 128]),
    vocab=st.sampled_from([257, 264, 288]),
    seq_len=st.sampled_from([16, 24, 48, 96]),
    batch=st.sampled_from([8, 12, 48]),
    stage=st.sampled_from([0, 1, 2, 3]),
    method=st.sampled_from(["ring", "all_gather", "ulysses"]),
    sequence_parallel=st.booleans(),
)
def test_accepted_means_everything_divides(mesh, heads, kv_heads, mlp, vocab, seq_len, batch, stage, method, sequence_parallel):
    changes = {
        "model": {
            "num_layers": 2,
            "embed_dim": 48,
            "head_dim": 8,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "mlp_dim": mlp,
            "vocab_size": vocab,
        }
    }
    changes |= {"mesh": mesh, "zero_stage": stage, "context.method": method, "sequence_parallel": sequence_parallel}
    run = config(changes | {"data.seq_len": seq_len, "data.global_batch_size": batch})
    context, tensor = mesh["context"], mesh["tensor"]
    divides = (
        heads % tensor == 0
        and heads % kv_heads == 0
        and (kv_heads % tensor == 0 or tensor % kv_heads == 0)
        and mlp % tensor == 0
        and vocab % tensor == 0
        and batch % (mesh["replica"] * mesh["data"]) == 0
        and seq_len % (context * (tensor if sequence_parallel else 1)) == 0
        and (method != "ring" or context == 1 or seq_len % (2 * context) == 0)
        and (method != "ulysses" or (heads // tensor) % context == 0)
    )
    num_devices = mesh["replica"] * mesh["data"] * context * tensor
    found = check(run, num_devices)
    assert (not [problem for problem in found if not problem.startswith("zero_stage")]) == divides, found
    if not found:
        layout = layout_of(run, num_devices)
        for leaf in parameter_table(run.model):
            plan = plan_leaf(layout, leaf.path, leaf.names, leaf.shape)
            assert plan.zero_dim is not None or stage == 0 or not layout.zero_axes or leaf.path.endswith((".scale", ".bias"))
