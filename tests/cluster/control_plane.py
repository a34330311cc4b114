"""A real Kubernetes control plane: etcd, API server, controller manager and scheduler as processes.

On the machine's loopback, for which no root is needed, or inside a network namespace that a relay
makes reachable on loopback.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.cluster import audit, relay, toolbox
from tests.cluster.client import Api
from tests.cluster.leftovers import Ground

LOOPBACK = "127.0.0.1"
SERVICES = "10.0.0.0/24"
SERVICE_IP = "10.0.0.1"
PODS = "10.88.0.0/16"
ADMINS = ("admin", "operator")
"""Users with every right. What `operator` asks for is written down (audit.py)."""
USERS = ("alice", "bob")
"""Users without any right."""
GIVE_UP_S = 60.0
POLL_S = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the control plane runs: its network namespace, its address, the port of each server."""

    network: str | None = None
    address: str = LOOPBACK
    ports: dict[str, int] = field(
        default_factory=lambda: {
            "etcd": 2379,
            "peer": 2380,
            "apiserver": 6443,
            "controllers": 10257,
            "scheduler": 10259,
        }
    )

    def enter(self) -> list[str]:
        """What goes before a command so that it runs in the network namespace."""
        return ["nsenter", f"--net=/run/netns/{self.network}"] if self.network else []


def loopback_place() -> Place:
    """Free ports of the machine's loopback."""
    names = list(Place().ports)
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in names]
    ports = {name: sock.getsockname()[1] for name, sock in zip(names, sockets, strict=True)}
    for sock in sockets:
        sock.close()
    return Place(ports=ports)


