"""The application: its routes, and the checks of who may use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from picompile_runtime.errors import PicompileRuntimeError
from picompile_server.http.access_log import AccessLog
from picompile_server.http.chat import create_chat_completion
from picompile_server.http.completions import create_completion
from picompile_server.http.errors import ApiError, answer_api_error, answer_http_error
from picompile_server.http.guard import Guard
from picompile_server.http.messages import count_message_tokens, create_message
from picompile_server.http.metrics import Metrics
from picompile_server.http.models import ModelSet, ModelUse
from picompile_server.http.observe import health, list_models, metrics, show_model, slots
from picompile_server.http.openapi import openapi
from picompile_server.http.page import load_page, page
from picompile_server.http.responses import create_response
from picompile_server.http.stream import ClientGoneError
from picompile_server.http.tokens import detokenize, tokenize

# Nginx's number for a client that has gone; nobody receives it.
_CLIENT_GONE = 499


@dataclass(frozen=True)
class AppSettings:
    """Access rules: who may send requests, and how large; and who is told of them.

    Attributes:
        keys: API keys; with none, every request is answered.
        hosts: names that requests may have as Host; None allows any.
        origins: of pages that may ask.
        most_body_bytes: largest body of a request.
        log: takes a line for each request; None writes none.
    """

    keys: Sequence[str] = ()
    hosts: Sequence[str] | None = None
    origins: Sequence[str] = ()
    most_body_bytes: int = 2**24
    log: Callable[[str], object] | None = None


def make_app(models: ModelSet, settings: AppSettings | None = None) -> Starlette:
    """Return the ASGI application that serves `models`, those that are loaded later included."""
    settings = settings or AppSettings()
    routes = [
        Route("/", page),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/slots", slots),
        Route("/openapi.json", openapi),
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", show_model),
        Route("/v1/completions", create_completion, methods=["POST"]),
        Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/v1/messages", create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_message_tokens, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
    counts = Metrics(models.loaded)
    guard = Middleware(
        Guard, keys=settings.keys, hosts=settings.hosts, metrics=counts, paths=[route.path for route in routes]
    )
    app = Starlette(
        routes=routes,
        middleware=[
            *([] if settings.log is None else [Middleware(AccessLog, write=settings.log)]),
            *_cors(settings.origins),
            guard,
            Middleware(ModelUse, models=models),
        ],
        exception_handlers={
            ApiError: answer_api_error,
            PicompileRuntimeError: answer_api_error,
            HTTPException: answer_http_error,
            ClientGoneError: _answer_nobody,
            ClientDisconnect: _answer_nobody,
            Exception: answer_api_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.models = models
    app.state.metrics = counts
    app.state.most_body_bytes = settings.most_body_bytes
    app.state.page = load_page()
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware that allows pages of some origins; without it, browsers let no other page read answers."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key"],
        )
    ]


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(None, _CLIENT_GONE)
