"""GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards.

Every stage idles for p - 1 forwards and p - 1 backwards, and holds all m microbatches at once: the baseline that the others are
measured against, and the schedule that automatic differentiation of a forward pipeline gives.
"""

from jaxpar.schedule.actions import Action, Schedule, Shape


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Backwards run in the order of the forwards, so that the first gradient to be sent is the first that can be used."""
    order = tuple(Action(kind, i) for kind in ("F", "B") for i in range(num_microbatches))
    return Schedule("gpipe", Shape(num_stages, num_microbatches), (order,) * num_stages)
