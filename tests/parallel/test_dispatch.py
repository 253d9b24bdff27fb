"""Dispatchers on their own: tokens conserved, the same bits whichever way they travel, index maths against NumPy, overflow counted."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.config.axes import AXES
from jaxpar.config.exchange import NUMBER_COLUMNS, rows_of_numbers
from jaxpar.config.layout import Layout, LayoutError
from jaxpar.ops.routing.capacity import places
from jaxpar.parallel.dispatch.all_to_all import all_to_all
from jaxpar.parallel.dispatch.exchange import Exchange, Runs, runs_of
from jaxpar.parallel.dispatch.grouped import Tiles, product_words, tiles_for
from jaxpar.parallel.dispatch.local import Local
from jaxpar.parallel.dispatch.permute import collect, rows_of, spread
from jaxpar.parallel.dispatch.ragged import Ragged, by_local_expert
from jaxpar.parallel.dispatch.routed import Routed
from jaxpar.parallel.dispatch.weigh import in_columns, in_rows, out_of_columns, out_of_rows, unit_gates, weighed_by

EXPERTS, TOKENS, WIDTH, K = 8, 24, 6, 2


def layout(**sizes: int) -> Layout:
    return Layout({axis: sizes.get(axis, 1) for axis in AXES})


def mesh(**sizes: int) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape), AXES)


def choices(rng: np.random.Generator, tokens: int, *, uneven: bool = False) -> np.ndarray:
    """Distinct experts for each token; some tokens without any."""
    weight = np.asarray([8, 4, 2, 1, 1, 1, 0.5, 0.5] if uneven else [1] * EXPERTS)
    expert = np.stack([rng.choice(EXPERTS, K, replace=False, p=weight / weight.sum()) for _ in range(tokens)])
    expert[rng.random(tokens) < 0.15] = -1
    return expert.astype(np.int32)


def identity(rows: jax.Array, _product: Any, weigh: Any) -> jax.Array:
    return weigh(rows)


def scaled(rows: jax.Array, product: Any, weigh: Any) -> jax.Array:
    """Experts that multiply by 1, 2, 3, ...: which one did the work shows."""
    factor = jnp.arange(1, EXPERTS + 1, dtype=rows.dtype)
    mine = factor.reshape(-1, 1, 1) * jnp.eye(WIDTH, dtype=rows.dtype)
    if jax.typeof(rows).manual_axis_type.varying:
        axis = jax.lax.axis_index("expert") * (EXPERTS // jax.lax.axis_size("expert"))
        mine = jax.lax.dynamic_slice_in_dim(mine, axis, EXPERTS // jax.lax.axis_size("expert"), 0)
    return product(weigh(rows), mine)


def run(
    dispatch: Any, experts: Any, x: np.ndarray, expert: np.ndarray, gate: np.ndarray, capacity: int, ways: int, context: int = 1
) -> Any:
    """One group a device of `expert`; the tokens of a group over `context`."""
    spread_over = layout(expert=ways, context=context)
    place = jax.vmap(lambda e: places(e[None], None, EXPERTS, capacity, "position")[0])(expert.reshape(ways, -1, K)).reshape(-1, K)

    def spmd(x_nD: jax.Array, expert_nk: jax.Array, gate_nk: jax.Array, place_nk: jax.Array) -> Any:
        group_n = jnp.zeros(x_nD.shape[0], jnp.int32)
        y, lost = dispatch(spread_over, x_nD, Routed(expert_nk, gate_nk, place_nk, group_n, 1, capacity, EXPERTS), experts)
        return y, jnp.zeros((1,), jnp.int32) + (0 if lost is None else lost)

    over = P(("expert", "context"))
    mapped = jax.shard_map(spmd, mesh=mesh(expert=ways, context=context), in_specs=over, out_specs=(over, over), check_vma=True)
    y, lost = jax.jit(mapped)(x, expert, gate, place)
    return np.asarray(y), np.asarray(place), int(np.sum(lost))


def given_tokens(seed: int, *, uneven: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * TOKENS, WIDTH)).astype(np.float32)
    return x, choices(rng, 4 * TOKENS, uneven=uneven), np.full((4 * TOKENS, K), 0.5, np.float32)


LOCAL, RAGGED = Local(native=False), Ragged(8.0, native=False)
WAYS = {
    **{f"all_to_all-{ways}-{context}": (all_to_all, ways, context) for ways, context in ((1, 1), (2, 1), (4, 1), (4, 2), (2, 4))},
    **{f"ragged-{ways}-{context}": (RAGGED, ways, context) for ways, context in ((1, 1), (2, 1), (4, 1), (4, 2), (2, 4))},
    **{f"local-1-{context}": (LOCAL, 1, context) for context in (1, 4)},
}


@pytest.mark.parametrize(("dispatch", "ways", "context"), WAYS.values(), ids=WAYS)
def test_identity_experts_give_every_token_back(dispatch: Any, ways: int, context: int) -> None:
    """Gates of 1/2 and two experts: a token comes back bit for bit, half of it where one choice was dropped."""
    x, expert, gate = given_tokens(ways, uneven=True)
    y, place, lost = run(dispatch, identity, x, expert, gate, 7, ways, context)
    kept = (place >= 0).sum(axis=1)
    assert lost == 0
    assert (kept == 1).sum() > 0
    np.testing.assert_array_equal(y, x * (kept * np.float32(0.5))[:, None])


@pytest.mark.parametrize("ways", [2, 4])
def test_every_token_meets_its_experts(ways: int) -> None:
    """Experts that multiply by their number: `local`, `all_to_all` and `ragged` agree with NumPy, and bit for bit with each other."""
    x, expert, gate = given_tokens(7)
    everyone = TOKENS * 4 // ways
    want = x * np.where(expert >= 0, (expert + 1) * 0.5, 0).sum(axis=1, keepdims=True).astype(np.float32)
    by_buffers, _, _ = run(all_to_all, scaled, x, expert, gate, everyone, ways)
    by_runs, _, _ = run(Ragged(8.0, native=False), scaled, x, expert, gate, everyone, ways)
    alone, _, _ = run(Local(native=False), _scaled_alone, x, expert, gate, 4 * TOKENS, 1)
    np.testing.assert_array_equal(by_buffers, by_runs)
    np.testing.assert_array_equal(by_buffers, alone)
    np.testing.assert_allclose(by_buffers, want, rtol=1e-6)


def _scaled_alone(rows: jax.Array, product: Any, weigh: Any) -> jax.Array:
    factor = jnp.arange(1, EXPERTS + 1, dtype=rows.dtype)
    return product(weigh(rows), factor.reshape(-1, 1, 1) * jnp.eye(WIDTH, dtype=rows.dtype))


HIDDEN = 10


def with_gradients(dispatch: Any, given: dict[str, np.ndarray], expert: np.ndarray, ways: int, context: int) -> dict[str, np.ndarray]:
    """Outputs, and gradients of tokens, gates and both maps of experts that are no linear function, where no expert's room is limited."""
    spread_over, tokens = layout(expert=ways, context=context), len(expert) // ways
    place = jax.vmap(lambda e: places(e[None], None, EXPERTS, tokens, "position")[0])(expert.reshape(ways, -1, K)).reshape(-1, K)

    def spmd(given: dict[str, jax.Array], expert_nk: jax.Array, place_nk: jax.Array) -> dict[str, jax.Array]:
        def routed(x_nD: jax.Array, gate_nk: jax.Array, up_EDF: jax.Array, down_EFD: jax.Array) -> jax.Array:
            choices = Routed(expert_nk, gate_nk, place_nk, jnp.zeros(x_nD.shape[0], jnp.int32), 1, tokens, EXPERTS)

            def experts(rows: jax.Array, product: Any, weigh: Any) -> jax.Array:
                return product(weigh(jnp.tanh(product(rows, up_EDF))), down_EFD)

            return dispatch(spread_over, x_nD, choices, experts)[0]

        y, back = jax.vjp(routed, *(given[name] for name in ("x", "gate", "up", "down")))
        return dict(zip(("y", "x", "gate", "up", "down"), (y, *back(given["dy"])), strict=True))

    over, experts = P(("expert", "context")), P("expert")
    specs = {"x": over, "gate": over, "up": experts, "down": experts, "dy": over}
    out = {name: spec for name, spec in specs.items() if name != "dy"} | {"y": over}
    mapped = jax.shard_map(spmd, mesh=mesh(expert=ways, context=context), in_specs=(specs, over, over), out_specs=out, check_vma=True)
    return {name: np.asarray(a) for name, a in jax.jit(mapped)(given, expert, place).items()}


