"""`model.moe:` mixture-of-experts layers: how many, who goes where, and how tokens travel.

Where peers differ (and silently give other numbers), the difference is an option here, its default stated with its source.
"""

import math
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxpar.config.base import Section

RouterName = Literal["topk", "switch", "gshard", "sigmoid_bias", "expert_choice", "base", "sinkhorn", "hash"]

# Routers whose choice for one token depends on the others of its group: their scores are shared over the whole group.
GROUP_ROUTERS = ("expert_choice", "base", "sinkhorn")
ONE_EXPERT = ("switch", "base", "hash")  # top_k is 1 by definition
TWO_EXPERTS = ("gshard",)


class MoeConfig(Section):
    """Experts in place of the feed-forward layer of some blocks."""

    num_experts: PositiveInt = Field(examples=[8])
    top_k: PositiveInt = 2  # experts a token; expert_choice: on average
    expert_dim: PositiveInt | None = None  # hidden width of one expert; None: model.mlp_dim
    router: RouterName = "topk"
    dispatch: Literal["local", "all_to_all", "ragged"] = "all_to_all"
    causal_only: bool = False  # refuse what lets later tokens of a row decide about earlier ones

    # Which layers.
    every: PositiveInt = 1  # the last of every so many layers has experts (GShard: 2)
    leading_dense: NonNegativeInt = 0  # layers before the first that counts, all dense (DeepSeek-V3: 3)

    # Beside the routed experts.
    shared_experts: NonNegativeInt = 0  # experts that every token passes, one of width shared_experts x expert_dim
    shared_gate: bool = False  # sigmoid(x w) on their output (Qwen1.5-MoE)
    residual: bool = False  # a dense layer of width mlp_dim beside, mixed by a learned softmax (DeepSpeed-MoE, arXiv 2201.05596)

    # Capacity: room of one expert for the tokens of one group. What does not fit is dropped: the residual stream alone goes on.
    capacity_factor: PositiveFloat | None = 1.25  # Switch, arXiv 2101.03961, section 2.2; None: no token is dropped
    capacity_formula: Literal["megatron", "deepspeed", "tutel"] = "megatron"  # see `capacity`
    min_capacity: PositiveInt = 1  # DeepSpeed: 4
    routing_group_sequences: PositiveInt = 1  # rows that share capacity; whole rows, so that no layout changes who is dropped
    # Who keeps a place: see `ops.routing.capacity`. Not Megatron-LM's `probs`, by which a later token takes an earlier one's place.
    drop_policy: Literal["position", "choice", "probability"] = "position"
    renormalize_after_drop: bool = False  # gates of what is left sum to what all did (DeepSpeed; Megatron-LM does not)
    max_drop_fraction: float | None = Field(default=None, gt=0.0, le=1.0)  # a step or evaluation that drops more in a layer stops the run
    ragged_buffer_factor: PositiveFloat = 2.0  # rows a device can receive / rows it gets if balanced; `dispatch: ragged`; ours
    allow_overflow: bool = False  # rows beyond that are dropped and counted, not an error; which ones then depends on mesh.expert

    # Scores.
    softmax: Literal["before", "after"] = "before"  # of the choice of top_k (GShard); after: over the chosen only (Mixtral)
    renormalize: bool = True  # gates divided by their sum (GShard, DeepSeek-V3), where softmax: before, and sigmoid_bias
    jitter: float = Field(default=0.0, ge=0.0, lt=1.0)  # its input times uniform(1 - jitter, 1 + jitter) in training (Switch: 0.01)
    routed_scaling: PositiveFloat = 1.0  # factor on all gates (DeepSeek-V3: 2.5)
    num_groups: PositiveInt = 1  # of experts (not of tokens): DeepSeek-V3 limits a token to top_groups of them
    top_groups: PositiveInt = 1
    group_score: Literal["top2_sum", "max"] = "top2_sum"  # of a group of experts: DeepSeek-V3; max: DeepSeek-V2
    sinkhorn_tolerance: PositiveFloat = 1e-4  # Megatron-LM

    # sigmoid_bias: once per optimizer step, bias += bias_rate x sign(mean count - count) (arXiv 2408.15664; Megatron-LM).
    bias_rate: NonNegativeFloat = 1e-3
    bias_centred: bool = False  # the step less its mean (torchtitan)

    # Losses: coefficients. The metric beside each is without it. Each is summed over layers with experts, as in Switch and Megatron-LM;
    # Hugging Face's router_aux_loss_coef c counts once for all layers and is top_k at balance: c x top_k / layers here.
    balance_coefficient: NonNegativeFloat = 0.0  # E sum f P (Switch, arXiv 2101.03961, section 2.2), 1 at balance: 1e-2 there
    balance_scope: Literal["group", "sequence", "global"] = (
        "group"  # f and P over a routing group (GShard), each row, or f over the last step
    )
    balance_counts: Literal["all", "first"] = "all"  # choices that f counts: Megatron-LM all / top_k; DeepSpeed top-2, GShard the first
    entropy_coefficient: NonNegativeFloat = 0.0  # sum P log P over a group, P mean probabilities
    router_z_coefficient: NonNegativeFloat = 0.0  # mean of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, section 3): 1e-3 there

    @property
    def needs_group(self) -> bool:
        """The choice needs the scores of the whole group."""
        return self.router in GROUP_ROUTERS

    @property
    def needs_places(self) -> bool:
        """Which place a choice has matters: places are limited, or are those of a buffer."""
        return self.capacity_factor is not None or self.dispatch == "all_to_all"

    @property
    def learns(self) -> bool:
        """The router has weights: its choice depends on activations."""
        return self.router != "hash"

    @property
    def has_bias(self) -> bool:
        """A bias, moved once a step, is added to scores for the choice."""
        return self.router == "sigmoid_bias"

    @property
    def tosses(self) -> bool:
        """The choice needs a random number a token in training."""
        return self.router == "gshard"

    @property
    def keeps_load(self) -> bool:
        """A loss needs the choices of the step before."""
        return self.balance_scope == "global" and self.balance_coefficient > 0

    @property
    def choices(self) -> int:
        """Places in a token's list of experts: under expert_choice any number of experts may take it."""
        return self.num_experts if self.router == "expert_choice" else self.top_k

    @property
    def mean_choices(self) -> float:
        """Experts a token goes to before any drop, on average over a full group; gshard's second, by chance, counted."""
        return self.top_k * (self.capacity_factor or 1) if self.router == "expert_choice" else self.top_k

    def capacity(self, tokens: int) -> int:
        """Tokens of a group of `tokens` (padding among them) that one expert takes.

        megatron: ceil(tokens top_k / experts x factor). deepspeed: ceil(tokens / experts x factor x top_k).
        tutel: top_k x int(factor x ceil(tokens / experts)). Then at least min_capacity and at most the tokens.
        """
        factor, k, experts = self.capacity_factor, self.top_k, self.num_experts
        if factor is None:
            return tokens
        if self.capacity_formula == "tutel":
            room = k * int(factor * math.ceil(tokens / experts))
        elif self.capacity_formula == "deepspeed":
            room = math.ceil(tokens / experts * factor * k)
        else:
            room = math.ceil(tokens * k / experts * factor)
        return min(max(room, self.min_capacity), tokens)
