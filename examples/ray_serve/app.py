"""Replicas of a server behind Ray Serve: each has its own copy of the model, and Ray routes, restarts and scales.

    serve run app:application artifact=/srv/artifact replicas=2 threads=4

Every replica answers with the header x-replica. Requests that share a header x-session-id come to one replica, which
then reuses what it holds of the conversation.
"""

import os
from collections.abc import Callable

from pydantic import BaseModel
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from picompile_server.declared import KEY_VARIABLE
from picompile_server.http.app import AppSettings, make_app
from picompile_server.http.models import ModelSet
from picompile_server.model import load_model
from picompile_server.scheduler import SchedulerOptions

_STICKY = RequestRouterConfig(request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter")


class Arguments(BaseModel):
    """Options that `serve run` takes as KEY=VALUE.

    Attributes:
        artifact: a compiled model's folder, at the same path on every machine.
        name: what requests call the model.
        replicas: how many servers there are.
        threads: threads that compute in each, which Ray reserves as CPUs.
        max_waiting: requests that may wait in each replica, beyond those that its slots answer.
        max_ongoing: requests that Ray gives to a replica at a time, at least its slots.
    """

    artifact: str
    name: str = "model"
    replicas: int = 2
    threads: int = 1
    max_waiting: int = 256
    max_ongoing: int = 64


# Ray reads the annotation, so that this file has no `from __future__ import annotations`.
def application(arguments: Arguments) -> serve.Application:
    """Return the application that `serve run` starts."""
    build = asgi_app_builder(arguments, tuple(filter(None, [os.environ.get(KEY_VARIABLE)])))
    replica = serve.deployment(
        serve.ingress(build)(),
        name="picompile",
        num_replicas=arguments.replicas,
        ray_actor_options={"num_cpus": arguments.threads},
        # Ray's own limit is 5; the scheduler of each replica batches as many as it has slots.
        max_ongoing_requests=arguments.max_ongoing,
        request_router_config=_STICKY,
        graceful_shutdown_timeout_s=30,
    )
    return replica.bind()


def asgi_app_builder(arguments: Arguments, keys: tuple[str, ...]) -> Callable[[], Starlette]:
    """Return what makes the ASGI application, in the process of each replica."""

    def build() -> Starlette:
        options = SchedulerOptions(max_waiting=arguments.max_waiting)
        models = ModelSet([arguments.name])
        models.add(load_model(arguments.name, arguments.artifact, arguments.threads, options=options))
        app = make_app(models, AppSettings(keys))
        app.add_middleware(_NameReplica, replica=serve.get_replica_context().replica_id.unique_id)
        return app

    return build


class _NameReplica:
    """Middleware that tells in a header which replica answered."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app, self._replica = app, replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-replica"] = self._replica
            await send(message)

        await self._app(scope, receive, named)
