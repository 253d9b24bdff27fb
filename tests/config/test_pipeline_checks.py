"""What the user can get wrong about a pipeline: one line with both values, the rule and a way out that is tried here; stages and bytes."""

import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config.checks import check, layout_of
from jaxpar.config.depth import head_cost_in_layers, layers_per_stage, schedule_of
from jaxpar.config.errors import ConfigError
from jaxpar.config.flops import forward_flops_per_token
from jaxpar.config.layout import plan_leaf
from jaxpar.config.memory import head_operand_bytes, operand_bytes, state_bytes_per_device
from jaxpar.config.parameters import parameter_table
from jaxpar.config.run import RunConfig
from jaxpar.config.stages import EMPTY, Stages, balanced_layers
from jaxpar.schedule.actions import Shape
from jaxpar.schedule.from_csv import write_csv
from jaxpar.schedule.library import FAMILIES, NAMES, build_schedule
from jaxpar.schedule.lower import lower
from jaxpar.schedule.measure import most_deferred
from tests.cli.conftest import Command
from tests.config.dotted import nested
from tests.equivalence import harness

Changes = dict[str, Any]

FLOAT32: Changes = {"param_dtype": "float32", "compute_dtype": "float32"}
LATENT: Changes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}

BASE: Changes = {"mesh.pipe": 4, "num_microbatches": 8, "model.num_layers": 8, "data.global_batch_size": 16}


def config(*changes: Changes) -> RunConfig:
    """A legal config on four stages, with dotted changes."""
    merged: Changes = dict(BASE)
    for change in changes:
        merged |= change
    return harness.config(nested(merged))


def test_the_base_is_legal_under_every_schedule() -> None:
    for name in NAMES:
        assert check(config({"pipeline.schedule": name}), None) == []


def written(fix: Changes) -> str:
    """Overrides as a message offers them."""
    return " ".join(f"{key}={'null' if value is None else value}" for key, value in fix.items())


