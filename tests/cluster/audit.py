"""What one user has asked the API server for, as the server itself has written it down."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

LOG = "audit.log"
WRITES = ("create", "update", "patch", "delete", "deletecollection")


def flags(directory: Path, user: str) -> list[str]:
    """The server's flags; the policy is written into the folder."""
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "rules": [{"level": "Metadata", "users": [user]}, {"level": "None"}],
    }
    path = directory / "audit-policy.json"
    path.write_text(json.dumps(policy))
    return [f"--audit-policy-file={path}", f"--audit-log-path={directory / LOG}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that was answered."""

    verb: str
    resource: str
    """With the subresource, as in ``pods/status``; the path where there is no resource."""
    name: str
    code: int
    at_s: float
    """The server's clock when it came."""

    @property
    def writes(self) -> bool:
        return self.verb in WRITES


class Audit:
    """Reads on from where the log ended when this was made. Watches are left out."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOG
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def take(self) -> list[Request]:
        """Return the requests since the last time."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as log:
            log.seek(self._offset)
            lines = log.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = map(json.loads, whole.splitlines())
        return [_parse(event) for event in events if event["verb"] != "watch"]


def count(requests: Iterable[Request]) -> Counter[str]:
    """How many of each kind."""
    return Counter(f"{request.verb} {request.resource}" for request in requests)


def _parse(event: dict[str, Any]) -> Request:
    about: dict[str, str] = event.get("objectRef") or {}
    parts = [about[key] for key in ("resource", "subresource") if about.get(key)]
    answer: dict[str, int] = event.get("responseStatus") or {}
    return Request(
        verb=str(event["verb"]),
        resource="/".join(parts) or str(event["requestURI"]).partition("?")[0],
        name=about.get("name", ""),
        code=answer.get("code", 0),
        at_s=datetime.fromisoformat(str(event["requestReceivedTimestamp"])).timestamp(),
    )
