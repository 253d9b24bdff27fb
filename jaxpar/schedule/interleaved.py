"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2): v chunks a stage divide the bubble by v, and multiply messages.

Microbatches go in groups of N: a stage runs a group through its first chunk, then through its second, and so on; backwards take
the chunks from the last to the first. A group of at least p never waits for a message to come round from the last stage to the
first; a larger one holds more activations.
"""

from jaxpar.schedule.actions import Action, Kind, Schedule, Shape


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Megatron's order: 2(p - r - 1) + (v - 1)N chunks of warm-up on stage r, then forwards and backwards in turn."""
    sizes = group_sizes(num_stages, num_microbatches)
    forwards = _in_groups("F", sizes, range(num_chunks))
    backwards = _in_groups("B", sizes, range(num_chunks)[::-1])
    orders = []
    for stage in range(num_stages):
        ahead = 2 * (num_stages - stage - 1) + (num_chunks - 1) * max(sizes)
        warm_up = min(ahead + 1, len(forwards))  # + 1: of a pair in the steady state, the forward comes first
        order = forwards[:warm_up]
        for i, backward in enumerate(backwards):
            order += [backward, *forwards[warm_up + i : warm_up + i + 1]]
        orders.append(tuple(order))
    return Schedule(f"interleaved:{num_chunks}", Shape(num_stages, num_microbatches, num_chunks), tuple(orders))


def group_sizes(num_stages: int, num_microbatches: int) -> list[int]:
    """Groups of p or, where p does not divide m, of a little more: m // p groups that differ by one at most.

    Megatron leaves the rest of m / p to a last, smaller group and refuses it below p, where its order deadlocks (p = 4, m = 5,
    v = 3). With equal groups every m works, and idle time is (p - 1)(F + B) / v for all m >= p.
    """
    groups = max(1, num_microbatches // num_stages)
    return [num_microbatches // groups + (i < num_microbatches % groups) for i in range(groups)]


def _in_groups(kind: Kind, sizes: list[int], chunks: range) -> list[Action]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        Action(kind, i, chunk) for start, size in zip(starts, sizes, strict=True) for chunk in chunks for i in range(start, start + size)
    ]
