"""On each stage an optimizer sees the leaves of the model: steps equal those without stages."""

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.layered import assert_close, block, embed, language_model, loss, tokens
from support.optimizers import names as path_names

MODEL, PARAMS = language_model(2)
BLOCK = {"up": P("fsdp", "tensor"), "bias": P("tensor"), "down": P("tensor", "fsdp")}
SPECS = [P(None, "fsdp"), BLOCK, BLOCK, P(None, "fsdp")]
INNER = {"replica": 1, "stage": 2, "fsdp": 2, "tensor": 2}


def pipeline(mesh, **options):
    return js.pipelined(MODEL, PARAMS, js.schedules.zbv(2, 4), mesh=mesh, **options)


def trained(loss_fn, mesh, optimizer, params=PARAMS):
    """Return state, metrics and consensus after three steps."""
    step = js.make_train_step(loss_fn, optimizer, mesh=mesh, sync="none")
    state = step.init(params)
    for i in range(3):
        state, metrics = step(state, tokens(16, seed=i))
    return state, metrics, step.consensus(state)


def test_moments_lie_as_the_parameters_and_nothing_is_gathered(mesh_of):
    pipe = pipeline(mesh_of(INNER), data_axes=("fsdp",), param_specs=SPECS)
    tx = js.chain(optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)))
    stacked = pipe.layout.stack(PARAMS)
    state = jax.jit(tx.init)(stacked)
    mu = state[0][0].mu
    assert {name: x.shape for name, x in mu.items()} == {n: x.shape for n, x in stacked.items()}
    update = jax.jit(tx.update).lower(stacked, state, stacked).compile()
    text = update.as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all", "permute"))
    lies = jax.tree.leaves(update.output_shardings[0])
    for x, spec in zip(lies, pipe.layout.specs.values(), strict=True):
        assert x.is_equivalent_to(NamedSharding(x.mesh, spec), len(spec))


def scored(params, x):
    return x @ params["lm_head"].T


def test_a_tied_parameter_is_one_to_the_optimizer_whatever_its_copies_are_called():
    """By hand the second copy does not exist. They lie on two devices, or both on one (zbv)."""

    def is_copy(tree):
        return jax.tree.map(lambda name: "lm_head" in name, path_names(tree))

    tx = optax.adamw(0.05, weight_decay=0.3, mask=is_copy)
    tie = (0, "table"), (3, "lm_head")
    model = js.LayeredModel([embed, block, block, scored], loss, tied=[tie])
    params = [*PARAMS[:3], {"lm_head": PARAMS[0]["table"]}]

    def by_hand(own, batch):
        x = block(own[2], block(own[1], embed(own[0], batch)))
        return loss(x @ own[0]["table"].T, batch)[0]

    @jax.jit
    def update(own, state, batch):
        updates, state = tx.update(jax.grad(by_hand)(own, batch), state, own)
        return optax.apply_updates(own, updates), state

    known, state = PARAMS[:3], tx.init(PARAMS[:3])
    for i in range(3):
        known, state = update(known, state, tokens(16, seed=i))
    mesh = js.make_mesh({"replica": 1, "stage": 2})
    zbv, gpipe = js.schedules.zbv(2, 2), js.schedules.gpipe(2, 2)
    for loss_fn, on in (
        (model, js.virtual_mesh({"replica": 1})),
        (js.pipelined(model, params, zbv, mesh=mesh, executor="host"), mesh),
        (js.pipelined(model, params, gpipe, mesh=mesh), mesh),
    ):
        found = trained(loss_fn, on, tx, params)[2]
        assert_close(found, [*known, {"lm_head": known[0]["table"]}])
