"""The small parts: waiting that can be broken off, peaks, FLOPs of a model of one's own, TensorBoard, sampling, lazy imports."""

import importlib
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.build import Parts, build
from jaxpar.core.tree import named_leaves
from jaxpar.train import display
from jaxpar.train.background import Background
from jaxpar.train.display import Quiet
from jaxpar.train.evaluate import evaluate
from jaxpar.train.flops import flops_per_token
from jaxpar.train.metrics import MetricsLog, clock_of
from jaxpar.train.peaks import peak_flops_per_s
from jaxpar.train.sample import sample
from jaxpar.train.summary import device_bytes, facts_of
from tests.train.tiny import write_config

Make = Callable[..., Parts]


def never() -> bool:
    return False


def test_items_come_in_order_and_errors_are_raised_where_they_are_wanted() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("disk gone")

    source = Background(items, ahead=1)
    assert [source.next(never), source.next(never)] == [1, 2]
    with pytest.raises(OSError, match="disk gone"):
        source.next(never)
    source.close()


def test_a_stalled_source_does_not_hold_up_a_stop() -> None:
    release = threading.Event()

    def items() -> Iterator[int]:
        release.wait()
        yield 1

    source = Background(items, ahead=1)
    assert source.next(lambda: True) is None
    release.set()
    assert source.next(never) == 1
    source.close()