@pytest.mark.parametrize(("ways", "context"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_without_drops_all_dispatchers_give_the_same_outputs_and_gradients(ways: int, context: int) -> None:
    """In float64, to 1e-13 relative L2: `ragged`, `all_to_all` with room for every token, and `local` on one device."""
    rng = np.random.default_rng(ways)
    x, expert, _ = given_tokens(11, uneven=True)
    given = {"x": x.astype(np.float64), "gate": rng.uniform(0.1, 0.9, expert.shape), "dy": rng.standard_normal(x.shape)}
    given |= {"up": rng.standard_normal((EXPERTS, WIDTH, HIDDEN)), "down": rng.standard_normal((EXPERTS, HIDDEN, WIDTH))}
    with jax.enable_x64(True):
        want = with_gradients(LOCAL, given, expert, 1, 1)
        assert all(a.dtype == np.float64 and a.any() for a in want.values())
        for dispatch in (all_to_all, RAGGED):
            got = with_gradients(dispatch, given, expert, ways, context)
            for name, a in want.items():
                assert np.linalg.norm(got[name] - a) <= 1e-13 * np.linalg.norm(a), name


def test_rows_beyond_the_buffer_are_counted() -> None:
    """All tokens to the experts of the first device, which has room for what it would get if all were balanced."""
    x, expert, gate = given_tokens(3)
    expert = np.where(expert >= 0, np.asarray([[0, 1]], np.int32), -1)
    total = int((expert >= 0).sum())
    y, _, lost = run(Ragged(1.0, native=False), identity, x, expert, gate, 4 * TOKENS, 4)
    assert lost == total - TOKENS * K
    # What did fit is right, what did not is missing, and nothing else is there.
    halves = np.round(np.divide(y, x, where=x != 0, out=np.zeros_like(x)) * 2)
    np.testing.assert_array_equal(y, x * halves * np.float32(0.5))
    assert halves.sum() == WIDTH * TOKENS * K


@pytest.mark.parametrize("dispatch", [all_to_all, Ragged(8.0, native=False), Local(native=False)], ids=["all_to_all", "ragged", "local"])
def test_experts_that_forget_their_gates_are_an_error(dispatch: Any) -> None:
    """Without `weigh` no gradient would reach the router."""
    with pytest.raises(ValueError, match=re.escape("experts: `weigh` applied 0 times; apply it once")):
        run(dispatch, lambda rows, _product, _weigh: rows, *given_tokens(0), 7, 1)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 0), ("bfloat16", 2.0**-15)])
