"""Bytes that experts send, from the config alone: all_to_all as the compiled program has them (tested), ragged if all were balanced."""

import math

from jaxpar.config.layout import Layout
from jaxpar.config.memory import DTYPE_BYTES
from jaxpar.config.run import RunConfig

NUMBER_COLUMNS = 8  # beside a row of `ragged` for the gradient of its gate: as many as keep rows of 2 bytes an element aligned to 16
PASSES = 4  # there and back, forwards and backwards; what remat does again is not counted


def places_per_expert(config: RunConfig, layout: Layout) -> int:
    """Places of one expert in a device's buffer for a microbatch, under `dispatch: all_to_all`; filled up, for `context` divides them."""
    moe = config.model.moe
    assert moe is not None
    rows = config.data.global_batch_size // (config.num_microbatches * layout.ways("batch"))
    capacity = moe.capacity(moe.routing_group_sequences * config.data.seq_len)
    return filled_places(rows // moe.routing_group_sequences, capacity, layout.ways("seq"))


def filled_places(num_groups: int, capacity: int, ways: int) -> int:
    """Capacity for each group, filled up to a multiple of `ways`."""
    return math.ceil(num_groups * capacity / ways) * ways


def rows_of_numbers(count: int, width: int, itemsize: int) -> int:
    """Rows of `width` elements that hold `count` numbers of float32's precision: elements of 2 bytes hold half a number."""
    return math.ceil(count * (2 if itemsize == 2 else 1) / width)


def exchange_bytes(config: RunConfig, layout: Layout) -> int:
    """Bytes a device sends to the other holders of experts in a step; 0 where each holds all of them.

    all_to_all: experts x places x embed_dim, of which 1 / expert stays, four times a block and microbatch, and once, behind the gradients
    of the rows, a number for each place: the gradient of its gate. ragged: the same of the rows that there are, if all were balanced.
    """
    moe, experts = config.model.moe, layout.ways("experts")
    if moe is None or experts == 1:
        return 0
    width, itemsize = config.model.embed_dim, DTYPE_BYTES[config.compute_dtype]
    if moe.dispatch == "all_to_all":
        places = places_per_expert(config, layout) // layout.ways("seq")
        numbers = moe.num_experts * (PASSES * places + rows_of_numbers(places, width, itemsize)) * width
    else:
        tokens = (
            config.data.global_batch_size * config.data.seq_len // (config.num_microbatches * layout.ways("batch") * layout.ways("seq"))
        )
        numbers = round(tokens * moe.mean_choices) * (PASSES * width + NUMBER_COLUMNS)
    blocks = config.model.num_blocks / layout.sizes["pipe"]
    return round(blocks * config.num_microbatches * numbers * itemsize * (experts - 1) / experts)
