"""Endpoints that tell about the server: its models, whether it is ready, its slots and its metrics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from picompile_server.http.errors import json_response
from picompile_server.http.metrics import CONTENT_TYPE
from picompile_server.http.models import ModelSet
from picompile_server.model import ServedModel


async def health(request: Request) -> Response:
    """Answer whether the server takes requests: 503 while it loads its models, and when it ends."""
    models: ModelSet = request.app.state.models
    return json_response({"status": models.state}, 200 if models.state == "ok" else 503)


async def list_models(request: Request) -> Response:
    """Answer with the models that are loaded, or that are loaded when they are asked for."""
    models: ModelSet = request.app.state.models
    names = list(models.all()) if models.demand is None else models.names
    return json_response({"object": "list", "data": [_described(models, name) for name in names]})


async def show_model(request: Request) -> Response:
    """Answer with one model."""
    models: ModelSet = request.app.state.models
    name = models.known(request.path_params["model"])
    if models.demand is None:
        models.get(name)
    return json_response(_described(models, name))


def _described(models: ModelSet, name: str) -> dict[str, Any]:
    """Return what is known of a model. Its state is written as llama.cpp's server writes it."""
    described = {"id": name, "object": "model", "created": models.made_s, "owned_by": "picompile"}
    more = _facts(models.loaded[name]) if name in models.loaded else {"max_model_len": None}
    return {**described, "status": {"value": models.state_of(name)}, **more}


def _facts(model: ServedModel) -> dict[str, Any]:
    manifest = model.engine.artifact.manifest
    defaults = model.defaults
    return {
        "created": model.created_s,
        "max_model_len": model.engine.context,
        "meta": {
            "architecture": manifest.model.get("architecture"),
            "parameters": manifest.model.get("parameters"),
            "vocab": model.engine.vocab,
            "slots": model.engine.sequences,
            "quant": manifest.quant,
            "predictor": manifest.predictor,
            "has_chat_template": model.tokenizer.has_chat_template,
        },
        "defaults": {
            "temperature": defaults.temperature,
            "top_p": defaults.top_p,
            "top_k": defaults.top_k,
            "min_p": defaults.min_p,
            "repetition_penalty": defaults.repetition_penalty,
        },
    }


async def slots(request: Request) -> Response:
    """Answer with the state of each slot of each model's KV cache."""
    models: ModelSet = request.app.state.models
    return json_response([slot for model in models.all().values() for slot in _slots(model)])


def _slots(model: ServedModel) -> list[dict[str, Any]]:
    return [
        {
            "id": state.slot,
            "model": model.name,
            "n_ctx": model.engine.context,
            "is_processing": state.activity != "idle",
            "state": state.activity,
            "n_tokens": state.tokens,
            "id_task": state.request,
        }
        for state in model.scheduler.slots()
    ]


async def metrics(request: Request) -> Response:
    """Answer with all metrics in Prometheus's text format."""
    return Response(request.app.state.metrics.text(), 200, None, CONTENT_TYPE)