def test_numbers_travel_in_rows_and_columns(dtype: str, rtol: float) -> None:
    """Of any count, behind rows of any width or one beside each; in bfloat16 with twice its digits."""
    for count, width in ((1, 8), (8, 8), (13, 8), (160, 64)):
        numbers = np.random.default_rng(count).standard_normal((3, 2, count)).astype(np.float32) * 1e3
        rows = in_rows(jnp.asarray(numbers), width, jnp.dtype(dtype))
        assert rows.dtype == dtype
        assert rows.shape[-2] == rows_of_numbers(count, width, rows.dtype.itemsize)
        np.testing.assert_allclose(out_of_rows(rows, count, jnp.dtype("float32")), numbers, rtol=rtol)
        columns = in_columns(jnp.asarray(numbers[0, 0]), jnp.dtype(dtype))
        assert (columns.dtype, columns.shape) == (dtype, (count, NUMBER_COLUMNS))
        np.testing.assert_allclose(out_of_columns(columns, jnp.dtype("float32")), numbers[0, 0], rtol=rtol)


def test_a_gate_of_zero_has_no_gradient() -> None:
    """And the others have theirs / gate: what comes back for a row is the gradient times the gate."""
    rows = rows_of(jnp.asarray([[0, 2], [3, -1]]), 5)
    _, pullback = jax.vjp(lambda gate: unit_gates(gate, rows), jnp.asarray([[0.5, 0.0], [0.25, 0.75]]))
    np.testing.assert_array_equal(pullback(jnp.asarray([1.0, 2.0, 3.0, 4.0, 5.0]))[0], [[2.0, 0.0], [16.0, 0.0]])


def test_local_cannot_reach_other_devices() -> None:
    with pytest.raises(LayoutError, match=re.escape("dispatch local needs all experts on every device")):
        run(Local(native=False), identity, *given_tokens(0), 7, 2)