# (changes, the line's beginning, ways out that the line offers). A way out is written as the overrides that it is, unless said otherwise.
CASES: dict[str, tuple[Changes, str, list[Changes]]] = {
    "unknown schedule": ({"pipeline.schedule": "1f1bb"}, "pipeline.schedule: '1f1bb' is no schedule; did you mean 1f1b?", []),
    "nearly a name": ({"pipeline.schedule": "zbv"}, "pipeline.schedule: 'zbv' is no schedule; did you mean zb_v?", []),
    "no name at all": (
        {"pipeline.schedule": "fast"},
        "pipeline.schedule: 'fast' is no schedule; schedules are gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, dualpipe_v, "
        "or the path of a .csv file",
        [],
    ),
    "no number of chunks": (
        {"pipeline.schedule": "interleaved:two"},
        "pipeline.schedule: interleaved:two: chunks a stage are a number of 1 or more; interleaved:2 would work",
        [],
    ),
    "two numbers of chunks": (
        {"pipeline.schedule": "interleaved:2", "pipeline.chunks_per_stage": 3},
        "pipeline.schedule: interleaved:2 says 2 chunks a stage, and 3 are asked for; write interleaved, or interleaved:3",
        [],
    ),
    "chunks of 1f1b": (
        {"pipeline.schedule": "1f1b", "pipeline.chunks_per_stage": 2},
        "pipeline.chunks_per_stage: 2, but pipeline.schedule=1f1b always has 1; ",
        [{"pipeline.chunks_per_stage": None}, {"pipeline.schedule": "interleaved"}],
    ),
    "chunks of zb_v": (
        {"pipeline.schedule": "zb_v", "pipeline.chunks_per_stage": 1},
        "pipeline.chunks_per_stage: 1, but pipeline.schedule=zb_v always has 2; ",
        [{"pipeline.chunks_per_stage": None}, {"pipeline.schedule": "interleaved"}],
    ),
    "chunks of a named number": (
        {"pipeline.schedule": "zb_v:2"},
        "pipeline.schedule: zb_v:2: zb_v has a fixed number of chunks a stage, 2; write zb_v",
        [],
    ),
    "too few microbatches": (
        {"pipeline.schedule": "dualpipe_v", "num_microbatches": 4},
        "num_microbatches: 4, but pipeline.schedule=dualpipe_v needs 8 or more with mesh.pipe=4; ",
        [{"num_microbatches": 8}, {"pipeline.schedule": "zb_v"}],
    ),
    "too few microbatches for a batch that 8 does not divide": (
        {"pipeline.schedule": "dualpipe_v", "num_microbatches": 4, "data.global_batch_size": 24, "mesh.data": 2},
        "num_microbatches: 4, but pipeline.schedule=dualpipe_v needs 8 or more with mesh.pipe=4; ",
        [{"num_microbatches": 12}, {"pipeline.schedule": "zb_v"}],
    ),
    "too few microbatches and rows": (
        {"pipeline.schedule": "dualpipe_v", "num_microbatches": 1, "data.global_batch_size": 6, "mesh.data": 2},
        "num_microbatches: 1, but pipeline.schedule=dualpipe_v needs 8 or more with mesh.pipe=4; ",
        [{"num_microbatches": 8, "data.global_batch_size": 16}, {"pipeline.schedule": "zb_v"}],
    ),
    "more stages than layers": (
        {"mesh.pipe": 16},
        "model.num_layers: 8, fewer than the 16 stages of mesh.pipe=16; ",
        [{"model.num_layers": 16}, {"mesh.pipe": 8}],
    ),
    "more stages than layers, in a V": (
        {"mesh.pipe": 16, "pipeline.schedule": "zb_v"},
        "model.num_layers: 8, fewer than the 16 stages of mesh.pipe=16; ",
        [{"model.num_layers": 16}, {"mesh.pipe": 8}],
    ),
    "more stages than the only layer": (
        {"model.num_layers": 1, "pipeline.schedule": "zb_v"},
        "model.num_layers: 1, fewer than the 4 stages of mesh.pipe=4; ",
        [{"model.num_layers": 4}, {"mesh.pipe": 1}],
    ),
    "more stages than layers, with a list": (
        {"model.num_layers": 3, "pipeline.layers_per_stage": (1, 1, 1)},
        "model.num_layers: 3, fewer than the 4 stages of mesh.pipe=4; ",
        [{"model.num_layers": 4, "pipeline.layers_per_stage": None}, {"mesh.pipe": 3, "pipeline.layers_per_stage": None}],
    ),
    "a list that is too short": (
        {"pipeline.layers_per_stage": (2, 3, 3)},
        "pipeline.layers_per_stage: [2, 3, 3] has 3 numbers, but mesh.pipe=4 makes 4 stages; [2, 2, 2, 2] would work",
        [],
    ),
    "a list without its chunks": (
        {"pipeline.layers_per_stage": (2, 2, 2, 2), "pipeline.schedule": "interleaved", "model.num_layers": 9},
        "pipeline.layers_per_stage: [2, 2, 2, 2] has 4 numbers, but mesh.pipe=4 x 2 chunks a stage makes 8 stages; "
        "[2, 1, 1, 1, 1, 1, 1, 1] would work",
        [],
    ),
    "a list of other layers": (
        {"pipeline.layers_per_stage": (2, 2, 2, 1)},
        "pipeline.layers_per_stage: [2, 2, 2, 1] is 7 layers, but model.num_layers=8; [2, 2, 2, 2] would work",
        [],
    ),
    "an empty list": (
        {"pipeline.layers_per_stage": ()},
        "pipeline.layers_per_stage: [] has 0 numbers, but mesh.pipe=4 makes 4 stages; [2, 2, 2, 2] would work",
        [],
    ),
    "stages without layers": (
        {"pipeline.layers_per_stage": (4, 0, 4, 0)},
        "pipeline.layers_per_stage: [4, 0, 4, 0] gives no layer to stage 1, 3 of mesh.pipe=4, and each needs 1 or more; "
        "[2, 2, 2, 2] would work",
        [],
    ),
    "a V whose stage has no layer in either chunk": (
        {"pipeline.layers_per_stage": (2, 0, 1, 2, 2, 1, 0, 0), "pipeline.schedule": "zb_v"},
        "pipeline.layers_per_stage: [2, 0, 1, 2, 2, 1, 0, 0] gives no layer to stage 1 of mesh.pipe=4, and each needs 1 or more; "
        "[1, 1, 1, 1, 1, 1, 1, 1] would work",
        [],
    ),
    "fewer layers than none": (
        {"pipeline.layers_per_stage": (4, -1, 4, 1)},
        "pipeline.layers_per_stage: [4, -1, 4, 1] gives a stage -1 layers, fewer than 0; [2, 2, 2, 2] would work",
        [],
    ),
    "fewer layers than none, on one stage": (
        {"pipeline.layers_per_stage": (-1, 9), "mesh.pipe": 1},
        "pipeline.layers_per_stage: [-1, 9] gives a stage -1 layers, fewer than 0; ",
        [{"pipeline.layers_per_stage": None}],
    ),
    "zb with full remat": (
        {"pipeline.schedule": "zb_h1", "remat.policy": "full"},
        # by hand: 2 rows x 32 tokens x 8 bytes x (4 x 64 + 4 x 64 + 3 x 128) a layer, 2 layers, 4 microbatches on the last stage;
        # x (64 + 96) of the head for each
        "remat.policy: full, but pipeline.schedule=zb_h1 keeps the operands of every weight gradient from I to W: "
        "0.438 MiB a layer and microbatch, 0.0781 MiB of the head, 3.81 MiB at the peak on a device, whatever remat frees; ",
        [{"remat.policy": "none"}, {"pipeline.schedule": "1f1b"}],
    ),
    "dualpipe with full remat": (
        {"pipeline.schedule": "dualpipe_v", "pipeline.chunks_per_stage": 2, "remat.policy": "full", "pipeline.layers_per_stage": (1,) * 8},
        "remat.policy: full, but pipeline.schedule=dualpipe_v keeps",
        [
            {"remat.policy": "none"},
            {"pipeline.schedule": "1f1b", "pipeline.chunks_per_stage": None, "pipeline.layers_per_stage": None},
        ],
    ),
}

