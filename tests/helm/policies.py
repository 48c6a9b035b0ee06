"""Decides by NetworkPolicies whether a connection is allowed, as in the API's reference: both ends must allow it."""

import ipaddress
from dataclasses import dataclass
from typing import Any

from tests.helm.chart import NAMESPACE, Object, of_kind, workloads


@dataclass(frozen=True)
class Place:
    """A pod, or an address outside of the cluster."""

    labels: dict[str, str] | None = None
    namespace: str = NAMESPACE
    address: str = ""


def place(objects: list[Object], workload: str) -> Place:
    """Return the place of a workload's pods."""
    it = workloads(objects)[workload]
    metadata = it["metadata"] if it["kind"] == "Pod" else it["spec"]["template"]["metadata"]
    return Place(labels=metadata["labels"])


def allowed(objects: list[Object], source: Place, target: Place, port: int, *, protocol: str = "TCP") -> bool:
    """Whether ``source`` may open a connection to ``target``."""
    policies = list(of_kind(objects, "NetworkPolicy").values())
    return _one_end(policies, source, target, port, protocol, "Egress", "to") and _one_end(
        policies, target, source, port, protocol, "Ingress", "from"
    )


def _one_end(
    policies: list[Object], here: Place, there: Place, port: int, protocol: str, direction: str, peers: str
) -> bool:
    if here.labels is None or here.namespace != NAMESPACE:
        return True
    about_us = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"]["policyTypes"] and _selects(policy["spec"]["podSelector"], here.labels)
    ]
    if not about_us:
        return True
    rules: list[dict[str, Any]] = [rule for spec in about_us for rule in _rules(spec, direction)]
    return any(
        (not rule.get(peers) or any(_is_peer(peer, there) for peer in rule[peers]))
        and (not rule.get("ports") or any(_is_port(entry, port, protocol) for entry in rule["ports"]))
        for rule in rules
    )


def _rules(spec: dict[str, Any], direction: str) -> list[dict[str, Any]]:
    return spec.get(direction.lower()) or []


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, "what the chart writes"
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def _is_peer(peer: dict[str, Any], there: Place) -> bool:
    if "ipBlock" in peer:
        if not there.address:
            return False
        address, block = ipaddress.ip_address(there.address), peer["ipBlock"]
        inside = [ipaddress.ip_network(cidr) for cidr in (block["cidr"], *block.get("except", []))]
        return address in inside[0] and not any(address in network for network in inside[1:])
    if there.labels is None:
        return False
    if "namespaceSelector" in peer:
        namespace = {"kubernetes.io/metadata.name": there.namespace}
        return _selects(peer["namespaceSelector"], namespace) and _selects(peer.get("podSelector", {}), there.labels)
    return there.namespace == NAMESPACE and _selects(peer["podSelector"], there.labels)


def _is_port(entry: dict[str, Any], port: int, protocol: str) -> bool:
    first: int = entry["port"]
    last: int = entry.get("endPort", first)
    return bool(entry.get("protocol", "TCP") == protocol) and first <= port <= last