# Index maths against NumPy.


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    peers = draw(st.integers(1, 4))
    wanted = np.asarray(draw(st.lists(st.integers(0, 5), min_size=peers * peers, max_size=peers * peers)), np.int32).reshape(peers, peers)
    return wanted, draw(st.integers(1, 18))


@settings(deadline=None, max_examples=60)
@given(tables())
def test_runs_are_those_of_a_loop(table: tuple[np.ndarray, int]) -> None:
    wanted, room = table
    found = [runs_of(jnp.asarray(wanted), i, room) for i in range(len(wanted))]
    for receiver in range(len(wanted)):
        at = 0
        for sender in range(len(wanted)):
            size = min(int(wanted[sender, receiver]), room - at)
            runs, mine = found[sender], found[receiver]
            assert int(runs.from_p[receiver]) == int(mine.got_from_p[sender]) == wanted[sender, :receiver].sum()
            assert int(runs.size_p[receiver]) == int(mine.got_size_p[sender]) == size
            assert int(runs.at_p[receiver]) == int(mine.got_at_p[sender]) == at
            at += size


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_received_rows_are_sorted_by_expert(seed: int, room: int) -> None:
    rng = np.random.default_rng(seed)
    peers, each = 3, 2
    sizes = rng.integers(0, 5, (peers, peers * each)).astype(np.int32)
    me = int(rng.integers(peers))
    runs = runs_of(jnp.asarray(sizes.reshape(peers, peers, each).sum(2)), me, room)
    tiles = Tiles(int(rng.choice([1, 4])))
    order, total = by_local_expert(runs, jnp.asarray(sizes), me, room, tiles)
    came = [expert for sender in range(peers) for expert in range(each) for _ in range(sizes[sender, me * each + expert])][:room]
    want = np.full(room, -1)
    second = -(-came.count(0) // tiles.rows) * tiles.rows  # where the rows of the second expert begin
    want[[i for i, expert in enumerate(came) if expert == 0]] = np.arange(came.count(0))
    want[[i for i, expert in enumerate(came) if expert == 1]] = second + np.arange(came.count(1))
    np.testing.assert_array_equal(order, want)
    np.testing.assert_array_equal(total, [came.count(expert) for expert in range(each)])


@pytest.mark.parametrize("seed", range(4))
def test_an_exchange_moves_runs_and_its_gradient_moves_them_back(seed: int) -> None:
    peers, rows, room = 4, 12, 20
    rng = np.random.default_rng(seed)
    wanted = rng.multinomial(rows - 2, [0.55, 0.15, 0.0, 0.3], size=peers).astype(np.int32)
    x = rng.standard_normal((peers, rows, 3)).astype(np.float32)
    weight = rng.standard_normal((peers, room, 3)).astype(np.float32)

    def spmd(x_NI: jax.Array, w_RI: jax.Array) -> Any:
        runs: Runs = runs_of(jnp.asarray(wanted), jax.lax.axis_index("expert"), room)
        y, back = jax.vjp(lambda x: Exchange(("expert",), native=False)(x, runs, room), x_NI[0])
        return y[None], back(w_RI[0])[0][None]

    mapped = jax.shard_map(spmd, mesh=mesh(expert=peers), in_specs=P("expert"), out_specs=P("expert"))
    y, dx = (np.asarray(a) for a in jax.jit(mapped)(x, weight))
    want_y, want_dx = np.zeros_like(weight), np.zeros_like(x)
    for receiver in range(peers):
        at = 0
        for sender in range(peers):
            begin, size = wanted[sender, :receiver].sum(), min(wanted[sender, receiver], room - at)
            want_y[receiver, at : at + size] = x[sender, begin : begin + size]
            want_dx[sender, begin : begin + size] = weight[receiver, at : at + size]
            at += size
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(dx, want_dx)


@pytest.mark.parametrize("k", [1, 2, 12])
def test_gradients_of_spread_and_collect_are_those_of_plain_indexing(k: int) -> None:
    """12 choices a token are summed in a loop."""
    rng = np.random.default_rng(k)
    tokens, rows = 5, 70
    row = rng.permutation(rows)[: tokens * k].reshape(tokens, k).astype(np.int32)
    row[rng.random(row.shape) < 0.2] = -1
    x, gate = rng.standard_normal((tokens, 3)), rng.standard_normal((tokens, k))
    scale = rng.standard_normal((rows, 3))

    def ours(x: jax.Array, gate: jax.Array) -> jax.Array:
        where = rows_of(jnp.asarray(row), rows)
        weigh = weighed_by(unit_gates(gate, where))
        return jnp.sum(jnp.sin(collect(weigh(spread(x, where) * scale), gate, where)))

    def plain(x: jax.Array, gate: jax.Array) -> jax.Array:
        kept = jnp.asarray(row >= 0)[..., None]
        return jnp.sum(jnp.sin(jnp.sum(jnp.where(kept, x[:, None] * scale[np.maximum(row, 0)] * gate[..., None], 0.0), axis=1)))

    with jax.enable_x64(True):
        got, want = (jax.value_and_grad(f, argnums=(0, 1))(jnp.asarray(x), jnp.asarray(gate)) for f in (ours, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sizes", [[16, 0, 5, 9], [0, 0, 0, 3], [0, 0, 0, 0], [8, 8, 8, 8]])
def test_tiles_multiply_as_a_loop_over_experts_does(sizes: list[int]) -> None:
    """Values and both gradients."""
    tiles, total = Tiles(8), sum(sizes)
    room = tiles.room(32, 4)
    rng = np.random.default_rng(total)
    begin = np.asarray(tiles.begin(jnp.asarray(sizes, jnp.int32)))
    mine = [begin[e] + np.arange(size) for e, size in enumerate(sizes)]
    rows, weights, scale = np.zeros((room, 3)), rng.standard_normal((4, 3, 5)), np.zeros((room, 5))
    for at in mine:
        rows[at], scale[at] = rng.standard_normal((len(at), 3)), rng.standard_normal((len(at), 5))  # nobody reads the others

    def ours(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(tiles.product(jnp.asarray(sizes, jnp.int32))(rows, weights)) * scale)

    def plain(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return sum((jnp.sum(jnp.sin(rows[at] @ weights[e]) * scale[at]) for e, at in enumerate(mine)), jnp.zeros(()))

    with jax.enable_x64(True):
        got, want = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(jnp.asarray(rows), jnp.asarray(weights)) for f in (ours, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sizes", [[16, 0, 33, 9], [0, 0, 0, 3], [0, 0, 0, 0], [32, 16, 16, 0]])
def test_kernels_give_what_the_loop_does(sizes: list[int]) -> None:
    """Values and both gradients; the kernels are interpreted."""
    rng, sizes_E = np.random.default_rng(0), jnp.asarray(sizes, jnp.int32)
    room = Tiles(16).room(64, 4)
    there = np.zeros((room, 1), np.float32)
    for begin, size in zip(Tiles(16).begin(sizes_E), sizes, strict=True):
        there[int(begin) : int(begin) + size] = 1
    rows, dy = (jnp.asarray(there * rng.standard_normal((room, n)), jnp.float32) for n in (64, 48))
    weights = jnp.asarray(rng.standard_normal((4, 64, 48)), jnp.float32)

    def passes(tiles: Tiles) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(tiles.product(sizes_E), rows, weights)
        return y, *back(dy)

    for got, want in zip(passes(Tiles(16, kernel=True, interpret=True)), passes(Tiles(16)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_words_say_which_product_runs_and_why() -> None:
    bf16, float64 = jnp.dtype("bfloat16"), jnp.dtype("float64")
    assert product_words(False, bf16, 64, 48) == "a loop"
    assert product_words(True, bf16, 64, 48) == "one GPU kernel"
    assert product_words(True, float64, 64, 48) == "a loop (the GPU kernel sums in float32, rows are float64)"
    assert product_words(True, bf16, 64, 40) == "a loop (the GPU kernel takes dims that are multiples of 16, not 40)"


def test_tiles_follow_the_rows_of_an_expert() -> None:
    assert [tiles_for(n, 8, native=True) for n in (8, 4096)] == [Tiles(16, kernel=True), Tiles(128, kernel=True)]
    assert [tiles_for(n, 8, native=False).rows for n in (8, 512, 1024, 100_000)] == [8, 32, 64, 128]
    for num_rows in (1, 63, 64, 65):
        worst = max(sum(-(-size // 8) * 8 for size in split) for split in ([num_rows, 0, 0], [1, 1, max(num_rows - 2, 0)]))
        assert worst <= Tiles(8).room(num_rows, 3)
