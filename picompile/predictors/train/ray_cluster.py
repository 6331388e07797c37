"""Training layers on a Ray cluster: the same job as in a worker process, as a remote task."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from picompile.errors import UsageError
from picompile.predictors.train.candidates import JobSettings, LayerResult, fit_layer, load_result, save_result
from picompile.predictors.train.data import LayerData
from picompile.predictors.train.workers import Prepare

# Tasks submitted beyond those that the cluster can run at once, so that none of its cores waits.
_TASKS_AHEAD = 1


def require_ray() -> Any:
    """Return the ray module. Raise `UsageError` if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs ray: pip install 'picompile[ray]'") from error
    return ray


def train_on_cluster(
    layers: list[int], prepare: Prepare, layer_file: Callable[[int], Path], address: str, device: str
) -> Iterator[LayerResult]:
    """Train `layers` on the cluster at `address`; `local` starts one on this machine and ends it afterwards.

    Data and results are sent over the network; the machines need this version of picompile, but no shared folder.
    """
    ray = require_ray()
    with _connected(ray, address):
        remote = ray.remote(num_cpus=1, num_gpus=1 if device == "cuda" else 0)(_job)
        most = int(ray.cluster_resources().get("CPU", 1)) + _TASKS_AHEAD
        waiting = list(layers)
        running: dict[Any, int] = {}
        while waiting or running:
            while waiting and len(running) < most:
                layer = waiting.pop(0)
                running[remote.remote(*prepare(layer))] = layer
            (done,), _ = ray.wait(list(running), num_returns=1)
            layer = running.pop(done)
            save_result(layer_file(layer), ray.get(done))
            yield load_result(layer_file(layer))


def _job(data: LayerData, settings: JobSettings) -> LayerResult:
    torch.set_num_threads(1)
    return fit_layer(data, settings)


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    try:
        if address == "local":
            # The loopback address is enough on one machine, and not every network lets another one be reached.
            ray.init(
                address="local",
                _node_ip_address="127.0.0.1",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                # Ray gives its workers a low priority; beside other work they would need minutes just to import torch.
                _system_config={"worker_niceness": 0},
            )
        else:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UsageError(f"--ray {address}: no cluster: {' '.join(str(error).split())}") from error
    try:
        yield
    finally:
        ray.shutdown()
