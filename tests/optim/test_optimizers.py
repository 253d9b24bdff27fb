"""One contract for every optimizer, and the numbers that are known by hand."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxpar.config.optimizer import OptimizerConfig
from jaxpar.core.tree import leaf_types, named_leaves
from jaxpar.mesh.specs import is_names
from jaxpar.optim import RULES, build_optimizer, clip_factor, decays, describe_decay, guarded_update, matrix_dims, state_specs

LAYERS, EMBED, HEADS, HEAD_DIM, MLP, VOCAB = 3, 8, 2, 4, 16, 32
SIZES = {"layers": LAYERS, "embed": EMBED, "heads": HEADS, "head_dim": HEAD_DIM, "mlp": MLP, "vocab": VOCAB, "positions": 8, "experts": 2}

NAMES = {
    "embed": {"table": ("vocab", "embed"), "positions": ("positions", "embed")},
    "blocks": {
        "attention": {
            "query": {"kernel": ("layers", "embed", "heads", "head_dim"), "bias": ("layers", "heads", "head_dim")},
            "out": {"kernel": ("layers", "heads", "head_dim", "embed"), "bias": ("layers", "embed")},
            "query_norm": {"scale": ("layers", "head_dim")},
        },
        "mlp": {"up": {"kernel": ("layers", "embed", "mlp")}, "down": {"kernel": ("layers", "mlp", "embed"), "bias": ("layers", "embed")}},
        "experts": {"up": {"kernel": ("layers", "experts", "embed", "mlp"), "bias": ("layers", "experts", "mlp")}},
        "norm": {"scale": ("layers", "embed")},
    },
    "head": {"norm": {"scale": ("embed",)}, "kernel": ("embed", "vocab")},
}
DECAYED = {
    "embed.table",
    "embed.positions",
    "blocks.attention.query.kernel",
    "blocks.attention.out.kernel",
    "blocks.mlp.up.kernel",
    "blocks.mlp.down.kernel",
    "blocks.experts.up.kernel",
    "head.kernel",
}


def parameters(names: Any = NAMES, seed: int = 0) -> Any:
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    return jax.tree.map(lambda leaf: 0.5 + jax.random.normal(next(keys), tuple(SIZES[name] for name in leaf)), names, is_leaf=is_names)


def config(name: str, **fields: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"name": name, "lr": 1.0, "weight_decay": 0.0, **fields})


@partial(jax.jit, static_argnums=0)
def advance(optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any, lr: float) -> tuple[Any, Any]:
    """New parameters and new state, as the train step makes them."""
    one = jnp.ones(())
    return guarded_update(optimizer, grads, state, params, learning_rate=lr * one, factor=one, ok=one > 0)


@pytest.mark.parametrize("name", RULES)
def test_contract(name: str) -> None:
    """Falls on a quadratic whose gradient comes in bfloat16; state and updates keep the parameters' dtype and tree."""
    params, target = parameters(seed=0), parameters(seed=1)
    optimizer = build_optimizer(config(name), 200, NAMES)

    def loss(p: Any) -> Any:
        return sum(jnp.sum((x - y) ** 2) for x, y in zip(jax.tree.leaves(p), jax.tree.leaves(target), strict=True))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), jax.grad(loss)(params))
        return advance(optimizer, grads, state, params, 0.05)

    state = optimizer.init(params)
    shapes = jax.eval_shape(optimizer.init, params)
    first = loss(params)
    for _ in range(200):
        params, state = step(params, state)
    assert float(loss(params)) < 0.05 * float(first)
    assert leaf_types(params) == leaf_types(target)
    assert {x.dtype.name for x in jax.tree.leaves(state)} <= {"float32", "int32"}
    assert leaf_types(state) == leaf_types(shapes)  # a step changes no shape: one compile


@pytest.mark.parametrize("name", RULES)
def test_state_specs_cover_every_leaf(name: str) -> None:
    """A leaf of its parameter's shape has its spec; what is replicated is small. Specs are opaque: tuples here."""
    sizes = SIZES | {"embed": 256, "vocab": 512, "mlp": 384}
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(tuple(sizes[n] for n in leaf), jnp.float32), NAMES, is_leaf=is_names)
    state = jax.eval_shape(build_optimizer(config(name, momentum=0.9), 10, NAMES).init, params)
    specs = state_specs(state, params, NAMES, "replicated")
    leaves, treedef = jax.tree.flatten(state)
    small = 0
    for leaf, spec in zip(leaves, treedef.flatten_up_to(specs), strict=True):
        if spec == "replicated":
            small += leaf.size
        else:
            assert leaf.shape == tuple(sizes[n] for n in spec)
    assert small <= 0.02 * sum(x.size for x in jax.tree.leaves(params))


