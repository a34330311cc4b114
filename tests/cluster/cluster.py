"""A complete real cluster on this machine: control plane, nodes, Services and DNS. Needs root.

Its addresses (10.0.0.0/24, 10.88.0.0/16, 10.99.0.0/24) exist in its own network namespaces only;
from this machine it is reached on loopback, through relays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster import toolbox
from tests.cluster.client import Object
from tests.cluster.control_plane import PODS, ControlPlane, Place, find_tools, loopback_place
from tests.cluster.images import write_base_images
from tests.cluster.leftovers import Ground
from tests.cluster.nodes import BRIDGE, DNS_IP, Node, ip

COREFILE = """\
.:53 {
    bind 10.99.0.1
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        kubeconfig @DIR@/inside.kubeconfig mainstay-test
        pods insecure
    }
    cache 2
}
"""


class Cluster(ControlPlane):
    """A control plane with nodes. See `ControlPlane` for the clients, kubectl, helm and relays."""

    def __init__(self, ground: Ground, tools: Path) -> None:
        network = ground.name("cp")
        ip("netns", "add", network)
        for command in (
            "link set lo up",
            "link add nodes type bridge",
            f"addr add {BRIDGE}.1/24 dev nodes",
            "link set nodes up",
            "route add default dev nodes",
        ):
            ip("-n", network, *command.split())
        super().__init__(ground, tools, Place(network=network, address=f"{BRIDGE}.1"))
        forward = ["sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"]
        self.ground.spawn("forward", [*self.place.enter(), *forward]).wait()
        self.nodes: dict[str, Node] = {}
        self.images = write_base_images(self.dir)
        self._num_made = 0
        self._start_dns()

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_alive]

    def scale(self, num_nodes: int) -> Cluster:
        """Have at least so many living and ready nodes: replace dead ones, add new ones."""
        for node in [node for node in self.nodes.values() if not node.is_alive]:
            with contextlib.suppress(AssertionError):
                self.api.delete(f"/api/v1/nodes/{node.name}")
            del self.nodes[node.name]
        count = range(self._num_made + 1, self._num_made + 1 + num_nodes - len(self.nodes))
        self._num_made += len(count)
        with ThreadPoolExecutor(max_workers=4) as pool:
            for node in pool.map(lambda index: Node(self, index, self.images), count):
                self.nodes[node.name] = node
        self._add_routes()
        for node in self.nodes.values():
            path = f"/api/v1/nodes/{node.name}"
            self.api.wait(path, is_ready, "the node is not ready")
        return self

    def add_image(self, archive: Path) -> None:
        """Import an image archive into every node, those to come included."""
        self.images.append(archive)
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(lambda node: node.import_image(archive), self.living))

    def kill_node(self, name: str) -> None:
        self.nodes[name].kill()

    @contextlib.contextmanager
    def cut_off(self, name: str) -> Iterator[None]:
        """Let nobody reach a node, nor the node anybody; what runs there goes on by itself."""
        self.nodes[name].unplug()
        try:
            yield
        finally:
            self.nodes[name].plug_in()
            self.api.wait(f"/api/v1/nodes/{name}", is_ready, "the node is not back")

    def reach(self, service: str, namespace: str, network: str | None = None) -> str:
        """A URL on loopback that leads to a Service's first port, from one of the nodes."""
        spec = self.api.get(f"/api/v1/namespaces/{namespace}/services/{service}")["spec"]
        network = network or self.living[0].network
        return self.relay(spec["clusterIP"], spec["ports"][0]["port"], network)

    def _add_routes(self) -> None:
        for node in self.living:
            for other in self.living:
                if other is not node:
                    ip("-n", node.network, "route", "replace", other.pods, "via", other.address)

    def _start_dns(self) -> None:
        (self.dir / "Corefile").write_text(COREFILE.replace("@DIR@", str(self.dir)))
        self.start("coredns", "-conf", str(self.dir / "Corefile"))
        ports = [
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        ]
        metadata = {"name": "kube-dns", "namespace": "kube-system"}
        self.api.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": metadata,
                "spec": {"clusterIP": DNS_IP, "ports": ports},
            }
        )
        self.api.apply(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": metadata | {"labels": {"kubernetes.io/service-name": "kube-dns"}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [f"{BRIDGE}.1"]}],
                "ports": ports,
            }
        )


def is_ready(node: Object | None) -> bool:
    """Whether a node's Ready condition is true and nothing keeps pods off it."""
    if node is None or any(
        taint["key"].startswith("node.kubernetes.io/") for taint in node["spec"].get("taints", [])
    ):
        return False
    conditions = node["status"].get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


@contextlib.contextmanager
def run_control_plane(say: toolbox.Say) -> Iterator[ControlPlane]:
    """A control plane on loopback, for as long as the context lasts."""
    tools = find_tools(say)
    with contextlib.closing(Ground()) as ground:
        plane = ControlPlane(ground, tools, loopback_place())
        try:
            yield plane
        finally:
            plane.close()


@contextlib.contextmanager
def run_cluster(num_nodes: int, say: toolbox.Say) -> Iterator[Cluster]:
    """A cluster with nodes, for as long as the context lasts."""
    toolbox.require_nodes()
    toolbox.ensure_packages(say)
    tools = toolbox.build(say)
    with contextlib.closing(Ground()) as ground:
        cluster = Cluster(ground, tools)
        try:
            yield cluster.scale(num_nodes)
        finally:
            cluster.close()


__all__ = ["PODS", "Cluster", "run_cluster", "run_control_plane"]
