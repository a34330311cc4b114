"""Nodes of a real cluster: a network namespace each, with own containerd, kubelet and kube-proxy.

Nothing of the machine itself changes: addresses, sysctls, mounts and /var of a node exist in its
own namespaces only.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import leftovers
from tests.cluster.control_plane import PODS, ControlPlane
from tests.cluster.images import PAUSE

BRIDGE = "10.99.0"
DNS_IP = "10.0.0.10"
SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What a kubelet insists on. It finds them in files laid over the real ones."""
OWN_FOLDERS = {
    "/run/netns": "netns",
    "/run/containerd": "run-containerd",
    "/var/log": "log",
    "/var/lib/cni": "cni-state",
    "/var/lib/kubelet": "var-kubelet",
}
"""Folders of the machine that a node's daemons write to by fixed names: each node sees its own."""
EVICTIONS = ("memory.available", "nodefs.available", "imagefs.available", "nodefs.inodesFree")
WAIT_FOR_SOCKET = "until [ -S {0} ] && ctr -a {0} version; do sleep 0.05; done >/dev/null 2>&1"


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


class Node:
    """One node. `kill` is a power cut: the network goes first, then every process."""

    def __init__(self, plane: ControlPlane, index: int, images: Sequence[Path]) -> None:
        self.plane = plane
        self.index = index
        self.name = f"node{index}"
        self.address = f"{BRIDGE}.{10 + index}"
        self.pods = f"10.88.{index}.0/24"
        self.network = plane.ground.name(f"n{index}")
        self.dir = plane.dir / self.name
        self.dir.mkdir()
        self.is_alive = True
        self._add_network()
        self._add_cgroups()
        self._write_configs()
        self._holder = self._enter_namespaces()
        self._start_daemons(images)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command in the node's namespaces; return what it wrote."""
        done = subprocess.run(
            [*self._enter(), *command], capture_output=True, text=True, check=False
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{self.name}: {' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def import_image(self, archive: Path) -> None:
        self.run("ctr", "-a", self.socket, "-n", "k8s.io", "images", "import", str(archive))

    def pid_of(self, container: str) -> int | None:
        """The first process of a container, as this machine numbers it; None: it has ended."""
        listed = self.run("ctr", "-a", self.socket, "-n", "k8s.io", "task", "ls")
        running = (line.split() for line in listed.splitlines() if line.startswith(container))
        return next((int(pid) for _, pid, state in running if state == "RUNNING"), None)

    def kill(self) -> None:
        """Cut the network, then kill everything that runs here."""
        ip("-n", self.network, "link", "set", "eth0", "down")
        self.is_alive = False
        while pids := leftovers.find_pids(self.network):
            leftovers.kill(pids)
        self._holder.kill()
        self._holder.wait()

    def unplug(self) -> None:
        """Pull the network's cable: nothing is told to anybody, and no connection is closed."""
        self._set_cable("down")

    def plug_in(self) -> None:
        self._set_cable("up")

    def log(self, name: str) -> str:
        return self.plane.log(f"{self.name}-{name}")

    # --- its start ---

    @property
    def _cable(self) -> str:
        """The end of its link that the bridge has."""
        return f"v{self.index}"

    @property
    def socket(self) -> str:
        return str(self.dir / "containerd.sock")

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._holder.pid), "-m", "-n"]

    def _spawn(self, name: str, *command: str) -> None:
        process = self.plane.ground.spawn(f"{self.name}-{name}", [*self._enter(), *command])
        self.plane.processes[f"{self.name}-{name}"] = process

    def _set_cable(self, state: str) -> None:
        # The far end: what the node itself has, its routes above all, stays.
        assert self.plane.place.network is not None
        ip("-n", self.plane.place.network, "link", "set", self._cable, state)

    def _add_network(self) -> None:
        center = self.plane.place.network
        assert center is not None, "nodes need a control plane in a network namespace"
        link = self._cable
        ip("netns", "add", self.network)
        ip("-n", center, *f"link add {link} type veth peer name eth0 netns {self.network}".split())
        ip("-n", center, "link", "set", link, "master", "nodes", "up")
        for command in (
            "link set lo up",
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {BRIDGE}.1",
        ):
            ip("-n", self.network, *command.split())
        ip("-n", center, "route", "replace", self.pods, "via", self.address)

    def _add_cgroups(self) -> None:
        root = leftovers.CGROUPS
        if (root / "cgroup.controllers").exists():
            (root / self.network).mkdir()
            for controller in ("cpu", "cpuset", "memory", "pids"):
                (root / "cgroup.subtree_control").write_text(f"+{controller}")
            return
        for controller in root.iterdir():
            if controller.is_symlink() or not (controller / "cgroup.procs").exists():
                continue
            group = controller / self.network
            group.mkdir()
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (controller / name).exists():
                    (group / name).write_text((controller / name).read_text())

    def _write_configs(self) -> None:
        (self.dir / "cni").mkdir()
        network = {
            "type": "ptp",
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.dir / "ipam"),
                "ranges": [[{"subnet": self.pods}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        conflist = {"cniVersion": "0.4.0", "name": "pods", "plugins": [network]}
        (self.dir / "cni" / "10-pods.conflist").write_text(json.dumps(conflist))
        (self.dir / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        (self.dir / "containerd.toml").write_text(
            CONTAINERD.replace("@DIR@", str(self.dir)).replace("@PAUSE@", PAUSE)
        )
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "failSwapOn": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.network}",
            "address": self.address,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "readOnlyPort": 0,
            "makeIPTablesUtilChains": False,
            "evictionHard": dict.fromkeys(EVICTIONS, "0%"),
            # A full disk must not make the kubelet drop images, which nothing could pull again.
            "imageGCHighThresholdPercent": 100,
            "clusterDNS": [DNS_IP],
            "clusterDomain": "cluster.local",
            "healthzBindAddress": "127.0.0.1",
            "serializeImagePulls": False,
            "resolvConf": str(self.dir / "resolv.conf"),
            "nodeStatusUpdateFrequency": "2s",
            "syncFrequency": "10s",
            "volumePluginDir": str(self.dir / "plugins"),
            "localStorageCapacityIsolation": False,
        }
        (self.dir / "kubelet.json").write_text(json.dumps(kubelet))

    def _enter_namespaces(self) -> subprocess.Popen[bytes]:
        """Start the process that holds the node's mount namespace, and lay its own files over."""
        lines = ["set -e", "mount --make-rprivate /"]
        for name, value in SYSCTLS.items():
            own = self.dir / "sysctl" / name.replace("/", "-")
            own.parent.mkdir(exist_ok=True)
            own.write_text(value + "\n")
            lines.append(f"mount --bind {own} /proc/sys/{name}")
        for path, folder in OWN_FOLDERS.items():
            (self.dir / folder).mkdir()
            os.makedirs(path, exist_ok=True)
            lines.append(f"mount --bind {self.dir / folder} {path}")
        lines += ["echo 1 >/proc/sys/net/ipv4/ip_forward", "echo ready", "exec sleep infinity"]
        enter = ["nsenter", f"--net=/run/netns/{self.network}", "unshare", "-m"]
        holder = subprocess.Popen(
            [*enter, "sh", "-c", "\n".join(lines)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.plane.ground.record(holder.pid)
        self.plane.processes[f"{self.name}-holder"] = holder
        assert holder.stdout is not None
        said = holder.stdout.readline()
        assert said == b"ready\n", f"{self.name}: {said.decode()}"
        holder.stdout.close()
        return holder

    def _start_daemons(self, images: Sequence[Path]) -> None:
        tools = self.plane.tools
        kubeconfig = f"--kubeconfig={self.plane.dir / 'inside.kubeconfig'}"
        self._spawn("containerd", "containerd", "-c", str(self.dir / "containerd.toml"))
        self.run("timeout", "30", "sh", "-c", WAIT_FOR_SOCKET.format(self.socket))
        for archive in images:
            self.import_image(archive)
        zone = f"topology.kubernetes.io/zone=zone{(self.index + 1) // 2}"
        self._spawn(
            "kubelet",
            *[str(tools / "kubelet"), kubeconfig, f"--config={self.dir / 'kubelet.json'}"],
            *[f"--hostname-override={self.name}", f"--node-ip={self.address}"],
            *[f"--root-dir={self.dir / 'kubelet'}", f"--cert-dir={self.dir / 'pki'}"],
            f"--node-labels={zone}",
        )
        self._spawn(
            "kube-proxy",
            *[str(tools / "kube-proxy"), kubeconfig, "--proxy-mode=iptables"],
            *[f"--cluster-cidr={PODS}", f"--hostname-override={self.name}"],
            *[f"--bind-address={self.address}", "--conntrack-max-per-core=0"],
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        )


CONTAINERD = """\
version = 2
root = "@DIR@/containerd-root"
state = "@DIR@/containerd-state"
[grpc]
  address = "@DIR@/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "@PAUSE@"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "@DIR@/cni"
"""
