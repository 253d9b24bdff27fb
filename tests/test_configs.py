"""Every YAML under `configs/` loads; each model has the published number of parameters."""

from pathlib import Path

import pytest

from jaxpar.config.checks import check, layout_of
from jaxpar.config.load import load_config, read, to_yaml
from jaxpar.config.memory import state_bytes_per_device
from jaxpar.config.mesh import MeshConfig
from jaxpar.config.model import ModelConfig
from jaxpar.config.parameters import parameter_count

CONFIGS = Path(__file__).parents[1] / "configs"
RUNS = sorted(CONFIGS.glob("run/*.yaml"))
MODELS = sorted(CONFIGS.glob("model/*.yaml"))

EXACT = {  # model card or Hugging Face parameter count
    "gpt2_124m": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}
ROUNDED = {  # billions as printed: Brown et al. 2020, table D.1; Narayanan et al. 2021, table 1
    "gpt3_175b": 174.6,
    "megatron_530b": 529.6,
    "megatron_1t": 1008.0,
}
EXPERTS = {
    "mixtral_8x7b",
    "deepseek_moe_16b",
    "qwen3_moe_30b_a3b",
    "switch_base_128",
    "gshard_600b",
    "base_44b",
    "deepseek_v3",
}  # tests/config/test_parameters.py


def model(name: str) -> ModelConfig:
    return ModelConfig.model_validate(read(CONFIGS / "model" / f"{name}.yaml")["model"])


def test_no_file_is_of_an_unknown_kind():
    kinds = {"model", "mesh", "run"}
    assert {path.parent.name for path in CONFIGS.rglob("*.yaml")} == kinds
    assert {path.stem for path in MODELS} == {"tiny", "tiny_moe", *EXACT, *ROUNDED, *EXPERTS}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_run_files_load_and_open_with_their_command(path, tmp_path):
    config = load_config(path)
    num_devices = config.mesh.num_fake_devices or None
    assert check(config, num_devices) == []
    assert config.run.dir == f"runs/{path.stem}"
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# jaxpar train configs/run/{path.name}")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_files_hold_a_model_and_its_source(path):
    assert list(read(path)) == ["model"]
    ModelConfig.model_validate(read(path)["model"])
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("mesh/*.yaml")), ids=lambda path: path.stem)
def test_mesh_files_hold_a_mesh(path):
    assert list(read(path)) == ["mesh"]
    MeshConfig.model_validate(read(path)["mesh"])


@pytest.mark.parametrize(("name", "count"), EXACT.items())
def test_exact_parameter_counts(name, count):
    assert parameter_count(model(name)) == count


@pytest.mark.parametrize(("name", "billions"), ROUNDED.items())
def test_published_rounding(name, billions):
    assert round(parameter_count(model(name)) / 1e9, 1) == billions


@pytest.mark.parametrize("name", ["megatron_530b", "megatron_1t"])
def test_formula_of_narayanan(name):
    """P = 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)), equation 2; it leaves out the final norm's 2 h."""
    m = model(name)
    layers, h = m.num_layers, m.embed_dim
    assert parameter_count(m) == 12 * layers * h * h + 13 * layers * h + (51_200 + 2048) * h + 2 * h


def test_tiny_splits_over_eight_tensor_ranks():
    quickstart = CONFIGS / "run" / "quickstart.yaml"
    for mesh in (
        ["mesh.tensor=8", "mesh.data=1", "mesh.context=1"],
        ["mesh.tensor=4", "mesh.context=1", "zero_stage=3"],
        ["mesh.context=4", "mesh.tensor=1"],
    ):
        assert check(load_config(quickstart, mesh), 8) == [], mesh
    assert 0.7e6 < parameter_count(model("tiny")) < 0.9e6


def test_big_example_states_its_bytes():
    config = load_config(CONFIGS / "run" / "llama3_8b_8gpu.yaml")
    state = state_bytes_per_device(config, layout_of(config, 8))
    text = (CONFIGS / "run" / "llama3_8b_8gpu.yaml").read_text()
    assert f"{(state.parameters + state.optimizer) / 1e9:.2f} GB of parameters and optimizer" in text
    assert f"{state.gradients / 1e9:.2f} GB of gradients" in text


@pytest.mark.parametrize(
    ("name", "shape"),
    [("bench", (4, 256, 4, 4, 1024, 8192, 256, 16)), ("bench_small", (4, 64, 4, 4, 128, 512, 64, 16))],
)
def test_bench_shapes(name, shape):
    c = load_config(CONFIGS / "run" / f"{name}.yaml")
    m, o = c.model, c.optimizer
    assert (m.num_layers, m.embed_dim, m.num_heads, m.kv_heads, m.mlp_dim, m.vocab_size, c.data.seq_len, c.data.global_batch_size) == shape
    assert (m.activation, m.norm, m.positions, m.tied_embeddings, c.remat.policy, c.compute_dtype) == (
        "swiglu",
        "rmsnorm",
        "rope",
        False,
        "full",
        "float32",
    )
    assert (o.name, o.lr, o.schedule, o.beta1, o.beta2, o.weight_decay, o.max_grad_norm) == ("adamw", 1e-3, "constant", 0.9, 0.95, 0.1, 1.0)
