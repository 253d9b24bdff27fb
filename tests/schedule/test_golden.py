"""Makespans, idle times and memory that the papers and other implementations give, for unit costs."""

import pytest

from jaxpar.schedule.interleaved import group_sizes
from jaxpar.schedule.library import build_schedule
from jaxpar.schedule.measure import count_messages, peak_in_flight
from jaxpar.schedule.simulate import Costs, Timeline, simulate


def timeline(name: str, num_stages: int, num_microbatches: int, costs: Costs | None = None) -> Timeline:
    return simulate(build_schedule(name, num_stages, num_microbatches), costs)


# F = I = W = 1 and B = 2 a whole stage, so 1 / v of that a chunk; no communication time.
@pytest.mark.parametrize(
    ("name", "num_stages", "num_microbatches", "makespan"),
    [
        ("gpipe", 4, 4, 21),
        ("1f1b", 4, 4, 21),
        ("zb_v", 4, 4, 15),
        ("gpipe", 4, 8, 33),
        ("1f1b", 4, 8, 33),
        ("interleaved:2", 4, 8, 28.5),
        ("interleaved:4", 4, 8, 26.25),
        ("zb_h1", 4, 8, 27),
        ("zb_h2", 4, 8, 27),
        ("zb_v", 4, 8, 25.5),
        ("gpipe", 8, 16, 69),
        ("1f1b", 8, 16, 69),
        ("interleaved:2", 8, 16, 58.5),
        ("interleaved:4", 8, 16, 53.25),
        ("zb_h1", 8, 16, 55),
        ("zb_v", 8, 16, 51.5),
        ("zb_h2", 8, 24, 79),
        ("zb_v", 4, 6, 19.5),
        ("zb_v", 4, 7, 22.5),
    ],
)
def test_makespan(name: str, num_stages: int, num_microbatches: int, makespan: float) -> None:
    assert timeline(name, num_stages, num_microbatches).makespan == makespan


# A chunk's F is 1 and its B is 2; `overlapped`: a pair of both takes 3 and sends at its end, as DeepSeek counts it.
# Run one after the other, the forward's message leaves before the backward is done, which saves (p - 1) of them.
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "overlapped", "serial"), [(2, 8, 50, 49), (4, 10, 66, 63), (4, 20, 126, 123), (8, 32, 206, 199)]
)
def test_makespan_of_dualpipe_v(num_stages: int, num_microbatches: int, overlapped: float, serial: float) -> None:
    costs = {"F": 2, "I": 2, "W": 2}
    found = timeline("dualpipe_v", num_stages, num_microbatches, Costs(**costs, FB=6))
    assert found.makespan == overlapped
    assert found.idle == (2 * (num_stages - 1),) * num_stages  # (p - 1)(F&B + B - 3W) of chunks
    assert timeline("dualpipe_v", num_stages, num_microbatches, Costs(**costs)).makespan == serial
    assert set(found.peak_in_flight) == {(2 * num_stages + 1) / 2}


@pytest.mark.parametrize(("num_microbatches", "gaps"), [(4, (3, 2, 1, 0)), (6, (1, 0.5, 0.5, 0)), (7, (0, 0, 0, 0)), (9, (0, 0, 0, 0))])
def test_zb_v_idles_inside_only_below_2p_minus_1_microbatches(num_microbatches: int, gaps: tuple[float, ...]) -> None:
    assert timeline("zb_v", 4, num_microbatches).gaps == gaps


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("per_stage", [1, 2, 5])
def test_idle_formulae(num_stages: int, per_stage: int) -> None:
    """Costs of three different sizes, so that no term of a formula hides behind another."""
    costs = Costs(F=3, I=3.5, W=2)
    p, m, backward = num_stages, num_stages * per_stage, costs.I + costs.W
    expected = {
        "gpipe": (p - 1) * (costs.F + backward),
        "1f1b": (p - 1) * (costs.F + backward),
        "interleaved:2": (p - 1) * (costs.F + backward) / 2,
        "interleaved:3": (p - 1) * (costs.F + backward) / 3,
        "zb_h1": (p - 1) * (costs.F + costs.I - costs.W),
    }
    for name, idle in expected.items():
        found = timeline(name, p, m, costs)
        assert found.idle == pytest.approx((idle,) * p), name
        assert found.bubble_of_ideal == pytest.approx(idle / (m * (costs.F + backward))), name
        assert found.bubble_of_makespan == pytest.approx(idle / found.makespan), name
    assert max(timeline("zb_h2", p, 2 * p + m).gaps) == 0


def test_interleaving_keeps_its_bubble_where_stages_do_not_divide_microbatches() -> None:
    for num_microbatches in range(5, 20):
        assert timeline("interleaved:2", 4, num_microbatches).idle == (4.5,) * 4


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8, 16, 17, 40])
def test_in_flight_formulae(num_stages: int, num_microbatches: int) -> None:
    """From F to B or W on each stage, in chunks; the zero-bubble warm-ups from F to I."""
    p, m = num_stages, num_microbatches
    for stage in range(p):
        assert peak_in_flight(build_schedule("gpipe", p, m).orders[stage]) == m
        assert peak_in_flight(build_schedule("1f1b", p, m).orders[stage]) == min(p - stage, m)
        for v in (2, 3):
            chunks = 2 * (p - stage - 1) + (v - 1) * max(group_sizes(p, m)) + 1
            assert peak_in_flight(build_schedule(f"interleaved:{v}", p, m).orders[stage]) == min(chunks, v * m)
        h1, h2 = (build_schedule(name, p, m).orders[stage] for name in ("zb_h1", "zb_h2"))
        assert peak_in_flight(h1, "I") == min(p - stage, m)
        assert peak_in_flight(h1) == min(p, m)
        assert peak_in_flight(h2, "I") == min(2 * (p - stage) - 1, m)
        assert peak_in_flight(h2) == min(2 * p - 1, m)
        assert peak_in_flight(build_schedule("zb_v", p, m).orders[stage]) <= 2 * p
    if m >= 2 * p:
        assert {peak_in_flight(order) for order in build_schedule("zb_v", p, m).orders} == {2 * p}


def test_messages() -> None:
    """One each way over each boundary between stages and microbatch; v times as many with v chunks, but none at the turn of a V."""
    p, m = 4, 8
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        assert count_messages(build_schedule(name, p, m)) == 2 * (p - 1) * m
    assert count_messages(build_schedule("interleaved:2", p, m)) == 2 * (2 * p - 1) * m
    for name in ("zb_v", "dualpipe_v"):
        assert count_messages(build_schedule(name, p, m)) == 2 * 2 * (p - 1) * m
