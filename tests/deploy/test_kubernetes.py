"""The manifests are valid, and agree with each other."""

from pathlib import Path
from typing import Any

import pytest

from serving.router.topology import read_topology
from stages.wire.channel import DRAIN_S
from tests.deploy.conftest import documents

VERSION = "1.31"
"""The oldest that is tried."""
KUSTOMIZATION = "kustomization.yaml"
CREATED = {"topology", "authority", "stage-a-certs", "stage-b-certs", "stage-c-certs", "router-certs", "router-tokens"}
"""ConfigMaps and Secrets that docs/deploy.md, or kustomize, makes."""

Manifest = dict[str, Any]


@pytest.fixture
def manifests(deploy: Path) -> list[Manifest]:
    paths = sorted((deploy / "kubernetes").glob("*.yaml"))
    return [document for path in paths if path.name != KUSTOMIZATION for document in documents(path)]


@pytest.fixture
def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if "template" in manifest.get("spec", {})]


def container_of(workload: Manifest) -> Manifest:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container


def test_the_manifests_are_valid(manifests: list[Manifest]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for manifest in manifests:
        validator.validate(manifest, VERSION, strict=True)


def test_kustomize_applies_all_manifests(deploy: Path) -> None:
    folder = deploy / "kubernetes"
    (kustomization,) = documents(folder / KUSTOMIZATION)
    assert {*kustomization["resources"], KUSTOMIZATION} == {path.name for path in folder.glob("*.yaml")}
    (topology,) = kustomization["configMapGenerator"]
    assert all((folder / name).exists() for name in topology["files"])


def test_the_topology_names_the_pods(deploy: Path, workloads: list[Manifest]) -> None:
    pods = [
        f"{workload['metadata']['name']}-{number}"
        for workload in workloads
        if workload["kind"] == "StatefulSet"
        for number in range(workload["spec"]["replicas"])
    ]
    topology = read_topology(deploy / "kubernetes" / "topology.toml")
    assert [host.name for host in topology.hosts] == pods
    assert [host.address for host in topology.hosts] == [f"{pod}.stages:7701" for pod in pods]


def test_probes_use_ports_that_are_served(workloads: list[Manifest]) -> None:
    services = set()
    for workload in workloads:
        container = container_of(workload)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container[name]
            if "grpc" in probe:
                assert f"--health=0.0.0.0:{probe['grpc']['port']}" in container["args"]
                services.add(probe["grpc"].get("service", ""))
            else:
                assert f"--listen=0.0.0.0:{ports[probe['httpGet']['port']]}" in container["args"]
    assert services == {"", "stages.v1.StageService", "serving.v1.RouterService"}


def test_pods_run_without_privileges(workloads: list[Manifest]) -> None:
    for workload in workloads:
        pod, container = workload["spec"]["template"]["spec"], container_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]


def test_the_one_router_does_not_block_draining_its_node(manifests: list[Manifest], workloads: list[Manifest]) -> None:
    (router,) = [workload for workload in workloads if workload["metadata"]["name"] == "router"]
    assert (router["spec"]["replicas"], router["spec"]["strategy"]) == (1, {"type": "Recreate"})
    labels = router["spec"]["template"]["metadata"]["labels"]
    budgets = [each["spec"]["selector"] for each in manifests if each["kind"] == "PodDisruptionBudget"]
    assert budgets
    assert not [chosen for chosen in budgets if chosen["matchLabels"].items() <= labels.items()]


def test_releases_are_stored_on_persistent_volumes(workloads: list[Manifest]) -> None:
    for workload in workloads:
        container, pod = container_of(workload), workload["spec"]["template"]["spec"]
        stores = [word.partition("=")[2] for word in container["args"] if word.startswith("--releases=")]
        assert len(stores) == (container["args"][0] != "http")
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        claims |= {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
        mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in claims]
        assert [str(Path(store).parent) for store in stores] == mounts
        # a store refuses a directory that its group may write to, as a kubelet makes of each one at every start
        assert not stores or pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_every_mounted_secret_and_config_map_is_documented(deploy: Path, workloads: list[Manifest]) -> None:
    page = (deploy.parent / "docs" / "deploy.md").read_text()
    mounted = {
        source[key]
        for workload in workloads
        for source in (
            v.get("secret") or v.get("configMap") or {} for v in workload["spec"]["template"]["spec"]["volumes"]
        )
        for key in source.keys() & {"secretName", "name"}
    }
    assert mounted == CREATED
    assert [name for name in CREATED - {"topology"} if name not in page] == []


def test_pods_have_time_to_complete_their_requests(workloads: list[Manifest]) -> None:
    assert all(each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > DRAIN_S for each in workloads)
