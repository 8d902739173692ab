"""The operations that devices ran, read from a trace of the jax profiler."""

import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

from ._times import DeviceOp

_DEVICE = re.compile(r"/device:\w+:\d+$")  # not its helpers, such as "/device:TPU:0 SparseCore 1"
_HOST = "/host:CPU"
# One line of each on TPU. On GPU a line is a stream, besides lines that sum up others.
_OP_LINES = ("XLA Ops", "Async XLA Ops")
_SUMMARIES = ("XLA Modules", "Steps", "Framework Ops", "Framework Name Scope", "Source code")
_INSTRUCTION = re.compile(r"%?([\w.\-]+) = ")  # TPU names an event by the whole instruction


class CannotTrace(RuntimeError):
    """The error that a trace cannot start now; its text says why."""


def traced_call(call: Callable[[], Any], module: str) -> tuple[Any, list[DeviceOp], float]:
    """Call a step under the profiler and wait for it.

    Args:
      call: a function that runs the step and returns its results.
      module: name of the step's compiled module.

    Returns:
      The results, the operations that this process's devices ran for it, and its seconds.

    Raises:
      CannotTrace: another trace is running, or libtpu is loaded without a TPU; nothing was called.
    """
    if _compiles_for_absent_tpu():
        raise CannotTrace("the jax profiler would crash: libtpu is loaded, and there is no TPU")
    folder = tempfile.mkdtemp(prefix="jaxslowmo-statistics-")
    try:
        try:
            jax.profiler.start_trace(folder, profiler_options=_options())
        except RuntimeError as error:
            raise CannotTrace("another trace of the jax profiler is running") from error
        try:
            began = time.perf_counter()
            results = jax.block_until_ready(call())
            seconds = time.perf_counter() - began
        finally:
            jax.profiler.stop_trace()
        ops: list[DeviceOp] = []
        for path in sorted(Path(folder).rglob("*.xplane.pb")):
            with warnings.catch_warnings():
                # "builtin type ... has no __module__ attribute": jaxlib's own, under Python 3.12.
                warnings.simplefilter("ignore", DeprecationWarning)
                ops += device_ops(ProfileData.from_file(str(path)), module)
        return results, ops, seconds
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compiles_for_absent_tpu() -> bool:
    """Return whether libtpu is loaded without a TPU: a trace would be a segmentation fault."""
    try:  # No public way says which plugins are loaded.
        from jaxlib import xla_client

        loaded = xla_client.pjrt_plugin_loaded("tpu")
    except (ImportError, AttributeError):
        return False
    return loaded and jax.default_backend() != "tpu"


def _options() -> ProfileOptions:
    options = ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1  # holds the operations of CPU devices
    options.enable_hlo_proto = False  # the program is known
    return options


def device_ops(data: Any, module: str) -> Iterator[DeviceOp]:
    """Yield the operations in a trace that belong to a module, or to no module that it names.

    Args:
      data: a `jax.profiler.ProfileData`.
      module: name of the module.
    """
    for plane in data.planes:
        if plane.name == _HOST:
            yield from _host_ops(plane, module)
        elif _DEVICE.match(plane.name):
            yield from _accelerator_ops(plane, module)


def _host_ops(plane: Any, module: str) -> Iterator[DeviceOp]:
    """Yield the operations of CPU devices, which have no planes but name their device."""
    begun: list[tuple[DeviceOp, Any]] = []
    ends: dict[Any, int] = {}
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith("end: "):
                ends[dict(event.stats).get("_c")] = int(event.start_ns)
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats and stats.get("hlo_module") == module:
                device = f"cpu:{stats.get('device_ordinal', 0)}"
                op = DeviceOp(device, str(stats["hlo_op"]), *_span(event))
                begun.append((op, stats.get("_p")))
    for op, flow in begun:
        # An operation that goes on in other threads ends later than the call that began it.
        yield op._replace(end=max(op.end, ends.get(flow, op.end)))


def _accelerator_ops(plane: Any, module: str) -> Iterator[DeviceOp]:
    lines = [(line.name, line) for line in plane.lines]
    if any(name in _OP_LINES for name, _ in lines):
        chosen = [line for name, line in lines if name in _OP_LINES]
    else:
        chosen = [line for name, line in lines if name not in _SUMMARIES]
    for line in chosen:
        for event in line.events:
            stats = dict(event.stats)
            if stats.get("hlo_module", module) != module:
                continue
            match = _INSTRUCTION.match(event.name)
            name = str(stats.get("hlo_op") or (match[1] if match else event.name))
            yield DeviceOp(plane.name, name, *_span(event), is_ours="hlo_module" in stats)


def _span(event: Any) -> tuple[int, int]:
    return int(event.start_ns), int(event.end_ns)
