"""ZB-H1 and ZB-H2 (Qi et al., arXiv 2401.10241, section 2): 1F1B with the backward split, weight gradients moved into the bubbles.

Only I is on the way of a gradient to the stage before; W can wait. A stage that puts off its W by d microbatches frees d slots of
time near the end of the step, where 1F1B idles, and holds d more microbatches' activations until then.

H1  warm-up p - r as in 1F1B, W put off by r: every stage holds p microbatches, which is 1F1B's peak on stage 0.
    Idle (p - 1)(F + I - W), a third of 1F1B's where F = I = W.
H2  warm-up 2(p - r) - 1, which fills the wait for the first gradient, W put off by 2r: every stage holds 2p - 1.
    Idle (p - 1)(F + I - 2W): none where F = I = W, but for the skew of the first forwards.

These are the hand-made orders of the paper. With the profiled times of its Table 9 they give the bubble rates of its Table 5
(ZB-H1, ZB-H2, and ZB-1p, whose automatic search finds no better order than H1's there) to four decimals.
"""

from jaxpar.schedule.actions import Action, Schedule, Shape


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """At most p - r microbatches between F and I, p between F and W."""
    plan = [(num_stages - stage, stage) for stage in range(num_stages)]
    return _schedule("zb_h1", plan, num_microbatches)


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """At most 2(p - r) - 1 microbatches between F and I, 2p - 1 between F and W."""
    plan = [(2 * (num_stages - stage) - 1, 2 * stage) for stage in range(num_stages)]
    return _schedule("zb_h2", plan, num_microbatches)


def _schedule(name: str, plan: list[tuple[int, int]], num_microbatches: int) -> Schedule:
    orders = tuple(_order(min(warm_up, num_microbatches), delay, num_microbatches) for warm_up, delay in plan)
    return Schedule(name, Shape(len(plan), num_microbatches), orders)


def _order(warm_up: int, delay: int, num_microbatches: int) -> tuple[Action, ...]:
    """I of each microbatch, the W of `delay` microbatches before, the next F; the last `delay` W at the end."""
    order = [Action("F", i) for i in range(warm_up)]
    for i in range(num_microbatches):
        order.append(Action("I", i))
        if i >= delay:
            order.append(Action("W", i - delay))
        if i + warm_up < num_microbatches:
            order.append(Action("F", i + warm_up))
    order += [Action("W", i) for i in range(max(0, num_microbatches - delay), num_microbatches)]
    return tuple(order)
