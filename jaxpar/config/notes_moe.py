"""What is legal in `model.moe` and should be known before a run."""

from jaxpar.config.check_moe import RENORMALIZED
from jaxpar.config.run import RunConfig

UNBALANCED = ("topk", "switch", "gshard")  # routers that send all to one expert if no loss keeps them from it


def moe_notes(config: RunConfig) -> list[str]:
    """What is legal and should be known before a run."""
    moe = config.model.moe
    if moe is None:
        return []
    notes = []
    if moe.router == "expert_choice":
        notes.append(
            "model.moe.router=expert_choice looks at later tokens of a row: not causal, so its loss is not that of a model that writes"
        )
    elif moe.needs_group:
        notes.append(f"model.moe.router={moe.router} weighs all tokens of a group in training: a token's expert depends on later ones")
    if moe.router == "sigmoid_bias" and moe.balance_coefficient:
        both = f"model.moe.router=sigmoid_bias with model.moe.balance_coefficient={moe.balance_coefficient:g}"
        notes.append(f"{both}: two forces balance the experts (DeepSeek-V3: 1e-4, balance_scope: sequence)")
    if moe.router in UNBALANCED and not (moe.balance_coefficient or moe.entropy_coefficient) and moe.num_experts > 1:
        text = f"nothing balances the experts of model.moe.router={moe.router}: model.moe.balance_coefficient=0"
        notes.append(f"{text}; 1e-2 is usual (Switch), or model.moe.router=sigmoid_bias")
    if moe.num_experts == 1:
        notes.append("model.moe.num_experts=1: every token goes to the one expert")
    elif moe.top_k == 1 and moe.router in RENORMALIZED and (moe.renormalize or moe.softmax == "after"):
        notes.append(f"model.moe.top_k=1 with gates that sum to 1: each is {moe.routed_scaling:g}, so the loss teaches the router nothing")
    if moe.dispatch == "all_to_all" and moe.capacity_factor is None:
        factor = moe.num_experts / moe.top_k
        buffers = f"buffers have room for every token at every expert, {factor:.3g} x what top_k={moe.top_k} fills"
        notes.append(f"model.moe.capacity_factor=null with model.moe.dispatch=all_to_all: {buffers}; dispatch: ragged has less")
    return notes
