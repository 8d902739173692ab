"""From the bags of a device to what it asks the others for."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._typing import PyTree
from ._bags import Bags
from ._exchange import gather_blocks, swap_blocks
from ._layout import Layout
from ._requests import Requests, number_ids, rows_to_ask, slot_plan, split_slots

BagsByTable = Mapping[str, Mapping[str, Bags]]


def ask_for_rows(
    layout: Layout, bags: BagsByTable, capacity: Mapping[str, int | None], axis_name: str | None
) -> Requests:
    """Numbers the ids of a device and tells the owners of their rows; see `exchange_ids`."""
    num_ids = {name: sum(b.ids.size for b in own.values()) for name, own in bags.items()}
    plan = slot_plan(layout, num_ids, capacity)
    numbered, slots = {}, {}
    for name, own in bags.items():
        ids = [jnp.reshape(b.ids, -1) for b in own.values()]
        numbered[name] = number_ids(ids, layout.places[name], plan, name)
        slots |= split_slots(numbered[name], own)
    asking = {}
    for store, width in plan.width.items():
        members = [one for name, one in numbered.items() if layout.places[name].store == store]
        asking[store] = rows_to_ask(layout.stores[store], width, members)
    weights = {f: b.weights for own in bags.values() for f, b in own.items()}
    return Requests(
        slots=slots,
        weights={f: jnp.asarray(w) for f, w in weights.items() if w is not None},
        asked=_tell_owners(layout, asking, axis_name),
        asked_for={name: one.asked_for[None] for name, one in numbered.items()},
        overflow={name: one.overflow[None] for name, one in numbered.items()},
        invalid={name: one.invalid[None] for name, one in numbered.items()},
    )


def _tell_owners(
    layout: Layout, asking: Mapping[str, jax.Array], axis_name: str | None
) -> dict[str, jax.Array]:
    """What each device asked this one for. Rows whose columns are split are asked of all."""
    split = [name for name in asking if layout.stores[name].kind == "column"]
    sent = [name for name in asking if name not in split]
    told = swap_blocks([asking[name] for name in sent], axis_name)
    everywhere = gather_blocks([asking[name][0] for name in split], axis_name)
    known = dict(zip([*sent, *split], [*told, *everywhere], strict=True))
    return {name: known[name] for name in asking}


def specs_of_requests(layout: Layout, bags: BagsByTable, axis_name: str | None) -> PyTree:
    """A `PartitionSpec` for every array of `ask_for_rows`."""
    split = P(axis_name)
    found = {f: b for own in bags.values() for f, b in own.items()}
    stores = {layout.places[name].store: layout.stores[layout.places[name].store] for name in bags}
    each = dict.fromkeys(bags, split)
    weighted = [feature for feature, b in found.items() if b.weights is not None]
    asked = {n: P() if s.kind == "column" else split for n, s in stores.items()}
    slots, weights = dict.fromkeys(found, split), dict.fromkeys(weighted, split)
    return Requests._make((slots, weights, asked, each, each, each))
