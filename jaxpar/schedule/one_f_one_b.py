"""1F1B (PipeDream-Flush; Narayanan et al., arXiv 2006.09503): the bubble of GPipe, the memory of p microbatches instead of m.

A stage runs ahead by the forwards that reach the last stage before its first gradient can come back, p - r of them, then
alternates. So stage r never holds more than min(p - r, m) microbatches, however many a step has.
"""

from jaxpar.schedule.actions import Action, Schedule, Shape


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Warm-up of p - r forwards, then each backward is followed by the next forward."""
    orders = tuple(_order(min(num_stages - stage, num_microbatches), num_microbatches) for stage in range(num_stages))
    return Schedule("1f1b", Shape(num_stages, num_microbatches), orders)


def _order(warm_up: int, num_microbatches: int) -> tuple[Action, ...]:
    order = [Action("F", i) for i in range(warm_up)]
    for i in range(num_microbatches):
        order.append(Action("B", i))
        if i + warm_up < num_microbatches:
            order.append(Action("F", i + warm_up))
    return tuple(order)
