"""Random schedules of the library."""

from hypothesis import strategies as st

from jaxpar.schedule.actions import Schedule
from jaxpar.schedule.library import build_schedule, schedule_problems

ALL = ("gpipe", "1f1b", "interleaved:1", "interleaved:2", "interleaved:3", "interleaved:4", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = ALL, most_stages: int = 8, most_microbatches: int = 24) -> Schedule:
    """Any that the library does not refuse; it refuses dualpipe_v alone, below 2p microbatches."""
    name = draw(st.sampled_from(names))
    num_stages = draw(st.integers(1, most_stages))
    num_microbatches = draw(st.integers(1, most_microbatches))
    if schedule_problems(name, num_stages, num_microbatches):
        assert name == "dualpipe_v"
        num_microbatches += 2 * num_stages
    return build_schedule(name, num_stages, num_microbatches)
