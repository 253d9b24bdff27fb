"""The loop over the ticks of a table: which action runs, and which messages pass. It knows no schedule and no model."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.core.typing import Array
from jaxpar.core.vma import vary, varying
from jaxpar.parallel.pipeline.control import buffer, get, put, run_if
from jaxpar.parallel.pipeline.program import AXIS, Type
from jaxpar.schedule.actions import KINDS, Kind
from jaxpar.schedule.ticks import COLUMNS, NONE, Pairs, TickTable

S = TypeVar("S")


class Tick(NamedTuple):
    """This stage's row of a tick: scalars, named as the columns of `TickTable`."""

    kind: Array
    microbatch: Array
    chunk: Array
    reads: Array
    inputs: Array
    stash: Array
    deferred: Array
    head: Array
    keeps: Array
    sends_up: Array
    sends_down: Array
    from_below: Array
    from_above: Array


class Mail(NamedTuple):
    """slots: [n + 1, b, S, D], messages that wait, and a spare row for what nobody reads. out: [b, S, D], what the last action made."""

    slots: Array
    out: Array

    def read(self, slot: Array) -> Array:
        return get(self.slots, jnp.maximum(slot, 0))


def empty_mail(table: TickTable, boundary: Type) -> Mail:
    """Before the first tick."""
    return Mail(buffer(boundary, table.num_slots["messages"] + 1), buffer(boundary))


Perform = Callable[[Tick, Mail, S], tuple[Array, S]]  # -> (message to send, state)


def run_ticks(table: TickTable, actions: Mapping[Kind, Perform[S]], mail: Mail, state: S) -> S:
    """State after all ticks. One scan: the program does not grow with microbatches."""
    rows_TPC = jnp.asarray(np.stack([getattr(table, name) for name in COLUMNS], axis=-1))

    def tick(carry: tuple[Mail, S], row: tuple[Array, Array]) -> tuple[tuple[Mail, S], None]:
        rows_PC, pattern = row
        mine_C = lax.dynamic_index_in_dim(rows_PC, lax.axis_index(AXIS), keepdims=False)
        here = Tick(**{name: mine_C[i] for i, name in enumerate(COLUMNS)})
        for kind in table.kinds:
            carry = run_if(here.kind == KINDS.index(kind), partial(_act, actions[kind]), here, carry)
        mail, state = carry
        return (_exchange(table, pattern, here, mail), state), None

    return lax.scan(tick, (mail, state), (rows_TPC, jnp.asarray(table.pattern)))[0][1]


def _act(action: Perform[S], here: Tick, carry: tuple[Mail, S]) -> tuple[Mail, S]:
    mail, state = carry
    out, state = action(here, mail, state)
    return Mail(mail.slots, vary(out, tuple(varying(mail.out)))), state


def _exchange(table: TickTable, pattern: Array, here: Tick, mail: Mail) -> Mail:
    """Messages pass between the stages that have one; each is put where it waits for its reader."""
    axes = tuple(varying(mail.out))
    waited = any((getattr(table, name) != NONE).any() for name in ("sends_up", "sends_down"))

    def outgoing(slot: Array) -> Array:
        return lax.cond(slot == NONE, lambda: mail.out, lambda: mail.read(slot)) if waited else mail.out

    def send(pairs: Pairs, out: Array) -> Array:
        return lax.ppermute(out, AXIS, pairs) if pairs else vary(jnp.zeros_like(out), axes)

    branches = [lambda *out, p=p: tuple(vary(send(pairs, o), axes) for pairs, o in zip(p, out, strict=True)) for p in table.patterns]
    from_below, from_above = lax.switch(pattern, branches, outgoing(here.sends_up), outgoing(here.sends_down))
    slots, spare = [mail.slots], table.num_slots["messages"]
    for slot, message in ((here.keeps, mail.out), (here.from_below, from_below), (here.from_above, from_above)):
        slots = put(slots, [message], jnp.where(slot == NONE, spare, slot))
    return Mail(slots[0], mail.out)
