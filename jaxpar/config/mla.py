"""`model.mla:` multi-head latent attention, with the names of DeepSeek's configs."""

from pydantic import Field, PositiveInt

from jaxpar.config.base import Section


class MlaConfig(Section):
    """Queries, keys and values of all heads made from small latents of a token (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A head's queries and keys have a part without position and a rotary part; the rotary part of the keys is one for all heads.
    """

    q_lora_rank: PositiveInt | None = None  # width of the queries' latent; None: queries straight from the token (DeepSeek-V2-Lite)
    kv_lora_rank: PositiveInt = Field(examples=[512])  # width of the latent that keys and values share
    qk_nope_head_dim: PositiveInt = Field(examples=[128])  # of a head's queries and keys, without position
    qk_rope_head_dim: PositiveInt = Field(examples=[64])  # of a head's queries and keys, rotary: even
    v_head_dim: PositiveInt = Field(examples=[128])  # of a head's values: at most as wide as its queries

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
