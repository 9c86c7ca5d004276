"""GET /v1/models: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from engine_runtime.server.services import Services
from engine_runtime.server.sse import JSONBytes


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["openai"])

    def card() -> dict[str, Any]:
        model = services.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "k2-engine",
            "root": model.manifest.name,
            "max_model_len": model.context,
        }

    @routes.get("/v1/models")
    async def models() -> JSONBytes:
        """All models."""
        return JSONBytes({"object": "list", "data": [card()]})

    @routes.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> JSONBytes:
        """One model."""
        services.check_model(model_id)
        return JSONBytes(card())

    return routes