# Ways out that a line words in its own way.
IN_WORDS: dict[str, list[Changes]] = {
    "unknown schedule": [{"pipeline.schedule": "1f1b"}],
    "nearly a name": [{"pipeline.schedule": "zb_v"}],
    "no name at all": [{"pipeline.schedule": name} for name in NAMES],
    "no number of chunks": [{"pipeline.schedule": "interleaved:2"}],
    "two numbers of chunks": [
        {"pipeline.schedule": "interleaved", "model.num_layers": 12},
        {"pipeline.schedule": "interleaved:3", "model.num_layers": 12},
    ],
    "chunks of a named number": [{"pipeline.schedule": "zb_v"}],
    "a list that is too short": [{"pipeline.layers_per_stage": (2, 2, 2, 2)}],
    "a list without its chunks": [{"pipeline.layers_per_stage": (2, 1, 1, 1, 1, 1, 1, 1)}],
    "a list of other layers": [{"pipeline.layers_per_stage": (2, 2, 2, 2)}],
    "an empty list": [{"pipeline.layers_per_stage": (2, 2, 2, 2)}],
    "stages without layers": [{"pipeline.layers_per_stage": (2, 2, 2, 2)}],
    "a V whose stage has no layer in either chunk": [{"pipeline.layers_per_stage": (1,) * 8}],
    "fewer layers than none": [{"pipeline.layers_per_stage": (2, 2, 2, 2)}],
    "zb with full remat": [{"remat.policy": "selective"}],
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_whose_ways_out_work(case: str) -> None:
    changes, said, offered = CASES[case]
    found = check(config(changes), None)
    assert len(found) == 1, found
    assert found[0].startswith(said)
    assert "\n" not in found[0]
    for fix in offered:
        assert written(fix) in found[0][len(said) :]
    fixes = offered + IN_WORDS.get(case, [])
    assert fixes
    for fix in fixes:
        assert check(config(changes, fix), None) == [], fix


CSV = {
    "an action that is missing": ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1\n", "row 2: virtual stage 1: no backward (B, or I and W) for microbatch 1"),
    "a W that is missing": ("0F0,0I0,0W0,0F1,0I1\n1F0,1B0,1F1,1B1\n", "row 1: virtual stage 0: I without W for microbatch 1"),
    "a cycle": (
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
        "row 1, cell 2: deadlock: row 1 at 0B0 waits for 1B0 of row 2; row 2 at 1F1 waits",
    ),
    "a duplicate": ("0F0,0B0,0F0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "row 1, cell 3: 0F0 comes again; once is right"),
    "a wrong stage": (
        "0F0,0B0,0F1,0B1,1F1\n1F0,1B0,1B1\n",
        "row 1, cell 5: 1F1 is in the wrong row; virtual stage 1 belongs in row 2, and 0 in this one",
    ),
    "no schedule": ("name,value\n", "row 1, cell 1: 'name' is no action; write virtual stage, kind, microbatch: 0F0"),
}
RIGHT = "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("case", CSV)
def test_a_damaged_csv_is_named_with_row_and_cell(case: str, tmp_path: Path) -> None:
    text, said = CSV[case]
    file = tmp_path / "own.csv"
    run = config({"mesh.pipe": 2, "num_microbatches": 2, "pipeline.schedule": str(file)})
    file.write_text(text)
    found = check(run, None)
    assert found[0].startswith(f"pipeline.schedule: {file}: {said}")
    assert len(found) == (2 if case == "no schedule" else 1), found
    with pytest.raises(ConfigError, match="row"):
        layout_of(run, 2)
    file.write_text(RIGHT)
    assert check(run, None) == []


def test_a_csv_that_is_not_there_can_be_made(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    run = config({"pipeline.schedule": str(file), "num_microbatches": 16})
    (found,) = check(run, None)
    made = f"`jaxpar schedule 1f1b --stages 4 --microbatches 16 --csv {file}` writes one to start from"
    assert found == f"pipeline.schedule: {file}: cannot be read: No such file or directory; {made}"
    write_csv(build_schedule("1f1b", 4, 16), file)
    assert check(run, None) == []


def test_a_csv_of_other_sizes(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    write_csv(build_schedule("zb_v", 2, 8), file)
    changes: Changes = {"pipeline.schedule": str(file), "num_microbatches": 4, "pipeline.chunks_per_stage": 1}
    assert check(config(changes), None) == [
        f"mesh.pipe: 4, but {file} is a schedule of 2 stages; mesh.pipe=2 would work",
        f"num_microbatches: 4, but {file} is a schedule of 8 microbatches; num_microbatches=8 would work",
        f"pipeline.chunks_per_stage: 1, but {file} is a schedule of 2 chunks a stage; pipeline.chunks_per_stage=2 would work",
    ]
    fixed: Changes = {"mesh.pipe": 2, "num_microbatches": 8, "pipeline.chunks_per_stage": 2}
    assert check(config(changes, fixed), None) == []
    assert check(config(changes, fixed, {"pipeline.chunks_per_stage": None}), None) == []


@pytest.mark.parametrize(("name", "layers", "fix"), [
    ("1f1b", 3, {"mesh.pipe": 3, "pipeline.schedule": "1f1b"}),
    ("zb_v", 3, {"mesh.pipe": 3, "pipeline.schedule": "1f1b", "pipeline.chunks_per_stage": None}),
])  # fmt: skip
def test_a_csv_with_more_stages_than_layers(name: str, layers: int, fix: Changes, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    write_csv(build_schedule(name, 4, 8), file)
    chunks = FAMILIES[name].num_chunks
    changes: Changes = {"pipeline.schedule": str(file), "model.num_layers": layers, "pipeline.chunks_per_stage": chunks}
    (found,) = check(config(changes), None)
    assert found.startswith(f"model.num_layers: {layers}, fewer than the 4 stages of mesh.pipe=4")
    assert written(fix) in found
    assert check(config(changes, fix), None) == []


def test_a_csv_full_of_faults_does_not_fill_the_screen(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    write_csv(build_schedule("1f1b", 2, 64), file)
    file.write_text(file.read_text().replace("1B", "1X"))
    found = check(config({"mesh.pipe": 2, "num_microbatches": 64, "pipeline.schedule": str(file), "data.global_batch_size": 64}), None)
    assert len(found) == 21
    assert found[-1] == f"pipeline.schedule: {file}: and 44 more"


def test_all_at_once() -> None:
    wrong: Changes = {
        "num_microbatches": 3,
        "pipeline.schedule": "dualpipe_v",
        "pipeline.layers_per_stage": (4, 4),
        "remat.policy": "full",
        "optimizer.warmup_steps": 99,
        "data.seq_len": 31,
        "mesh.context": 2,
    }
    keys = [problem.split(":")[0] for problem in check(config(wrong), 8)]
    assert sorted(keys) == [
        "data.global_batch_size",
        "data.seq_len",
        "num_microbatches",
        "optimizer.warmup_steps",
        "pipeline.layers_per_stage",
        "remat.policy",
    ]
    found = check(config({"pipeline.schedule": "zbv", "mesh.pipe": 9, "pipeline.layers_per_stage": (-1,)}), None)
    assert [problem.split(":")[0] for problem in found] == ["pipeline.schedule", "model.num_layers"]


LEGAL: list[Changes] = [
    {"pipeline.schedule": "interleaved", "pipeline.chunks_per_stage": 1},
    {"pipeline.schedule": "interleaved:2", "pipeline.chunks_per_stage": 2},
    {"pipeline.schedule": "zb_v", "pipeline.chunks_per_stage": 2},
    {"pipeline.schedule": "interleaved", "pipeline.chunks_per_stage": 2, "model.num_layers": 13},  # chunks need not divide the layers
    {"pipeline.schedule": "interleaved:3"},  # and some may be without
    {"pipeline.schedule": "zb_v", "pipeline.layers_per_stage": (0, 0, 1, 2, 1, 1, 1, 2)},
    {"pipeline.schedule": "dualpipe_v", "num_microbatches": 16},
    {"num_microbatches": 1},
    {"pipeline.layers_per_stage": (1, 3, 3, 1)},
    {"pipeline.layers_per_stage": "balance"},
    {"pipeline.schedule": "zb_h2", "remat.policy": "selective"},
    {"pipeline.schedule": "interleaved", "remat.policy": "full", "pipeline.stash": "inputs"},
]


@pytest.mark.parametrize("changes", LEGAL)
def test_legal(changes: Changes) -> None:
    run = config(changes)
    assert check(run, None) == []
    stages = layout_of(run, None).stages
    assert stages is not None
    assert sum(stages.layers_per_stage) == run.model.num_layers


@pytest.mark.parametrize(
    "changes",
    [
        *LEGAL,
        {"pipeline.schedule": "dualpipe_v", "num_microbatches": 1},
        {"pipeline.schedule": "zb_v", "remat.policy": "full", "model.num_layers": 1},
        {"pipeline.layers_per_stage": (7, 8, 8, 7)},
        {"pipeline.schedule": "of_the_cluster.csv"},
        {"pipeline.stash": "inputs"},
    ],
)
def test_what_is_made_for_a_pipeline_stays_legal_on_one_stage(changes: Changes) -> None:
    run = config(changes, {"mesh.pipe": 1})
    assert check(run, 1) == []
    assert layout_of(run, 1).stages is None


def test_what_devices_are_left_for_stages() -> None:
    """-1 needs the number of devices: what depends on it is checked when that is known, names at once."""
    left: Changes = {"mesh.pipe": -1, "mesh.data": 2}
    assert check(config(left, {"model.num_layers": 3}), None) == []
    with pytest.raises(ConfigError, match=r"mesh\.pipe: -1 needs the number of devices"):
        layout_of(config(left), None)
    stages = layout_of(config(left), 8).stages
    assert stages is not None
    assert stages.layers_per_stage == (2, 2, 2, 2)
    assert layout_of(config(left), 2).stages is None
    with pytest.raises(ConfigError, match=r"model\.num_layers: 3, fewer than the 4 stages of mesh\.pipe=4; .*or mesh\.pipe=3"):
        layout_of(config(left, {"model.num_layers": 3}), 8)
    (found,) = check(config(left), 7)
    assert found.startswith("mesh.pipe: -1, but 7 devices do not divide by the other axes: data 2 = 2")
    (found,) = check(config(left, {"pipeline.schedule": "1f1bb"}), None)
    assert found.endswith("did you mean 1f1b?")


@pytest.mark.parametrize("value", ["ballance", 4, [1.5, 2], [True, 2], ["a"], {"first": 2}])
def test_layers_per_stage_that_is_no_list_of_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="balance, null or a list of whole numbers, one for each stage") as error:
        config({"pipeline.layers_per_stage": value})
    assert str(error.value).count("layers_per_stage") == 1


# The operands that zero-bubble schedules keep.


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "dualpipe_v", "1f1b"])
@pytest.mark.parametrize("microbatches", [8, 11])
def test_deferred_slots_are_those_of_the_tick_table(name: str, microbatches: int) -> None:
    schedule = build_schedule(name, 4, microbatches)
    slots = lower(schedule).num_slots
    assert most_deferred(schedule) == slots["deferred"]
    assert most_deferred(schedule, schedule.shape.num_virtual - 1) == slots["head"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mesh.tensor": 2},
        {"mesh.tensor": 2, "model.num_kv_heads": 2, **FLOAT32},
        {"model.activation": "gelu", "model.num_kv_heads": 2, "mesh.context": 2},
        {"mesh.tensor": 2, "model.mla": LATENT},
        {"mesh.tensor": 2, "model.mla": LATENT, "sequence_parallel": False, **FLOAT32},
        {"mesh.tensor": 2, "mesh.context": 2, "model.mla": LATENT | {"q_lora_rank": None}},
        {"compute_dtype": "bfloat16", "param_dtype": "float32"},
        {"compute_dtype": "bfloat16", "param_dtype": "float32", "loss_chunk_tokens": 20, "mesh.data": 2},
        {"model.vocab_size": 90, "model.vocab_multiple": 64, "mesh.tensor": 2, "model.tied_embeddings": True},
    ],
)
def test_stated_cost_is_what_the_program_keeps(changes: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.compiled.test_pipeline_program import carried
    from tests.programs import nbytes

    changes = {"pipeline.schedule": "zb_h2", "remat.policy": "full", "mesh.pipe": 2, **changes}
    run = config(changes)
    monkeypatch.setattr("jaxpar.config.checks.pipeline_problems", lambda *_: iter(()))
    with jax.enable_x64(True):
        parts = harness.parts_of(run)
        table = parts.forward.ticks
        assert table is not None
        types = carried(parts)
    rows, slots = 4, {table.num_slots[pool] for pool in ("stash", "deferred")}
    of_layers = [i for i, aval in enumerate(types) if len(aval.shape) > 3 and aval.shape[0] in slots and aval.shape[1] == rows]
    kept = sum(nbytes(types[i]) for i in of_layers)
    tokens = 2 * run.data.seq_len // run.mesh.context // run.mesh.data
    boundary = run.model.embed_dim // (run.mesh.tensor if run.sequence_parallel else 1) * jnp.dtype(run.compute_dtype).itemsize
    stash = table.num_slots["stash"] * rows * tokens * boundary  # the input of each layer
    assert kept - stash == table.num_slots["deferred"] * rows * operand_bytes(run)
    of_head = itertools.takewhile(lambda aval: aval.shape[0] == table.num_slots["head"], types[of_layers[-1] + 1 :])
    of_head = [aval for aval in of_head if len(aval.shape) > 1]  # beside them one number, the scale of the loss
    assert sum(map(nbytes, of_head)) == table.num_slots["head"] * head_operand_bytes(run)


# Which layers a stage holds.


@st.composite
def stages(draw: st.DrawFn) -> Stages:
    shape = Shape(draw(st.integers(1, 5)), 1, draw(st.integers(1, 4)), draw(st.sampled_from(["loop", "v"])))
    counts = draw(st.lists(st.integers(0, 4), min_size=shape.num_virtual, max_size=shape.num_virtual).filter(any))
    return Stages(shape, tuple(counts))


@given(stages())
def test_rows_and_layers_are_inverse(stages: Stages) -> None:
    shape = stages.shape
    num_layers = sum(stages.layers_per_stage)
    assert len(stages.layer_of_row) == stages.num_rows
    assert len(stages.row_of_layer) == num_layers
    assert [stages.layer_of_row[row] for row in stages.row_of_layer] == list(range(num_layers))
    assert stages.layer_of_row.count(EMPTY) == stages.num_rows - num_layers
    assert stages.even == (EMPTY not in stages.layer_of_row)
    layer = 0
    for virtual, count in enumerate(stages.layers_per_stage):
        assert stages.first_layer(virtual) == layer
        chunk = (shape.stage(virtual) * shape.num_chunks + shape.chunk(virtual)) * stages.rows_per_chunk
        assert stages.row_of_layer[layer : layer + count] == tuple(range(chunk, chunk + count))
        layer += count


def test_rows_by_hand() -> None:
    loop = Stages(Shape(2, 1, 2, "loop"), (1, 2, 1, 1))
    assert loop.layer_of_row == (0, EMPTY, 3, EMPTY, 1, 2, 4, EMPTY)
    back = Stages(Shape(2, 1, 2, "v"), (1, 2, 1, 1))
    assert back.layer_of_row == (0, EMPTY, 4, EMPTY, 1, 2, 3, EMPTY)
    assert back.row_of_layer == (0, 4, 5, 6, 2)
    assert Stages(Shape(3, 1), (2, 2, 2)).layer_of_row == tuple(range(6))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 5), st.floats(0, 7))
def test_balanced_layers_have_the_lowest_cost(num_virtual: int, more: int, head: float) -> None:
    num_layers = num_virtual + more
    counts = balanced_layers(num_layers, num_virtual, head)

    def cost(counts: tuple[int, ...]) -> float:
        return max([*counts[:-1], counts[-1] + head])

    assert (len(counts), sum(counts), min(counts) >= 1) == (num_virtual, num_layers, True)
    every = (c for c in itertools.product(range(1, num_layers + 1), repeat=num_virtual) if sum(c) == num_layers)
    assert cost(counts) == min(map(cost, every))
    if others := counts[:-1]:
        assert max(others) - min(others) <= 1
        assert list(others) == sorted(others, reverse=True)


@given(st.integers(1, 32), st.integers(0, 200), st.floats(0, 300))
def test_balanced_layers_of_large_models(num_virtual: int, more: int, head: float) -> None:
    counts = balanced_layers(num_virtual + more, num_virtual, head)
    assert (len(counts), sum(counts), min(counts) >= 1) == (num_virtual, num_virtual + more, True)


@given(st.integers(1, 8), st.integers(1, 4), st.sampled_from(["loop", "v"]), st.data())
def test_layers_fewer_than_chunks_are_spread_over_devices(num_stages: int, num_chunks: int, placement: Any, data: st.DataObject) -> None:
    shape = Shape(num_stages, 1, num_chunks, placement)
    num_layers = data.draw(st.integers(num_stages, shape.num_virtual))
    counts = balanced_layers(num_layers, shape.num_virtual, 3.0)
    held = [sum(n for v, n in enumerate(counts) if shape.stage(v) == stage) for stage in range(num_stages)]
    assert (sum(counts), max(counts)) == (num_layers, 1)
    assert max(held) - min(held) <= 1
    assert Stages(shape, counts).empty == shape.num_virtual - num_layers


def test_layers_without_a_list() -> None:
    """Equal where they divide, however heavy the head, unless balance is asked for; else the head counts."""
    heavy: Changes = {"model.vocab_size": 5000}
    asked: Changes = {"pipeline.layers_per_stage": "balance"}
    run = config(heavy)
    layer = (forward_flops_per_token(run.model, 32) - 2 * 64 * 5000) / 8
    assert head_cost_in_layers(run) == pytest.approx(2 * 64 * 5000 / layer)
    assert 6 < head_cost_in_layers(run) < 8

    def found(*changes: Changes) -> tuple[int, ...]:
        return layers_per_stage(config(*changes), schedule_of(config(*changes), 4).shape)

    assert found(heavy) == (2, 2, 2, 2)
    assert found(heavy, asked) == (3, 2, 2, 1)
    assert found(heavy, {"model.num_layers": 9}) == (3, 3, 2, 1)
    assert found({"model.num_layers": 9}) == found({"model.num_layers": 9}, asked) == (3, 2, 2, 2)
    assert found({"pipeline.layers_per_stage": (1, 3, 3, 1)}) == (1, 3, 3, 1)


# What a device holds.


def test_stored_shape_has_room_for_the_largest_chunk() -> None:
    layout = layout_of(config({"model.num_layers": 9, "pipeline.layers_per_stage": (3, 2, 2, 2)}), 4)
    assert layout.stored_shape(("layers", "embed", "mlp"), (9, 64, 128)) == (12, 64, 128)
    assert layout.stored_shape(("vocab", "embed"), (96, 64)) == (96, 64)
    assert layout_of(config({"mesh.pipe": 1}), 1).stored_shape(("layers", "embed"), (8, 64)) == (8, 64)
    chunks = layout_of(config({"model.num_layers": 9, "pipeline.schedule": "zb_v"}), 4)
    assert chunks.stored_shape(("layers", "embed"), (9, 64)) == (16, 64)


def test_bytes_by_hand() -> None:
    """9 layers on 4 stages x 2: 3 rows each; embedding and head over 8 devices from ZeRO-1 on, over none before."""
    changes: Changes = {"model.num_layers": 9, "mesh.data": 2, "optimizer.name": "adamw"}
    matrices, norms, ends = 4 * 64 * 64 + 3 * 64 * 128, 2 * 64, 2 * 96 * 64
    whole, split = 3 * (matrices + norms) + ends + 64, 3 * (matrices // 2 + norms) + ends // 8 + 64
    for stage, want in {0: (whole,) * 3, 1: (whole, whole, split), 2: (whole, split, split), 3: (split,) * 3}.items():
        run = config(changes, {"zero_stage": stage})
        found = state_bytes_per_device(run, layout_of(run, 8))
        assert (found.parameters, found.gradients, found.optimizer) == (8 * want[0], 8 * want[1], 2 * 8 * want[2])
        assert all(leaf.path.endswith(".scale") for leaf in found.replicated)


def test_where_pipe_and_data_do_not_divide_data_alone_does() -> None:
    run = config({"model.vocab_size": 90, "model.embed_dim": 72, "model.head_dim": 8, "mesh.pipe": 4, "mesh.data": 2, "zero_stage": 1})
    layout = layout_of(run, 8)
    rows = [(leaf.path, leaf.names, layout.stored_shape(leaf.names, leaf.shape)) for leaf in parameter_table(run.model)]
    plans = {path: plan_leaf(layout, path, names, shape) for path, names, shape in rows}
    table = plans["embed.tokens.table"]
    assert (table.zero_dim, table.zero_axes) == (1, ("pipe", "data"))  # 72 divides by 8, 90 does not
    assert plans["blocks.mlp.up.kernel"].zero_axes == ("data",)
    odd = config({"model.vocab_size": 90, "model.embed_dim": 66, "model.head_dim": 8, "mesh.data": 2, "zero_stage": 1})
    assert plan_leaf(layout_of(odd, 8), "embed.tokens.table", ("vocab", "embed"), (90, 66)).zero_axes == ("data",)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd", "adafactor"])
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.data": 2, "zero_stage": 1},
        {"mesh.pipe": 2, "mesh.data": 2, "mesh.tensor": 2, "zero_stage": 3, "pipeline.schedule": "zb_v", "model.tied_embeddings": True},
    ],
)
def test_bytes_equal_the_real_state(optimizer: str, changes: Changes) -> None:
    """Uneven depth: what is stored, rows of no layer included. (3,) are the coefficients of muon's polynomial."""
    sizes: Changes = {"model.embed_dim": 128, "model.mlp_dim": 256, "model.vocab_size": 256, "model.num_layers": 7}
    run = config(sizes, FLOAT32, changes, {"optimizer.name": optimizer})
    parts = harness.parts_of(run)
    found = state_bytes_per_device(run, parts.layout)

    def here(tree: Any) -> int:
        floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.shape not in ((), (3,))]
        return sum(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in floats)

    state = parts.placement.state
    assert found.parameters == here(state.params)
    assert found.optimizer == here(state.opt_state)


