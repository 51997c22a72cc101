"""The manifests on the page about deploying are valid, and what they give to the stack in them is enough."""

import json
import re
from pathlib import Path

import pytest
import yaml

from kvcascade.configs import parse_stack
from kvcascade.configs.units import parse_size

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the docs are not here: this runs against a package")

GI = 1 << 30


def manifests():
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def of_kind(kind):
    (found,) = (document for document in manifests() if document.get("kind") == kind)
    return found


def stack_path(arguments):
    """Where the flag says that the stack is."""
    (given,) = (each for each in arguments if each.startswith("--kv-transfer-config="))
    config = json.loads(given.partition("=")[2])
    assert config["kv_connector"] == "OffloadingConnector" and config["kv_role"] == "kv_both"
    return config["kv_connector_extra_config"]["stack"]


def parse(text, monkeypatch, environment):
    """The stack, as `kvcascade check` reads it, with no variables but those that the container gets."""
    asked = re.findall(r"\$\{(\w+)\}", text)
    assert asked, "no secret comes from the environment"
    for name in asked:
        monkeypatch.delenv(name, raising=False)
    for name in environment:
        monkeypatch.setenv(name, "from-the-environment")
    return parse_stack(text, "stack.yaml")


def check_room(stack, memory, disk=None):
    assert stack.primary.capacity + GI < memory
    if disk is not None:
        assert stack.secondary[0].capacity * 1.1 <= disk


def test_compose(monkeypatch):
    (compose,) = (document for document in manifests() if "services" in document)
    vllm = compose["services"]["vllm"]
    (config,) = vllm["configs"]
    assert config["target"] == stack_path(vllm["command"])
    text = compose["configs"][config["source"]]["content"]
    assert not re.search(r"(?<!\$)\$\{", text), "Compose would replace it, and write the secret into the file"
    stack = parse(text.replace("$$", "$"), monkeypatch, vllm["environment"])
    mounts = [volume.split(":") for volume in vllm["volumes"]]
    assert [str(stack.secondary[0].path)] == [mount[1] for mount in mounts if len(mount) == 2]
    check_room(stack, parse_size(vllm["mem_limit"].upper().replace("G", "GiB")))
    assert "/health" in vllm["healthcheck"]["test"][-1]


def test_kubernetes(monkeypatch):
    workload, secret = of_kind("StatefulSet")["spec"], of_kind("Secret")
    (container,) = workload["template"]["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    stack = parse(of_kind("ConfigMap")["data"]["stack.yaml"], monkeypatch, environment)
    reference = environment["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]
    assert reference["name"] == secret["metadata"]["name"] and reference["key"] in secret["stringData"]

    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert str(Path(stack_path(container["args"])).parent) in mounts
    cache = mounts[str(stack.secondary[0].path)]
    assert not cache.get("readOnly")
    (claim,) = (each for each in workload["volumeClaimTemplates"] if each["metadata"]["name"] == cache["name"])
    named = {volume["name"] for volume in workload["template"]["spec"]["volumes"]} | {cache["name"]}
    assert {mount["name"] for mount in mounts.values()} == named

    resources = container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    disk = parse_size(claim["spec"]["resources"]["requests"]["storage"] + "B")
    check_room(stack, parse_size(resources["limits"]["memory"] + "B"), disk)
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health" and container[probe]["httpGet"]["port"] in ports
    labels = workload["template"]["metadata"]["labels"]
    assert workload["selector"]["matchLabels"] == labels == of_kind("Service")["spec"]["selector"]


def test_the_container_runs_without_rights():
    template = of_kind("StatefulSet")["spec"]["template"]["spec"]
    inside = template["containers"][0]["securityContext"]
    assert template["securityContext"]["runAsNonRoot"] and inside["readOnlyRootFilesystem"]
    assert inside["capabilities"] == {"drop": ["ALL"]} and not inside["allowPrivilegeEscalation"]
