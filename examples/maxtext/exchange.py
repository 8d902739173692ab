"""This says what the replicas exchange; change it for another algorithm."""

import optax

import jaxslowmo as js


def exchange(config):
    """Return MaxText's DiLoCo or Streaming DiLoCo; js.slowmo("diloco") and others fit here, too."""
    outer = optax.sgd(config.diloco_outer_lr, config.diloco_outer_momentum, nesterov=True)
    options, period = {"outer_optimizer": outer}, config.diloco_sync_period
    if count := config.num_diloco_fragments:
        turn = max(1, round(period / count))  # updates from one fragment to the next
        options["delay"] = delay = config.num_communication_overlapping_steps
        options["merge"] = config.communication_overlapping_alpha
        how = {"axis": config.param_scan_axis, "interleaved": not config.use_sequential_layers}
        options["fragments"] = js.layers(count, where=lambda name: "/layers/" in name, **how)
        period = js.every(turn * count, start=delay, offset=-turn)
    return js.diloco("diloco", sync_every=period, **options)
