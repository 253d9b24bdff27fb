"""The schedule of an evaluation: forward passes only."""

from jaxpar.schedule.actions import Action, Schedule, Shape


def forward_schedule(shape: Shape) -> Schedule:
    """Forward passes only, for evaluation: each stage runs a microbatch as soon as it can have arrived."""

    def order(stage: int) -> tuple[Action, ...]:
        found = [(m + shape.virtual(stage, c), c, m) for m in range(shape.num_microbatches) for c in range(shape.num_chunks)]
        return tuple(Action("F", m, c) for _, c, m in sorted(found))

    return Schedule("forward", shape, tuple(order(stage) for stage in range(shape.num_stages)))
