"""What `/metrics` answers: the text format or OpenMetrics, as the client asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from elastic import __version__
from elastic.metrics.collector import AgentCollector, Part
from elastic.metrics.measured import Measured


class Exposition:
    """A registry of its own with the agent's collector alone. Any thread may ask."""

    def __init__(self, measure: Callable[[], Measured], extra: Sequence[Part] = ()) -> None:
        self._registry = CollectorRegistry()
        versions = {"version": __version__, "torch": _version_of("torch")}
        self._registry.register(AgentCollector(measure, versions=versions, extra=extra))

    def text(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) for an Accept header."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
