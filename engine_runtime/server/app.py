"""The application: all endpoints behind the gate."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI

from engine_runtime.server import (
    chat_completions,
    completions,
    errors,
    health,
    messages,
    models,
    page_routes,
    responses,
    tokens,
)
from engine_runtime.server.gate import Gate
from engine_runtime.server.services import Services


def create_app(services: Services, api_keys: Sequence[str], max_body_bytes: int) -> FastAPI:
    """The ASGI application that serves `services`."""
    app = FastAPI(title="K2.6 Engine", docs_url=None, redoc_url=None, redirect_slashes=False)
    for module in (chat_completions, completions, responses, messages, models, tokens, health):
        app.include_router(module.router(services))
    app.include_router(page_routes.router())
    errors.install(app)
    app.add_middleware(Gate, api_keys=api_keys, max_body_bytes=max_body_bytes, count=services.metrics.count_http)
    return app
