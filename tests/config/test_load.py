"""Loading: includes, overrides, YAML as people mean it, and errors that come together."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config.errors import ConfigError
from jaxpar.config.load import json_schema, load_config, to_yaml, validate
from jaxpar.config.run import RunConfig
from jaxpar.config.yaml_text import parse

MODEL = "model: {num_layers: 2, embed_dim: 64, num_heads: 4, mlp_dim: 128, vocab_size: 257}\n"
REST = "data: {source: stdlib, seq_len: 32, global_batch_size: 8}\noptimizer: {lr: 1e-3}\ntrain: {steps: 10}\n"


@pytest.fixture
def write(tmp_path: Path):
    def one(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return one


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_name_and_folder_follow_the_file(write):
    config = load_config(write(MODEL + REST, "first.yaml"))
    assert (config.name, config.run.dir) == ("first", "runs/first")
    assert load_config(write(MODEL + REST), ["run.dir=elsewhere"]).run.dir == "elsewhere"


def test_includes_come_from_parents_and_later_wins(write):
    write(MODEL + "seed: 1\nzero_stage: 0\n", "configs/model/a.yaml")
    write("seed: 2\nmodel: {num_layers: 3}\n", "configs/mesh/b.yaml")
    path = write("include: [model/a.yaml, mesh/b.yaml]\nmodel: {mlp_dim: 256}\n" + REST, "configs/run/deep/x.yaml")
    config = load_config(path, ["model.num_heads=2"])
    assert (config.seed, config.zero_stage) == (2, 0)
    assert (config.model.num_layers, config.model.mlp_dim, config.model.num_heads, config.model.embed_dim) == (3, 256, 2, 64)


def test_include_from_outside_configs(write):
    write(MODEL, "configs/model/a.yaml")
    assert load_config(write("include: model/a.yaml\n" + REST, "mine/x.yaml")).model.num_layers == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("include: [no/such.yaml]\n", "no file 'no/such.yaml'"),
        ("include: [run.yaml]\n", "run.yaml -> run.yaml"),
        ("include: {a: b}\n", "is not a list of files"),
        ("", "the file is empty"),
        ("- a\n- b\n", "not a list"),
        ("seed: 1\nmodel: [1, 2\n", "line 3"),
        ("seed: 1\nseed: 2\n", "key 'seed' is written twice, on lines 1 and 2"),
        ("mesh:\n  data: 2\n  data: 4\n", "key 'data' is written twice, on lines 2 and 3"),
        ("a:\tb: c\n", "line 1"),
        ("seed: 017\n", "line 1, column 7: 017 could be octal: write 17"),
        ("1: 2\n", "key '1' is not text"),
    ],
)
def test_a_bad_file_is_told(write, text, said):
    [problem] = problems(write(text))
    assert said in problem


def test_a_missing_file_names_its_neighbours(write):
    path = write(MODEL + REST, "here.yaml")
    with pytest.raises(ConfigError, match=r"no such file; beside it: .*here\.yaml"):
        load_config(path.with_name("there.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path.parent)


def test_not_utf8(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8: byte 0xff at offset 6"):
        load_config(tmp_path / "x.yaml")


def test_byte_order_mark_is_ignored(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xef\xbb\xbf" + (MODEL + REST).encode())
    assert load_config(tmp_path / "x.yaml").train.steps == 10


# CFG-01: PyYAML alone reads 1e-4 as text, 017 as 15 and 1:30 as 90.
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3e-4", 3e-4),
        ("1e4", 1e4),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000", 1000),
        ("0", 0),
        ("-7", -7),
        ("0x10", 16),
        ("no", False),
        ("On", True),
        ("null", None),
        ("1:30", "1:30"),
        ("'017'", "017"),
        ("2024-01-02", "2024-01-02"),
        ("1e", "1e"),
    ],
)
def test_numbers_and_words(text, value):
    assert parse(text, "test") == value
    assert type(parse(text, "test")) is type(value)


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("3e-4", 3e-4), ("1e4", 1e4), ("1_000", 1000.0)])
def test_learning_rates_in_file_and_override(write, text, value):
    path = write(MODEL + REST.replace("1e-3", text))
    assert load_config(path).optimizer.lr == value
    assert load_config(write(MODEL + REST), [f"optimizer.lr={text}"]).optimizer.lr == value


# CFG-04
@pytest.mark.parametrize(
    ("word", "value"), [("false", False), ("False", False), ("0", False), ("no", False), ("true", True), ("1", True), ("on", True)]
)
def test_bool_overrides(write, word, value):
    config = load_config(write(MODEL + REST), [f"log.tensorboard={word}"])
    assert config.log.tensorboard is value
    assert f"tensorboard: {str(value).lower()}" in to_yaml(config)


def test_bool_in_file_stays_and_maybe_is_an_error(write):
    assert load_config(write(MODEL + REST + "sequence_parallel: false\n")).sequence_parallel is False
    [problem] = problems(write(MODEL + REST), "log.tensorboard=maybe")
    assert problem.startswith("log.tensorboard: 'maybe'")
    assert problem.endswith("try true or false")


# CFG-02
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.learing_rate=1", "optimizer.learing_rate: unknown key; did you mean optimizer.lr?"),
        ("learning_rate=1", "learning_rate: unknown key; did you mean optimizer.lr?"),
        ("train.lr=1", "train.lr: unknown key; lr belongs at optimizer.lr"),
        ("seq_len=1", "seq_len: unknown key; seq_len belongs at data.seq_len"),
        ("mesh.tensr=2", "mesh.tensr: unknown key; did you mean mesh.tensor?"),
        ("tp=2", "tp: unknown key; did you mean mesh.tensor?"),
        ("optimiser.name=sgd", "optimiser: unknown key; did you mean optimizer?"),
        ("mesh.zzz=2", "mesh.zzz: unknown key; known here: pipe, replica"),
        ("data.mixture=[{source: stdlib, wieght: 2}]", "data.mixture[0].wieght: unknown key; did you mean data.mixture[0].weight?"),
    ],
)
def test_unknown_keys_name_what_was_meant(write, override, said):
    assert any(problem.startswith(said) for problem in problems(write(MODEL + REST), override))
    if "[" not in override:
        key, value = override.split("=")
        section, _, leaf = key.rpartition(".")
        tree = parse(MODEL + REST, "test")
        (tree.setdefault(section, {}) if section else tree)[leaf] = value
        with pytest.raises(ConfigError) as caught:
            validate(tree)
        assert any(problem.startswith(said) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("mesh.data 8", "mesh.data 8: not an override; write key=value"),
        ("--mesh.data=8", "overrides have no dashes; write mesh.data=8"),
        ("mesh..data=8", "not an override"),
        ("mesh.data=", "no value; write mesh.data=null"),
        ("include=a.yaml", "include belongs in a file"),
        ("mesh.data=[1", "mesh.data=[1: line 1"),
        ("seed=017", "seed=017: 017 could be octal: write 17"),
        ("mesh=3", "mesh: 3 cannot replace"),
    ],
)
def test_bad_overrides(write, override, said):
    [problem] = problems(write(MODEL + REST + "mesh: {data: 1}\n"), override)
    assert said in problem


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=-1", "seed: -1 is not allowed; must be greater than or equal to 0; try 0"),
        ("train.steps=0", "train.steps: 0 is not allowed; must be greater than 0; try 1"),
        ("train.steps=many", "train.steps: 'many' is not allowed; must be a valid integer"),
        ("train.steps=2.5", "train.steps: 2.5 is not allowed; must be a valid integer"),
        ("mesh.data=yes", "mesh.data: True is not allowed"),
        ("optimizer.name=adam", "try adamw"),
        ("optimizer.lr=.inf", "optimizer.lr: inf is not allowed; must be a finite number"),
        ("optimizer.lr=.nan", "optimizer.lr: nan is not allowed"),
        ("optimizer.beta1=1", "optimizer.beta1: 1 is not allowed; must be less than 1"),
        ("zero_stage=4", "zero_stage: 4 is not allowed; must be 0, 1, 2 or 3"),
        ("run.dir=no", "put quotes around a word"),
        ("data.path={a: 1}", "data.path: {'a': 1} is not allowed; must be a valid string or a valid tuple"),
        ("train=null", "train: None is not a section"),
        ("model=null", "model: None is not a section"),
    ],
)
def test_wrong_values_say_the_rule(write, override, said):
    found = problems(write(MODEL + REST), override)
    assert len(found) == 1
    assert said in found[0]


def test_missing_keys_say_what_would_work(write):
    found = problems(write("data: {source: stdlib}\noptimizer: {}\n" + MODEL))
    assert "data.seq_len: required, not given; try 256" in found
    assert "optimizer.lr: required, not given; try 0.004" in found
    assert "train: required, not given" in found


def test_everything_is_reported_together(write):
    found = problems(
        write(MODEL + REST),
        "seed=017",
        "optimizer.name=adam",
        "train.lr=1",
        "mesh.expert=-2",
        "rules.heads=tenso",
        "model.num_kv_heads=3",
        "data.seq_len=x",
    )
    for key in ("seed", "optimizer.name", "train.lr", "mesh.expert", "rules.heads", "model.num_kv_heads", "data.seq_len"):
        assert sum(problem.startswith(key) for problem in found) == 1, (key, found)


def test_a_broken_key_does_not_cause_follow_up_errors(write):
    found = problems(write(MODEL + REST), "optimizer.warmup_steps=50", "train.steps=-5")
    assert len(found) == 1
    assert found[0].startswith("train.steps")


def test_interpolation(write):
    config = load_config(write(MODEL + REST + "seed: ${train.steps}\n"), ["model.mlp_dim=${model.embed_dim}"])
    assert (config.seed, config.model.mlp_dim) == (10, 64)
    [problem] = problems(write(MODEL + REST), "seed=${no.such}")
    assert "seed" in problem
    assert "no.such" in problem


def test_lists_are_replaced_and_digits_reach_into_them(write):
    mixture = "{mixture: [{source: stdlib}, {source: synthetic}], "
    path = write(MODEL + REST.replace("{source: stdlib, ", mixture))
    assert [part.weight for part in load_config(path, ["data.mixture.1.weight=3"]).data.mixture] == [1.0, 3.0]
    assert len(load_config(path, ["data.mixture=[{source: stdlib}]"]).data.mixture) == 1


def test_resolved_config_loads_back_equal(write):
    config = load_config(
        write(MODEL + REST), ["rules.mlp=null", "rules.batch=[replica, data, expert]", "optimizer.eps=1e-8", "run.dir='017'"]
    )
    assert load_config(write(to_yaml(config), "config.yaml")) == config


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.characters(codec="utf-8"), max_size=12)
    | st.sampled_from(["no", "1e-4", "017", r"\${a}", "${a}", r"\\${b", "~", "- a", "null", "<<", "\r\n"])
)
def test_any_text_survives_writing_and_loading(tmp_path_factory, text):
    tree = parse(MODEL + REST, "test") | {"name": "run", "run": {"dir": "runs/run"}}
    tree["train"]["sample_prompt"] = text
    config = RunConfig.model_validate(tree)
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8", newline="")
    assert load_config(path) == config


def test_schema_describes_every_key():
    schema = json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == {*RunConfig.model_fields, "include"}
    assert "required" not in schema
    assert schema["$defs"]["MeshConfig"]["additionalProperties"] is False
    assert schema["$defs"]["OptimizerConfig"]["properties"]["min_lr_ratio"]["description"] == "final learning rate / lr"
    assert "as many as the axes multiply to" in schema["$defs"]["MeshConfig"]["properties"]["fake_devices"]["description"]
