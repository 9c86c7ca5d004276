"""GET /health and its like, /metrics, /version: what operators and routers ask."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from engine_runtime.server.services import Services
from engine_runtime.server.sse import JSONBytes


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    def readiness() -> JSONBytes:
        health = services.client.health()
        return JSONBytes(asdict(health), 200 if health.state == "ready" else 503)

    @routes.get("/health/live")
    async def live() -> dict[str, Any]:
        """200 as long as this process answers."""
        return {"state": "live"}

    for path in ("/health", "/health/ready", "/ready"):

        @routes.get(path, operation_id=f"get{path.replace('/', '_')}")
        async def ready() -> Response:
            """200 if the engine takes requests; else 503 with the state, the reason and how far the load is."""
            return readiness()

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """In Prometheus's text format."""
        return Response(services.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/version")
    async def version() -> dict[str, Any]:
        """What serves: this program, and the engine down to its bytes."""
        manifest = services.model.manifest
        return {
            "version": manifest.toolchain.get("k2-engine"),
            "engine": {
                "name": manifest.name,
                "fingerprint": services.model.fingerprint,
                "checkpoint_fingerprint": manifest.checkpoint_fingerprint,
                "tp": manifest.tp,
                "arch": manifest.arch,
                "activation_dtype": manifest.activation_dtype,
                "kv_dtype": manifest.kv_dtype,
                "limits": manifest.limits,
                "built_with": manifest.toolchain,
            },
            "python": sys.version.split()[0],
        }

    return routes
