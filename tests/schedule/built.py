"""Random schedules of the library."""

from hypothesis import strategies as st

from jaxpar.schedule.actions import Schedule
from jaxpar.schedule.library import build_schedule, least_microbatches

ALL = ("gpipe", "1f1b", "interleaved:1", "interleaved:2", "interleaved:3", "interleaved:4", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = ALL, most_stages: int = 8, most_microbatches: int = 24) -> Schedule:
    """Any that the library does not refuse; it refuses too few microbatches alone."""
    name = draw(st.sampled_from(names))
    num_stages = draw(st.integers(1, most_stages))
    num_microbatches = draw(st.integers(1, most_microbatches))
    num_microbatches += least_microbatches(name, num_stages) - 1
    return build_schedule(name, num_stages, num_microbatches)
