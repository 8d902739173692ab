"""The exchanges of sharded tables as XLA schedules them on GPUs: what runs beside them."""

from support.gpu_programs import AHEAD, WORKLOAD, each_of, program
from support.gpu_schedule import Transfer


def exchanges(name: str) -> tuple[Transfer, list[Transfer]]:
    """The ids that are sent for the next batch, and the exchanges of vectors, as they start."""
    transfers = program(name).facts.schedule.select("all-to-all")
    slots = 2 * WORKLOAD.batch  # twice the capacity that even ids need
    (ids,) = (t for t in transfers if t.bytes == 4 * WORKLOAD.tables * slots)
    return ids, [t for t in transfers if t is not ids]


@each_of(*AHEAD)
def test_no_exchange_blocks(name):
    ids, vectors = exchanges(name)
    assert len(vectors) == 2
    assert not any(t.is_blocking for t in (ids, *vectors))


@each_of(*AHEAD)
def test_ids_of_the_next_batch_travel_beside_products(name):
    ids, _ = exchanges(name)
    assert len(ids.products) >= 1
    if AHEAD[name][0] == "ids":
        assert 2 * len(ids.products) >= WORKLOAD.num_products


@each_of(*(name for name in AHEAD if AHEAD[name][0] == "ids"))
def test_gradients_of_vectors_travel_beside_products_of_the_backward_pass(name):
    """Those of the weights, which XLA puts last. Looked-up vectors come before all products."""
    _, (looked_up, gradients) = exchanges(name)
    assert looked_up.products == ()
    assert len(gradients.products) == len(WORKLOAD.widths)
    assert all(product.is_backward for product in gradients.products)


@each_of(*(name for name in AHEAD if AHEAD[name][0] == "vectors"))
def test_vectors_of_the_next_batch_travel_beside_other_work(name):
    """They wait for their ids; then the updates of rows hide them, and no product of the model."""
    _, vectors = exchanges(name)
    last = vectors[-1]
    assert last.products == ()
    assert sum(opcode in ("fusion", "custom-call", "sort") for opcode in last.beside) >= 10
