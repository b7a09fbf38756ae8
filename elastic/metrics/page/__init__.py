"""The page at `/`: one document, made of the files beside this one when the agent starts.

It loads nothing and runs nothing but what is in it: the policy names its script and its style by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import NamedTuple

_SCRIPTS = ("charts.js", "page.js")


class Page(NamedTuple):
    """What is sent."""

    document: bytes
    headers: tuple[tuple[str, str], ...]


def _read(name: str) -> str:
    return (resources.files("elastic.metrics.page") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _assemble() -> Page:
    style, script = _read("page.css"), "\n".join(_read(name) for name in _SCRIPTS)
    document = _read("page.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "img-src data:",  # its icon
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = (
        ("Content-Security-Policy", "; ".join(policy)),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
    )
    return Page(document.encode(), headers)


PAGE = _assemble()
