"""`model:` what is computed. Nothing here depends on a mesh."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from jaxpar.config.base import Section
from jaxpar.config.mla import MlaConfig
from jaxpar.config.moe import MoeConfig


class RopeScaling(Section):
    """Llama-3 frequency scaling for longer contexts (Llama 3.1 model card; Hugging Face `rope_type: llama3`)."""

    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_len: PositiveInt = 8192


class ModelConfig(Section):
    """A decoder-only transformer."""

    num_layers: PositiveInt = Field(examples=[4])
    embed_dim: PositiveInt = Field(examples=[128])
    num_heads: PositiveInt = Field(examples=[8])
    num_kv_heads: PositiveInt | None = None  # None: as many as num_heads
    head_dim: PositiveInt | None = None  # None: embed_dim / num_heads
    mlp_dim: PositiveInt = Field(examples=[352])
    vocab_size: PositiveInt = Field(examples=[257])
    vocab_multiple: PositiveInt = 1  # stored vocabulary is padded up to a multiple of this; padded logits never count

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: PositiveFloat = 1e-5
    activation: Literal["swiglu", "gelu"] = "swiglu"  # gelu: the tanh form of GPT-2
    positions: Literal["rope", "learned"] = "rope"
    max_positions: PositiveInt | None = None  # rows of the table of learned positions
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    bias: bool = False  # biases on every linear map of a block (GPT-2); LayerNorm has its own bias always
    tied_embeddings: bool = False
    sliding_window: PositiveInt | None = None  # a token sees itself and the window - 1 tokens before it
    attention_softcap: PositiveFloat | None = None
    logits_softcap: PositiveFloat | None = None
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)  # embeddings and residual branches
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)  # attention probabilities: `attention: reference` only
    init_std: PositiveFloat = 0.02
    mla: MlaConfig | None = None  # latent attention in place of plain attention
    moe: MoeConfig | None = None  # experts in place of the feed-forward layer of some or all layers

    @property
    def num_blocks(self) -> int:
        """Repeating units of layers, which the trainer scans and a pipeline divides: one layer each, or `moe.every` of them."""
        return (self.num_layers - self.leading_dense) // (self.moe.every if self.moe else 1)

    @property
    def leading_dense(self) -> int:
        """Dense layers before the first block; they belong to the embedding."""
        return self.moe.leading_dense if self.moe else 0

    @property
    def expert_dim(self) -> int:
        """Hidden width of one expert."""
        return (self.moe and self.moe.expert_dim) or self.mlp_dim

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.mla else self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Width of a head's queries and keys."""
        return self.mla.qk_head_dim if self.mla else self.head_dim or self.embed_dim // self.num_heads

    @property
    def value_size(self) -> int:
        """Width of a head's values."""
        return self.mla.v_head_dim if self.mla else self.head_size

    @property
    def rotary_size(self) -> int:
        """How much of a head's queries and keys rotary angles turn."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_size

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
