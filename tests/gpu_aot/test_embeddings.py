"""The exchanges of sharded tables as XLA schedules them on GPUs: what runs beside them."""

from support.gpu_programs import AHEAD, WORKLOAD, each_of, program


@each_of(*AHEAD)
def test_no_exchange_blocks_and_each_travels_beside_other_work(name):
    transfers = program(name).facts.schedule.select("all-to-all")
    slots = 2 * WORKLOAD.batch  # twice the capacity that even ids need
    (ids,) = (t for t in transfers if t.bytes == 4 * WORKLOAD.tables * slots)
    first, last = (t for t in transfers if t is not ids)  # vectors
    assert not any(t.is_blocking for t in transfers)
    assert len(ids.products) >= 1  # of the next batch
    if AHEAD[name][0] == "ids":
        assert 2 * len(ids.products) >= WORKLOAD.num_products
        # Looked-up vectors come before all products. Their gradients travel beside the products
        # that give the weights' gradients, which XLA puts last.
        assert first.products == ()
        assert len(last.products) == len(WORKLOAD.widths)
        assert all(product.is_backward for product in last.products)
    else:
        # Vectors of the next batch wait for their ids; then the updates of rows hide them, and no
        # product of the model.
        assert last.products == ()
        assert sum(opcode in ("fusion", "custom-call", "sort") for opcode in last.beside) >= 10
