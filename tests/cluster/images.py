"""Container images as docker archives, made without a registry or a builder."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

PAUSE = "mainstay.test/pause:1"
BUSYBOX = "mainstay.test/busybox:1"
APPLETS = "cat date echo env false hostname httpd id kill ls nc nslookup ps sh sleep true wget"
FOLDERS = ("bin", "dev", "etc", "lib", "proc", "root", "run", "sys", "tmp", "usr", "var")


def write_base_images(folder: Path) -> list[Path]:
    """Write the sandbox image and a busybox; return their archives."""
    program = shutil.which("busybox")
    assert program is not None, "busybox is not installed"
    layer = _layer(Path(program).read_bytes(), APPLETS.split())
    archives = []
    # The sandbox's process only has to last: the runtime kills it.
    for tag, entry in ((PAUSE, ("/bin/sleep", "2147483647")), (BUSYBOX, ())):
        archives.append(folder / f"{tag.split('/')[1].split(':')[0]}.tar")
        _write_archive(archives[-1], tag, layer, entry)
    return archives


def _layer(program: bytes, applets: Sequence[str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for folder in FOLDERS:
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(info)
        info = tarfile.TarInfo("bin/busybox")
        info.size, info.mode = len(program), 0o755
        tar.addfile(info, io.BytesIO(program))
        for applet in applets:
            info = tarfile.TarInfo(f"bin/{applet}")
            info.type, info.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(info)
    return made.getvalue()


def _write_archive(path: Path, tag: str, layer: bytes, entry: Sequence[str]) -> None:
    digest = hashlib.sha256(layer).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(entry) or None, "Env": ["PATH=/bin:/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created": "2026-01-01T00:00:00Z"}],
        }
    ).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": name, "RepoTags": [tag], "Layers": [f"{digest}/layer.tar"]}]
    files = {
        name: config,
        f"{digest}/layer.tar": layer,
        "manifest.json": json.dumps(manifest).encode(),
    }
    with tarfile.open(path, "w") as tar:
        for member, data in files.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