# Through the command line.


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("pipeline"), Path(__file__).parents[2] / "configs" / "run" / "quickstart.yaml")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("mesh.pipe=16", "model.num_layers=4"), ("1 problem", "model.num_layers: 4, fewer than the 16 stages of mesh.pipe=16")),
        (
            ("mesh.pipe=2", "pipeline.schedule=zbv", "pipeline.layers_per_stage=[-1,5]", "optimizer.warmup_steps=999"),
            ("3 problems", "did you mean zb_v?", "gives a stage -1 layers", "optimizer.warmup_steps: 999"),
        ),
        (
            ("mesh.pipe=-1", "mesh.fake_devices=8", "mesh.context=1", "pipeline.schedule=zb_v", "remat.policy=full"),
            ("mesh.fake_devices=8: 1 problem", "remat.policy: full, but pipeline.schedule=zb_v", "MiB at the peak"),
        ),
        (("mesh.pipe=2", "num_microbatches=2", "pipeline.schedule=cycle.csv"), ("1 problem", "cycle.csv: row 1, cell 2: deadlock")),
        (("pipeline.layers_per_stage=most", "pipeline.stash=input"), ("2 problems", "balance, null or a list", "try inputs")),
    ],
)
def test_exit_2_with_a_message(command: Command, overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    (command.folder / "cycle.csv").write_text(CSV["a cycle"][0])
    code, _, err = command.train("run.dir=run", *overrides)
    assert code == 2, err
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert not (command.folder / "run" / "checkpoints").exists()
