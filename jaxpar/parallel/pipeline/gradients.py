"""Loss and gradients of a step on a pipeline: what is marked before the loop over ticks, and reduced after it.

Weights of embedding and head are gathered once before the loop and their gradients reduced once after it, over `pipe` too, where all
stages but the first and the last have added nothing to them; with tied weights the sum of both ends is taken before ZeRO scatters it.
During the loop every stage holds both whole, whatever the ZeRO stage.

To read on: loop (ticks and messages), training (F, B, I, W), passes (the layers of a chunk), layer (one layer and its residuals), split
(I and W), ends (embedding and head); stage, control and program serve them.
"""

import jax

from jaxpar.core.typing import Array, Params
from jaxpar.core.vma import vary
from jaxpar.mesh.specs import is_plan
from jaxpar.parallel.forward import Batch, Forward
from jaxpar.parallel.pipeline.ends import Ends
from jaxpar.parallel.pipeline.loop import empty_mail, run_ticks
from jaxpar.parallel.pipeline.stage import make_stage
from jaxpar.parallel.pipeline.training import Training
from jaxpar.parallel.reduce import reduce_gradients
from jaxpar.parallel.terms import Key, global_means, total_weights
from jaxpar.parallel.zero import scatter_gradient
from jaxpar.schedule.ticks import TickTable


def pipeline_gradients(
    forward: Forward, table: TickTable, params: Params, batch: Batch, key: Key | None
) -> tuple[dict[str, Array], Params]:
    """As `executor.loss_and_gradients`, by the schedule of `table`."""
    layout = forward.layout
    # Marked once, before the loop: the transpose of this mark is the reduction over data, and must not stand in the loop.
    params = vary(params, layout.token_axes)
    weights = total_weights(forward, params, batch, key)
    stage = make_stage(forward, params, batch, key)
    training = Training(stage, table, Ends(stage, {name: c / weights[name] for name, c in forward.model.loss_terms.items()}))
    state = run_ticks(table, training.by_kind, empty_mail(table, stage.boundary), training.start(params))
    embed, head = jax.tree.unflatten(jax.tree.structure((params["embed"], params["head"])), state.ends)
    grads = {"embed": embed, "blocks": jax.tree.unflatten(jax.tree.structure(params["blocks"]), state.blocks), "head": head}
    if layout.zero_stage >= 2:  # stage 1 scatters all of them in `reduce_gradients`
        for part in ("embed", "head"):
            grads[part] = jax.tree.map(lambda plan, g: scatter_gradient(plan, g), forward.plans[part], grads[part], is_leaf=is_plan)
    sums = {name: total for name, (total, _) in state.sums.items()}
    return global_means(layout, sums, weights), reduce_gradients(layout, forward.plans, grads)
