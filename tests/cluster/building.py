"""The project's images for tests, built from the real Dockerfile on a Debian made here: there is no
registry.

Their base holds Debian's Python and a Redis server, so it also is the image of the store and of the
trainers; torch comes into those from this environment (`trainer_template`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.cluster import toolbox
from tests.cluster.toolbox import CannotRunError, Say, cache_dir

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
INCLUDED = "ca-certificates,python3,redis-server"
PROGRAMS = ("buildah", "mmdebstrap")
SOURCES = ("agent", "api", "core", "images", "operator", "requirements", "scripts/images.py")
"""What images are made from."""
NUM_KEPT = 4
"""Archives of images in the cache, some 200 MB each."""
REGISTRY = "mainstay.test"
TAG = "test"
NEXT_TAG = "next"
"""The same images by another tag: what an upgrade moves to."""
BASE = f"{REGISTRY}/debian:{SUITE}-slim"
COMPONENTS = ("operator", "api", "agent")
OPTIONS = [
    "--variant=minbase",
    f"--include={INCLUDED}",
    "--dpkgopt=force-unsafe-io",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--dpkgopt=path-exclude=/usr/share/man/*",
]
SITE = "/opt/site-packages"
"""Where trainers find this environment's libraries."""
STORAGE = """\
[storage]
driver = "overlay"
graphroot = "@DIR@/graph"
runroot = "@DIR@/run"
"""
FAST = ("--compression-format", "zstd", "--compression-level", "1")
REF_NAME = "org.opencontainers.image.ref.name"
POLICY = {"default": [{"type": "insecureAcceptAnything"}]}


def base_path() -> Path:
    key = hashlib.sha256(" ".join([SUITE, *OPTIONS]).encode()).hexdigest()[:12]
    return cache_dir() / f"debian-{key}.tar"


def make_base(say: Say) -> Path:
    """Make a small Debian with Python and Redis, once; return its archive."""
    path = base_path()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            toolbox.ensure_packages(say, *PROGRAMS)
            say(f"making a Debian for images, once (kept as {path})")
            made = path.with_suffix(".new.tar")
            done = subprocess.run(
                ["mmdebstrap", "--quiet", *OPTIONS, SUITE, str(made), *_mirror()],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise CannotRunError(f"mmdebstrap: {done.stderr.strip()[-300:]}")
            made.rename(path)
    return path


def images_path() -> Path:
    """Where the images of this checkout's code are kept."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard", *SOURCES],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    key = hashlib.sha256(" ".join([base_path().name, TAG, NEXT_TAG]).encode())
    for name in sorted(filter(None, listed.stdout.split("\0"))):
        key.update(name.encode() + b"\0")
        if (ROOT / name).is_file():
            key.update(hashlib.sha256((ROOT / name).read_bytes()).digest())
    return cache_dir() / f"images-{key.hexdigest()[:12]}.tar"


def make_images(say: Say) -> Path:
    """Build all images of this checkout unless they are there; return one archive of them."""
    path = images_path()
    with (cache_dir() / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(prefix="mainstay-images-") as folder:
                made = _build(Path(folder), make_base(say), say)
                kept = sorted(cache_dir().glob("images-*.tar"), key=lambda old: old.stat().st_mtime)
                for old in kept[: -NUM_KEPT + 1]:
                    old.unlink()
                shutil.move(made, path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)
    return path


def _build(folder: Path, base: Path, say: Say) -> Path:
    """Build all images in a folder; return one archive of them, in which they share layers."""
    toolbox.ensure_packages(say, *PROGRAMS)
    config = folder / ".config" / "containers"
    config.mkdir(parents=True)
    (config / "policy.json").write_text(json.dumps(POLICY))
    (folder / "storage.conf").write_text(STORAGE.replace("@DIR@", str(folder)))
    environ = {
        **os.environ,
        "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "ENGINE": "buildah",
        "HOME": str(folder),
        # uv's cache lies in the real home.
        "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR") or os.path.expanduser("~/.cache/uv"),
    }
    say(f"building the images of {', '.join(COMPONENTS)}")
    program = [sys.executable, str(ROOT / "scripts" / "images.py"), "--registry", REGISTRY]
    layout = folder / "layout"
    names = [BASE, *(f"{REGISTRY}/mainstay-{component}:{TAG}" for component in COMPONENTS)]
    commands = [
        ["sh", "-ec", FROM_ARCHIVE, "sh", str(base), BASE],
        [*program, "--tag", TAG, "--base", BASE],
        *(["buildah", "push", "-q", *FAST, name, f"oci:{layout}:{name}"] for name in names),
    ]
    for command in commands:
        # In a mount namespace of its own: whatever happens, no mount stays behind.
        done = subprocess.run(
            ["unshare", "-m", *command], cwd=ROOT, env=environ, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return _pack(layout, folder / "images.tar")


FROM_ARCHIVE = """\
container=$(buildah from scratch)
buildah add -q "$container" "$1" /
buildah commit -q "$container" "$2"
buildah rm "$container"
"""


def trainer_template(**container: Any) -> dict[str, Any]:
    """A job's pod template: Debian's Python, with torch from this environment, read-only."""
    if sys.version_info[:2] != (3, 11):
        raise CannotRunError("training pods mount this environment's torch: needs Python 3.11")
    return {
        "spec": {
            "containers": [
                {
                    "name": "trainer",
                    "image": BASE,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python3", "-m", "mainstay_train.launcher"],
                    "env": [
                        {"name": "PYTHONPATH", "value": SITE},
                        {"name": "OMP_NUM_THREADS", "value": "1"},
                        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
                    ],
                    "volumeMounts": [{"name": "site", "mountPath": SITE, "readOnly": True}],
                    **container,
                }
            ],
            "volumes": [
                {"name": "site", "hostPath": {"path": sysconfig.get_paths()["purelib"]}},
            ],
        }
    }


def _mirror() -> Iterable[str]:
    """The mirror that this machine's own apt uses, if it has the suite."""
    form = ["--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(
        ["apt-get", "indextargets", *form], capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        codename, _, uri = line.partition(" ")
        if codename == SUITE:
            return [uri]
    return []


def _pack(layout: Path, archive: Path) -> Path:
    """Make one archive of an OCI layout, with the names by which containerd knows images."""
    index = json.loads((layout / "index.json").read_text())
    named = []
    for manifest in index["manifests"]:
        repository, _, tag = manifest["annotations"][REF_NAME].rpartition(":")
        for each in (TAG, NEXT_TAG) if tag == TAG else (tag,):
            notes = {REF_NAME: each, "io.containerd.image.name": f"{repository}:{each}"}
            named.append(manifest | {"annotations": notes})
    index["manifests"] = named
    (layout / "index.json").write_text(json.dumps(index))
    with tarfile.open(archive, "w") as tar:
        tar.add(layout, arcname=".")
    return archive