def test_a_run_that_fails_while_it_compiles_ends(tmp_path: Path) -> None:
    """The compiling thread holds the process up until it is done, no longer: exit status 2, not a hang or an abort."""
    config = write_config(tmp_path)
    script = f"""
import sys, jaxpar
from jaxpar.train.display import Quiet
config = jaxpar.load_config({str(config)!r}, ["run.dir={tmp_path / "run"}"])
parts = jaxpar.build(config, devices=__import__("jax").devices()[:1])
def fail(): raise ValueError("no state")
parts.init_state = fail
try:
    jaxpar.fit(parts, display=Quiet())
except ValueError as error:
    sys.exit(2 if str(error) == "no state" else 1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr


def test_a_long_evaluation_is_broken_off(make: Make) -> None:
    parts = make()
    asked = iter([False, True])
    assert evaluate(parts, parts.init_state().params, give_up=lambda: next(asked)) is None


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),  # NVIDIA H100 data sheet: 1,979 TFLOP/s with sparsity
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", None),  # slower than the SXM form, figure not known to us
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GB200", 2.5e15),
        ("cpu", None),
    ],
)
def test_peaks(kind: str, peak: float | None) -> None:
    assert peak_flops_per_s(kind) == peak


def test_mfu_is_flops_over_peak(make: Make) -> None:
    clock = clock_of(make())
    clock.peak_flops_per_s = 1e9
    clock.restart()
    clock.step_done()
    row = clock.take()
    assert row["mfu"] == pytest.approx(row["tokens_per_s"] * clock.flops_per_token / 1e9)


class NotATransformer:
    """Any model: only its type matters here."""

    def __init__(self, inner: object) -> None:
        self.inner = inner


def test_flops_of_another_model_are_six_per_matmul_parameter(make: Make) -> None:
    parts = make()
    own = Parts(**{**vars(parts), "model": NotATransformer(parts.model)})
    count, words = flops_per_token(own)
    kernels = [leaf for name, leaf in named_leaves(parts.placement.shapes).items() if name.endswith(".kernel")]
    assert count == 6 * sum(math.prod(leaf.shape) for leaf in kernels)
    assert "not counted" in words


@pytest.mark.slow
def test_an_optimizer_of_ones_own_is_laid_out_like_ours(make: Make) -> None:
    ours = make("optimizer.name=adamw", "optimizer.weight_decay=0", "mesh.data=4", "zero_stage=1", devices=4)
    rule = optax.scale_by_adam(ours.config.optimizer.beta1, ours.config.optimizer.beta2, ours.config.optimizer.eps)
    curves = []
    for parts in (ours, build(ours.config, optimizer=rule, devices=jax.devices()[:4])):
        state, losses = parts.init_state(), []
        for step in range(3):
            with jax.numpy_dtype_promotion("standard"):  # optax raises floats to an integer power
                state, metrics = parts.train_step(state, parts.feed.place(parts.train_data.batch(step), 1))
            losses.append(float(metrics["loss"]))
        curves.append(losses)
        assert device_bytes(state.opt_state) < 0.6 * device_bytes(state.params)  # two moments over four devices
    assert curves[0] == curves[1]


def test_float64_without_64_bit_types_is_not_rounded_in_silence(make: Make) -> None:
    with pytest.raises(ValueError, match=r"float64 needs 64-bit types: call jaxpar\.prepare_devices"):
        make("compute_dtype=float64", "param_dtype=float64")


def test_tensorboard_events_have_every_number_of_a_row(tmp_path: Path) -> None:
    event_type = importlib.import_module("tensorboardX.proto.event_pb2").Event  # made at run time: type checkers do not see it
    log = MetricsLog(tmp_path, 1, tensorboard=True, first_step=0)
    log.write({"step": 3, "loss": 2.5, "skipped": True})
    log.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    content, found = file.read_bytes(), {}
    while content:
        length = int.from_bytes(content[:8], "little")
        event = event_type.FromString(content[12 : 12 + length])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        content = content[16 + length :]
    assert found == {"loss": (3, 2.5)}


def test_no_tensorboard_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # importing it raises ImportError, as where it is not installed
    log = MetricsLog(tmp_path, 1, tensorboard=True, first_step=0)
    log.close()
    assert log.missing is not None
    assert "pip install 'jaxpar[log]'" in log.missing


@pytest.mark.slow
def test_samples_do_not_depend_on_the_layout(make: Make) -> None:
    texts = []
    for overrides, devices in ((), 1), (("mesh.tensor=2", "mesh.data=2"), 4), (("mesh.context=2", "zero_stage=3"), 2):
        parts = make("optimizer.schedule=constant", *overrides, devices=devices)
        texts.append(sample(parts, parts.init_state().params, "the mesh ", 12, temperature=1.0, seed=3))
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith("the mesh ")
    assert sample(parts, parts.init_state().params, "the mesh ", 12, temperature=1.0, seed=4) != texts[0]


def test_the_likeliest_token_is_the_argmax_of_the_logits(make: Make) -> None:
    """Greedy, token by token, against the loss: the loss of the chosen token is the smallest of all."""
    parts = make()
    params = parts.init_state().params
    text = sample(parts, params, "the ", 1, temperature=0)
    losses = [loss_of_next(parts, params, "the ", byte) for byte in range(256)]
    assert int(np.argmin(losses)) in (ord(text[-1]), *range(128, 256))


def loss_of_next(parts: Parts, params: object, prompt: str, byte: int) -> float:
    ids = list(prompt.encode())
    tokens = np.zeros((8, 32), np.int32)
    tokens[:, : len(ids)] = ids
    targets, weights = np.zeros_like(tokens), np.zeros((8, 32), np.float32)
    targets[0, len(ids) - 1], weights[0, len(ids) - 1] = byte, 1
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), tokens.shape)
    rows = {"tokens": tokens, "targets": targets, "weights": weights, "positions": positions, "segments": np.ones_like(tokens)}
    sums, _ = parts.eval_step(params, parts.feed.place(rows | {"samples": np.arange(8, dtype=np.uint32)}, 1))
    return float(sums["loss"])


def test_reading_a_long_text_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Heard(Quiet):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def line(self, text: str) -> None:
            self.lines.append(text)

    heard, parts = Heard(), make()
    parts.progress = display.reading(heard)
    assert parts.train_data.num_tokens > 0
    assert heard.lines == []  # quick
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    again = make(folder="again")
    again.progress = display.reading(heard)
    assert again.train_data.num_tokens > 0
    assert heard.lines
    assert all(line.startswith("reading ") and line.endswith(" tokens so far") for line in heard.lines)


def test_a_prompt_that_does_not_fit_is_an_error_with_what_would(make: Make) -> None:
    parts = make()
    with pytest.raises(ValueError, match=r"30 tokens and 5 more do not fit into data\.seq_len=32; 2 tokens would fit"):
        sample(parts, parts.init_state().params, "x" * 30, 5)


def test_the_header_says_what_runs(make: Make) -> None:
    facts = dict(facts_of(make("mesh.data=2", "mesh.tensor=2", "zero_stage=3", "mesh.context=2", devices=8)))
    assert facts["mesh"] == "data 2 x context 2 x tensor 2, on 8 x cpu, ZeRO-3"
    assert "blocks.mlp.up.kernel" in facts["weight decay on"]
    assert "head.norm.scale" in facts["no weight decay on"]
    assert "head.norm.scale" in facts["ZeRO-3 keeps whole"]
    assert "documents" in facts["data"]


def test_bytes_a_device_are_those_of_the_arrays(make: Make) -> None:
    parts = make("mesh.data=2", "mesh.tensor=2", "optimizer.momentum=0.9", "zero_stage=2", devices=4)
    state = parts.init_state()
    held = {"params": 0, "opt_state": 0}
    for part in held:
        for leaf in jax.tree.leaves(getattr(state, part)):
            held[part] += leaf.addressable_shards[0].data.nbytes
    assert device_bytes(parts.placement.state.params) == held["params"]
    assert device_bytes(parts.placement.state.opt_state) == held["opt_state"]


def test_importing_jaxpar_imports_nothing_heavy() -> None:
    script = "import sys, jaxpar; jaxpar.load_config; print('jax' in sys.modules); jaxpar.fit; print(callable(jaxpar.build))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True).stdout
    assert out.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no attribute 'bild'"):
        _ = jaxpar.bild
