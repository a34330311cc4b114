"""Renders manifests/install.yaml from the Helm chart, for those who install without Helm.

Usage: python scripts/manifests.py [--check]

Needs helm 4: the variable HELM, one on PATH, or the one that the cluster tests have built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from generated import keep

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts/mainstay"
FILE = ROOT / "manifests/install.yaml"
RELEASE = "mainstay"
NAMESPACE = "mainstay-system"
KUBE_VERSION = "1.36.0"
# A rendered password would be everybody's: whoever installs makes the Secret first.
VALUES = (
    "rbac.cluster=true",
    "crds.enabled=false",
    f"redis.internal.existingSecret={RELEASE}-redis",
)
HEADER = f"""\
# Rendered from charts/mainstay by scripts/manifests.py (make verify); do not edit.
# Make the password of Redis, then apply this:
#
#   kubectl create namespace {NAMESPACE}
#   kubectl -n {NAMESPACE} create secret generic {RELEASE}-redis \\
#       --from-literal=password="$(head -c 30 /dev/urandom | base64 | tr -d /+=)"
#   kubectl apply --server-side -f manifests/crd.yaml -f manifests/install.yaml
---
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    pod-security.kubernetes.io/enforce: restricted
"""


def find_helm() -> str | None:
    """Return the helm to use, None where there is none."""
    found = os.environ.get("HELM") or shutil.which("helm")
    if found:
        return found
    cache = Path(os.environ.get("MAINSTAY_CACHE") or Path.home() / ".cache/mainstay")
    return next((str(path) for path in sorted(cache.glob("kube-*/helm"))), None)


def render(helm: str) -> str:
    """Return the manifest."""
    command = [helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--skip-tests"]
    command += ["--kube-version", KUBE_VERSION]
    for value in VALUES:
        command += ["--set", value]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    kept = [line for line in done.stdout.splitlines() if not line.startswith("# Source:")]
    text = HEADER + "\n".join(line.rstrip() for line in kept) + "\n"
    # It must at least be YAML, without two objects of one name.
    names = [
        (o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"])
        for o in yaml.safe_load_all(text)
        if o
    ]
    assert len(names) == len(set(names)), "two objects have one name"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="say what differs, write nothing")
    check = parser.parse_args().check
    helm = find_helm()
    if helm is None:
        print(f"{FILE.relative_to(ROOT)}: not compared, there is no helm (set HELM to one)")
        return 0
    problem = "is not what the chart renders; run `make manifests`"
    return keep({FILE: render(helm)}, problem, check=check)


if __name__ == "__main__":
    sys.exit(main())