def test_state_specs_tell_equal_shapes_apart_by_path() -> None:
    params = {"a": {"kernel": jnp.zeros((4, 4))}, "b": {"kernel": jnp.zeros((4, 4))}}
    specs = {"a": {"kernel": PartitionSpec("data")}, "b": {"kernel": PartitionSpec(None, "data")}}
    state = optax.scale_by_adam().init(params)
    got: Any = state_specs(state, params, specs, PartitionSpec())
    assert (got.mu, got.nu, got.count) == (specs, specs, PartitionSpec())


def test_state_specs_refuse_to_replicate_large_state() -> None:
    params = {"kernel": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    state = {"kernel": jax.ShapeDtypeStruct((512 * 512,), jnp.float32)}
    with pytest.raises(ValueError, match=r"kernel of shape \(262144,\) would be replicated"):
        state_specs(state, params, {"kernel": "spec"}, "replicated")


def test_adam_moves_float32_parameters_where_bfloat16_ones_stay() -> None:
    """Case NUM-06: parameter 1.0, constant bfloat16 gradient 1, lr 6e-4, 100 updates."""
    optimizer = build_optimizer(config("adamw"), 100, {"w": ("embed",)})
    params = {"w": jnp.ones((1,))}
    state = optimizer.init(params)
    for _ in range(100):
        params, state = advance(optimizer, {"w": jnp.ones((1,), jnp.bfloat16)}, state, params, 6e-4)
    assert float(params["w"][0]) == pytest.approx(0.94, abs=1e-4)


def test_decay_by_names_not_by_rank() -> None:
    """Case NUM-08: lr 0.1, decay 0.1, zero gradients: matrices and tables go to 0.99, stacked scales and biases stay."""
    ones = jax.tree.map(jnp.ones_like, parameters())
    optimizer = build_optimizer(config("adamw", weight_decay=0.1), 10, NAMES)
    after, _ = advance(optimizer, jax.tree.map(jnp.zeros_like, ones), optimizer.init(ones), ones, 0.1)
    for path, leaf in named_leaves(after).items():
        np.testing.assert_allclose(np.asarray(leaf), 0.99 if path in DECAYED else 1.0, rtol=1e-7, err_msg=path)


def test_decay_is_described() -> None:
    on, off = describe_decay(NAMES).splitlines()
    assert set(on.removeprefix("weight decay on: ").split(", ")) == DECAYED
    assert set(off.removeprefix("no weight decay on: ").split(", ")) == named_leaves(NAMES, is_leaf=is_names).keys() - DECAYED


def test_matrix_dims() -> None:
    assert matrix_dims(("layers", "embed", "heads", "head_dim")) == ((0,), (1,), (2, 3))
    assert matrix_dims(("layers", "embed", "kv_heads", "head_dim")) == ((0,), (1,), (2, 3))
    assert matrix_dims(("layers", "heads", "head_dim", "embed")) == ((0,), (1, 2), (3,))
    assert matrix_dims(("layers", "experts", "mlp", "embed")) == ((0, 1), (2,), (3,))
    assert matrix_dims(("embed", "embed")) == ((), (0,), (1,))
    assert matrix_dims(("layers", "embed", "experts")) == ((0,), (1,), (2,))  # a router: experts are an output there
    for names in [("vocab", "embed"), ("embed", "vocab"), ("positions", "embed"), ("layers", "heads", "head_dim"), ("layers", "embed"), ()]:
        assert matrix_dims(names) is None
        assert decays(names) == ("vocab" in names or "positions" in names)


def test_muon_orthogonalises_each_layer_across_heads() -> None:
    """An update of a query kernel is, in each layer, 0.2 sqrt(max side) times a matrix whose singular values are near 1."""
    names = {
        "query": ("layers", "embed", "heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "scale": ("layers", "embed"),
    }
    params = parameters(names)
    optimizer = build_optimizer(config("muon"), 10, names)
    updates: Any = optimizer.update(parameters(names, seed=5), optimizer.init(params), params)[0]
    rows = {"query": EMBED, "out": HEADS * HEAD_DIM}
    for name in rows:
        for layer in np.asarray(updates[name]).reshape(LAYERS, rows[name], -1):
            singular = np.linalg.svd(layer, compute_uv=False) / (0.2 * np.sqrt(max(layer.shape)))
            assert singular.min() > 0.5
            assert singular.max() < 1.5
    np.testing.assert_allclose(np.abs(updates["scale"]), 1.0, rtol=1e-5)  # Adam's first step: the sign


def test_adafactor_treats_each_layer_alone() -> None:
    """Stacked layers of very different size step as each would alone (optax on the stack would mix their scales)."""
    names = {"kernel": ("layers", "embed", "mlp")}
    scale = jnp.asarray([1.0, 100.0])[:, None, None]
    params = {"kernel": scale * jax.random.normal(jax.random.key(0), (2, 128, 128))}
    grads = {"kernel": jax.random.normal(jax.random.key(1), (2, 128, 128))}
    optimizer = build_optimizer(config("adafactor"), 10, names)
    directions: Any = optimizer.update(grads, optimizer.init(params), params)[0]
    for layer in range(2):
        alone = jax.tree.map(lambda x, layer=layer: x[layer], (params, grads))
        reference = optax.adafactor(1.0)
        wanted: Any = reference.update(alone[1], reference.init(alone[0]), alone[0])[0]
        np.testing.assert_allclose(-directions["kernel"][layer], wanted["kernel"], rtol=1e-5, atol=1e-7)


def test_lion_and_sgd_by_hand() -> None:
    params, grads = {"w": jnp.asarray([1.0, 2.0])}, [{"w": jnp.asarray([1.0, -4.0])}, {"w": jnp.asarray([-0.5, 1.0])}]
    wanted = {
        # c = 0.9 m + 0.1 g, m = 0.99 m + 0.01 g: c2 = (.9 * .01 - .05, -.9 * .04 + .1) = (-.041, .064)
        ("lion", None): [[0.9, 2.1], [1.0, 2.0]],
        ("sgd", 0.5): [[0.9, 2.4], [0.9, 2.5]],  # v2 = .5 v1 + g2 = (0, -1)
        ("sgd", None): [[0.9, 2.4], [0.95, 2.3]],
    }
    for (name, momentum), steps in wanted.items():
        optimizer = build_optimizer(config(name, momentum=momentum, beta2=0.99), 2, {"w": ("embed",)})
        now, state = params, optimizer.init(params)
        for grad, after in zip(grads, steps, strict=True):
            now, state = advance(optimizer, grad, state, now, 0.1)
            np.testing.assert_allclose(now["w"], after, rtol=1e-6, err_msg=f"{name} {momentum}")


def test_adamw_by_hand() -> None:
    """Two updates written out: m, v, their bias corrections, decay on the old value."""
    optimizer = build_optimizer(config("adamw", weight_decay=0.1), 2, {"w": ("embed", "mlp")})
    params, p, m, v = {"w": jnp.asarray([[3.0]])}, 3.0, 0.0, 0.0
    state = optimizer.init(params)
    for t, g in ((1, 2.0), (2, -1.0)):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        p -= 0.1 * (m / (1 - 0.9**t) / ((v / (1 - 0.95**t)) ** 0.5 + 1e-8) + 0.1 * p)
        params, state = advance(optimizer, {"w": jnp.asarray([[g]])}, state, params, 0.1)
        assert float(params["w"][0, 0]) == pytest.approx(p, rel=1e-6)


def test_clip_factor() -> None:
    assert float(clip_factor(jnp.asarray(0.5), 1.0)) == 1.0
    assert float(clip_factor(jnp.asarray(0.0), 1.0)) == 1.0
    assert float(clip_factor(jnp.asarray(4.0), 1.0)) == pytest.approx(0.25, rel=1e-5)
    assert np.isnan(float(clip_factor(jnp.asarray(jnp.nan), 1.0)))


def test_state_has_one_structure_whatever_the_decay() -> None:
    params = parameters()
    trees = [jax.tree.structure(build_optimizer(config("adamw", weight_decay=w), 10, NAMES).init(params)) for w in (0.0, 0.1)]
    assert trees[0] == trees[1]


@pytest.mark.parametrize("name", RULES)
def test_a_step_that_is_not_finite_changes_nothing(name: str) -> None:
    params, optimizer = parameters(), build_optimizer(config(name, momentum=0.9), 10, NAMES)
    state = optimizer.init(params)
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    one = jnp.ones(())
    after = guarded_update(optimizer, grads, state, params, learning_rate=one, factor=one * jnp.nan, ok=one < 0)
    for old, new in zip(jax.tree.leaves((params, state)), jax.tree.leaves(after), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_update_is_in_place() -> None:
    """With donated state, AdamW needs no temporary of the size of a parameter: no copy, no second pass over the moments."""
    names = {"kernel": ("embed", "mlp")}
    params = {"kernel": jnp.ones((512, 512))}
    optimizer = build_optimizer(config("adamw", weight_decay=0.1), 10, names)

    def step(params: Any, state: Any, grads: Any) -> Any:
        norm = optax.tree.norm(grads)
        factor = clip_factor(norm, 1.0)
        return guarded_update(optimizer, grads, state, params, learning_rate=factor, factor=factor, ok=jnp.isfinite(norm))

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, optimizer.init(params), params).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.1 * params["kernel"].nbytes