class ControlPlane:
    """A running control plane. `kubeconfig` and `api` are the admin's and work on this machine."""

    def __init__(self, ground: Ground, tools: Path, place: Place) -> None:
        self.ground = ground
        self.dir = ground.dir
        self.tools = tools
        self.place = place
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.tokens = {user: secrets.token_hex(16) for user in (*ADMINS, *USERS)}
        self.authority = self.dir / "server.crt"
        self.has_controllers = (tools / "kube-controller-manager").exists()
        self._apis: list[Api] = []
        self._write_keys()
        inside = f"https://{place.address}:{place.ports['apiserver']}"
        self._write_kubeconfig(self.dir / "inside.kubeconfig", inside)
        self._start_servers()
        self.url = self.relay(place.address, place.ports["apiserver"]) if place.network else inside
        self.url = self.url.replace("http:", "https:")
        self.kubeconfig = self.dir / "kubeconfig"
        self._write_kubeconfig(self.kubeconfig, self.url)
        self.api = self.api_as("admin")
        self._await_ready()
        self._start_controllers()

    # --- for tests ---

    def api_as(self, user: str, token: str | None = None) -> Api:
        """A client with a user's token, or with any token, an empty one included."""
        self._apis.append(
            Api(self.url, self.authority, self.tokens[user] if token is None else token)
        )
        return self._apis[-1]

    def kubeconfig_as(self, user: str) -> Path:
        """A kubeconfig of another user than the admin."""
        path = self.dir / f"{user}.kubeconfig"
        self._write_kubeconfig(path, self.url, user)
        return path

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl as the admin; return what it wrote."""
        return self.run("kubectl", *args, stdin=stdin, check=check)

    def helm(self, *args: str, check: bool = True) -> str:
        """Run helm as the admin; return what it wrote."""
        return self.run("helm", *args, check=check)

    def run(self, tool: str, *args: str, stdin: str | None = None, check: bool = True) -> str:
        done = subprocess.run(
            [str(self.tools / tool), *args],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.dir)},
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{tool} {' '.join(args)}: {done.stdout}{done.stderr}")
        return done.stdout if check else done.stdout + done.stderr

    def make_namespace(self, name: str | None = None, **labels: str) -> str:
        """Make a namespace and wait for its ServiceAccount; return its name."""
        name = name or f"test-{secrets.token_hex(3)}"
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
        if self.has_controllers:
            path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
            self.api.wait(path, lambda account: account is not None)
        return name

    def relay(self, host: str, port: int, network: str | None = None) -> str:
        """Make an address of the cluster reachable from this machine; return a loopback URL."""
        network = network or self.place.network
        listening = socket.create_server((LOOPBACK, 0))
        enter = ["nsenter", f"--net=/run/netns/{network}"] if network else []
        process = subprocess.Popen(
            [
                *[*enter, sys.executable, relay.__file__],
                *[str(listening.fileno()), host, str(port)],
            ],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.ground.record(process.pid)
        self.processes[f"relay-{host}-{port}-{process.pid}"] = process
        own_port = listening.getsockname()[1]
        listening.close()
        return f"http://{LOOPBACK}:{own_port}"

    def log(self, name: str) -> str:
        return (self.dir / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for api in self._apis:
            api.close()
        self.ground.close()
        for process in self.processes.values():
            process.wait()

    # --- its start ---

    def start(self, name: str, *args: str) -> None:
        """Start a component of the tools' folder where the control plane runs."""
        command = [*self.place.enter(), str(self.tools / name), *args]
        self.processes[name] = self.ground.spawn(name, command)

    def stop(self, name: str) -> None:
        """Kill a component."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def _write_keys(self) -> None:
        names = ["DNS:localhost", "DNS:kubernetes", "DNS:kubernetes.default"]
        names += ["DNS:kubernetes.default.svc", f"IP:{LOOPBACK}", f"IP:{SERVICE_IP}"]
        if self.place.address != LOOPBACK:
            names.append(f"IP:{self.place.address}")
        curve = ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
        commands = [
            ["genpkey", "-algorithm", "EC", *curve, "-out", "accounts.key"],
            ["pkey", "-in", "accounts.key", "-pubout", "-out", "accounts.pub"],
            [
                *["req", "-x509", "-newkey", "ec", *curve, "-nodes", "-days", "3650"],
                *["-keyout", "server.key", "-out", "server.crt", "-subj", "/CN=mainstay-test"],
                *["-addext", f"subjectAltName={','.join(names)}"],
            ],
        ]
        for command in commands:
            subprocess.run(["openssl", *command], cwd=self.dir, check=True, capture_output=True)
        lines = [
            f'{token},{user},{user},"{"system:masters" if user in ADMINS else ""}"\n'
            for user, token in self.tokens.items()
        ]
        (self.dir / "tokens.csv").write_text("".join(lines))

    def _write_kubeconfig(self, path: Path, url: str, user: str = "admin") -> None:
        config: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "mainstay-test",
            "clusters": [
                {
                    "name": "mainstay-test",
                    "cluster": {"server": url, "certificate-authority": str(self.authority)},
                }
            ],
            "users": [
                {"name": user, "user": {"token": token}} for user, token in self.tokens.items()
            ],
            "contexts": [
                {"name": "mainstay-test", "context": {"cluster": "mainstay-test", "user": user}}
            ],
        }
        path.write_text(json.dumps(config, indent=2))

    def _start_servers(self) -> None:
        ports = self.place.ports
        etcd, peer = (f"http://{LOOPBACK}:{ports[name]}" for name in ("etcd", "peer"))
        self.start(
            "etcd",
            *[f"--data-dir={self.dir / 'etcd'}", "--unsafe-no-fsync", "--log-level=warn"],
            *[f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}"],
            *[f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"],
            f"--initial-cluster=default={peer}",
        )
        address = self.place.address
        args = [
            f"--etcd-servers={etcd}",
            *[f"--bind-address={address}", f"--advertise-address={address}"],
            f"--secure-port={ports['apiserver']}",
            *[f"--tls-cert-file={self.authority}", f"--tls-private-key-file={self.dir}/server.key"],
            f"--cert-dir={self.dir}",
            f"--token-auth-file={self.dir / 'tokens.csv'}",
            *audit.flags(self.dir, "operator"),
            "--authorization-mode=Node,RBAC",
            f"--service-cluster-ip-range={SERVICES}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={self.dir / 'accounts.pub'}",
            f"--service-account-signing-key-file={self.dir / 'accounts.key'}",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            "--shutdown-delay-duration=0s",
        ]
        if not self.has_controllers:
            args.append("--disable-admission-plugins=ServiceAccount")
        # On loopback a real endpoint address for the kubernetes Service does not exist.
        if address == LOOPBACK:
            args.append("--endpoint-reconciler-type=none")
        self.start("kube-apiserver", *args)

    def _start_controllers(self) -> None:
        if not self.has_controllers:
            return
        common = [
            f"--kubeconfig={self.dir / 'inside.kubeconfig'}",
            f"--bind-address={LOOPBACK}",
            "--leader-elect=false",
        ]
        self.start(
            "kube-controller-manager",
            *common,
            f"--secure-port={self.place.ports['controllers']}",
            f"--cert-dir={self.dir / 'controllers'}",
            f"--service-account-private-key-file={self.dir / 'accounts.key'}",
            f"--root-ca-file={self.authority}",
            *["--node-monitor-grace-period=8s", "--node-monitor-period=1s"],
        )
        self.start(
            "kube-scheduler",
            *common,
            f"--secure-port={self.place.ports['scheduler']}",
            f"--cert-dir={self.dir / 'scheduler'}",
        )

    def _await_ready(self) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            for name in ("etcd", "kube-apiserver"):
                if self.processes[name].poll() is not None:
                    raise AssertionError(f"{name} ended: {self.log(name)[-2000:]}")
            try:
                if self.api.http.get("/readyz").text == "ok":
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
        raise AssertionError(f"no API server: {self.log('kube-apiserver')[-2000:]}")


def find_tools(say: toolbox.Say) -> Path:
    """The folder of the control plane's programs: KUBEBUILDER_ASSETS, or those that are built."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        if not (Path(assets) / "kube-apiserver").exists():
            raise toolbox.CannotRunError(f"KUBEBUILDER_ASSETS={assets} holds no kube-apiserver")
        return Path(assets)
    return toolbox.build(say)
