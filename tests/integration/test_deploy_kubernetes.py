"""The manifests of deploy/kubernetes: what the API server takes, what they admit, and to whom."""

from __future__ import annotations

import copy
import itertools
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mx import config
from mx.core.policy import Right, subject_of
from tests.support.deployed import (
    DEPLOY,
    PROGRAMS,
    documents,
    endpoints,
    flows_admitted,
    manifests,
    pods,
    settings_of,
)

pytestmark = pytest.mark.integration

VERSIONS = ("1.28", "1.31", "1.37")
#: The closed overlay, and the one for trying.
OVERLAYS = ("", "insecure")
ALL_PODS = [(overlay, name, pod) for overlay in OVERLAYS for name, pod in pods(overlay)]
CLOSED = dict(pods())
CERTIFICATES = {
    each["spec"]["secretName"]: each
    for each in documents(DEPLOY / "kubernetes/cert-manager/certificates.yaml")
    if each["kind"] == "Certificate" and not each["spec"].get("isCA")
}
#: Users that images have by default: none is a tenant's.
_OF_IMAGES = {0, 999, 1000, 1001, 65532, 65533, 65534}
_EPHEMERAL = (32_768, 45_000, 60_999)
_CACHE_DATA, _REPLICA_DATA = (7602, 7665), (7602, 7617)


def folder(overlay: str) -> Path:
    return DEPLOY / "kubernetes" / overlay


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_are_what_the_api_server_takes(overlay: str, version: str) -> None:
    for each in manifests(overlay):
        kubernetes_validate.validate(each, version, strict=True)
    wrong = copy.deepcopy(next(e for e in manifests(overlay) if e["kind"] == "StatefulSet"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomization_has_each_file_and_image(overlay: str) -> None:
    (found,) = documents(folder(overlay) / "kustomization.yaml")
    files = {path.name for path in folder(overlay).glob("*.yaml")}
    assert {*found["resources"], "kustomization.yaml"} == files
    images = {
        c["image"]
        for _, pod in pods(overlay)
        for c in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
    }
    named = {each["name"] for each in found["images"]}
    assert named == {image for image in images if ":" not in image}
    if not overlay:
        assert named == images  # so that each has one place for its digest
    for each in found.get("configMapGenerator", ()):
        for file in (*each.get("files", ()), *each.get("envs", ())):
            assert (folder(overlay) / file).is_file()


@pytest.mark.parametrize(
    ("overlay", "name", "pod"), ALL_PODS, ids=[f"{o or 'closed'}-{n}" for o, n, _ in ALL_PODS]
)
def test_pods_are_locked_and_probed(overlay: str, name: str, pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    # Service links would be settings of mx where a service is called mx-peer.
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {each["name"] for each in spec.get("volumes", ())} | (
        {"data"} if name == "mx-redis" else set()
    )
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True, container["name"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert "privileged" not in security
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for container in spec["containers"]:
        assert "livenessProbe" in container
        assert container["resources"]["limits"]["memory"]
        ports = {each["containerPort"] for each in container.get("ports", ())}
        names = {each["name"] for each in container.get("ports", ())}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            for how, probe in container.get(kind, {}).items():
                if isinstance(probe, dict) and "port" in probe:
                    assert probe["port"] in ports | names, (how, probe)
                if how == "exec" and probe["command"][0] == "mx-health":
                    assert int(probe["command"][1].rpartition(":")[2]) in ports


def test_only_caches_share_a_host_and_the_namespaces_say_so() -> None:
    levels = {
        each["metadata"]["name"]: each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for each in manifests()
        if each["kind"] == "Namespace"
    }
    assert levels == {"mx": "restricted", "mx-host": "privileged"}
    for each in manifests():
        if "template" not in each.get("spec", {}):
            continue
        spec = each["spec"]["template"]["spec"]
        shares = {key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)}
        shares |= {"hostPath" for volume in spec.get("volumes", ()) if "hostPath" in volume}
        users = [
            c["securityContext"].get("runAsUser", 1)
            for c in (*spec.get("initContainers", ()), *spec["containers"])
        ]
        assert (each["metadata"]["namespace"] == "mx-host") is bool(shares), each["metadata"]
        assert 0 not in users or shares


def test_each_component_has_a_user_and_a_tenants_are_its_caches() -> None:
    users = {name: pod["spec"]["securityContext"]["runAsUser"] for name, pod in CLOSED.items()}
    assert users["mx-cache"] == users["llama-8b"]
    assert len(set(users.values())) == len(users) - 1
    assert not set(users.values()) & _OF_IMAGES
    assert min(users.values()) > 10_000
    for name, pod in CLOSED.items():
        context = pod["spec"]["securityContext"]
        assert context["runAsGroup"] == context["fsGroup"] == users[name]
    # The folder of the cache's socket is that user's.
    text = (folder("") / "cache.yaml").read_text()
    assert f"os.chown('/run/mx', {users['mx-cache']}, {users['mx-cache']})" in text


def test_pods_have_the_keys_that_they_use_and_no_others() -> None:
    """By name: `items` of Secrets, single variables, and nothing of another's."""
    given: dict[str, set[str]] = {}
    for name, pod in CLOSED.items():
        for volume in pod["spec"].get("volumes", ()):
            source = volume.get("secret") or volume.get("configMap")
            if source is not None:
                assert source["items"], (name, volume["name"])
            if "secret" in volume:
                assert source["defaultMode"] == 0o440
                keys = {item["key"] for item in source["items"]}
                given.setdefault(name, set()).update(f"{source['secretName']}/{k}" for k in keys)
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            assert "envFrom" not in container
            for each in container.get("env", ()):
                if found := each.get("valueFrom", {}).get("secretKeyRef"):
                    given[name].add(f"{found['name']}/{found['key']}")

    def tls(name: str) -> set[str]:
        return {f"{name}-tls/{file}" for file in ("tls.crt", "tls.key", "ca.crt")}

    assert given == {
        "mx-redis": tls("mx-redis") | {"mx-redis-users/users.acl"},
        "mx-coordinator": tls("mx-coordinator")
        | {"mx-coordinator-keys/receipt.key", "mx-redis-password/password"},
        "mx-origin": tls("mx-origin") | {"mx-origin-keys/name.key"},
        "mx-cache": tls("mx-cache"),
        "llama-8b": tls("llama-8b") | {"llama-8b-keys/lender.key"},
    }
    for name, each in CERTIFICATES.items():
        if name != "mx-operator-tls":
            pod = CLOSED[name.removesuffix("-tls")]
            space = "mx-host" if name == "mx-cache-tls" else "mx"
            assert each["metadata"]["namespace"] == space
            assert pod
    # A key is where its user alone reads it, before anything else runs.
    for name, key in (("mx-origin", "name.key"), ("llama-8b", "lender.key")):
        (keys,) = CLOSED[name]["spec"]["initContainers"]
        assert keys["args"][-3:] == ["/keys", "/var/lib/mx", key]
        for container in CLOSED[name]["spec"]["containers"]:
            assert "keys" not in {mount["name"] for mount in container["volumeMounts"]}


def settings_in(name: str) -> dict[str, str]:
    (container,) = CLOSED[name]["spec"]["containers"]
    return {
        each["name"]: each.get("value", "")
        for each in container.get("env", ())
        if each["name"].startswith("MX_PEER_")
    }


def test_nothing_is_insecure_outside_its_folder() -> None:
    for path in folder("").glob("*"):
        if path.is_file():
            text = path.read_text().lower()
            assert "insecure" not in text.replace("deploy/kubernetes/insecure", ""), path
    for name in ("mx-coordinator", "mx-origin", "mx-cache", "llama-8b"):
        found = settings_in(name)
        assert found["MX_PEER_TLS_CERT"] == "/etc/mx/tls/tls.crt"
        assert found["MX_PEER_TLS_KEY"] == "/etc/mx/tls/tls.key"
        assert found["MX_PEER_TLS_CA"] == "/etc/mx/tls/ca.crt"
        assert found["MX_PEER_POLICY"] == "/etc/mx/policy/policy.toml"
        assert {each.removeprefix("MX_PEER_").lower() for each in found} <= {*config.descriptions()}
    assert settings_in("llama-8b")["MX_PEER_LENDER_KEY"] == "/var/lib/mx/lender.key"
    assert not any("NAME_KEY" in each for each in settings_in("llama-8b"))
    state = settings_in("mx-coordinator")["MX_PEER_STATE"]
    assert state.startswith("rediss://mx:$(REDIS_PASSWORD)@") and "ssl_check_hostname=true" in state
    (coordinator,) = CLOSED["mx-coordinator"]["spec"]["containers"]
    assert " --state-mac require" in " ".join(coordinator["args"])
    redis = (folder("") / "redis.conf").read_text().splitlines()
    assert {"port 0", "tls-auth-clients yes", "aclfile /etc/mx/acl/users.acl"} <= set(redis)


def test_replicas_have_the_pin_of_one_place() -> None:
    assert "MODEL=llama-8b@PIN" in (folder("") / "model.env").read_text().splitlines()
    (keys,) = CLOSED["llama-8b"]["spec"]["initContainers"]
    (engine,) = CLOSED["llama-8b"]["spec"]["containers"]
    assert keys["args"][:3] == ["mx-keys", "--pinned", "$(MODEL)"]
    assert '{"model": "$(MODEL)"}' in engine["args"]
    for container in (keys, engine):
        (model,) = (each for each in container["env"] if each["name"] == "MODEL")
        assert model["valueFrom"] == {"configMapKeyRef": {"name": "mx-model", "key": "MODEL"}}


def test_the_policy_gives_each_certificate_what_it_does() -> None:
    rules = tomllib.loads((folder("") / "policy.toml").read_text())["allow"]
    named = {uri for rule in rules for uri in _listed(rule["principal"])}
    issued = {uri for each in CERTIFICATES.values() for uri in each["spec"].get("uris", ())}
    assert named == issued
    rights = {
        uri.rpartition("/")[2]: {right for rule in rules if uri in _listed(rule["principal"])
                                 for right in _listed(rule["may"])}
        for uri in issued
    }  # fmt: skip
    assert rights == {
        "mx-origin": {"serve"},
        "llama-8b": {"pull", "serve"},
        "mx-cache": {"pull", "serve"},
        "mx-coordinator": {"observe"},
        "mx-operator": {"observe"},
    }
    assert not any("*" in uri for uri in named)
    assert {right for each in rights.values() for right in each} <= {r.value for r in Right}
    for each in CERTIFICATES.values():
        spec = each["spec"]
        subject_of(spec.get("uris", ()), spec.get("dnsNames", ()), spec.get("ipAddresses", ()))


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def test_certificates_name_where_their_pods_are_dialled() -> None:
    for name, where in (
        ("mx-coordinator", "*.mx-coordinator.mx.svc"),
        ("mx-origin", "*.mx-origin.mx.svc"),
        ("llama-8b", "*.llama-8b-peers.mx.svc"),
        ("mx-redis", "mx-redis.mx.svc"),
    ):
        assert where in CERTIFICATES[f"{name}-tls"]["spec"]["dnsNames"]
        service = where.removeprefix("*.").partition(".")[0]
        assert any(
            each["kind"] == "Service" and each["metadata"]["name"] == service
            and each["spec"]["clusterIP"] == "None"
            for each in manifests()
        )  # fmt: skip
    (origin,) = CLOSED["mx-origin"]["spec"]["containers"]
    assert "$(POD_NAME).mx-origin.mx.svc:7601" in origin["args"]
    assert settings_in("llama-8b")["MX_PEER_ADVERTISE"] == "$(POD_NAME).llama-8b-peers.mx.svc:0"


def test_the_commands_of_pods_are_understood() -> None:
    seen = set()
    for overlay, name, pod in ALL_PODS:
        for container in pod["spec"]["containers"]:
            words = container.get("args", [])
            exec_probes = [
                container[kind]["exec"]["command"]
                for kind in ("startupProbe", "readinessProbe", "livenessProbe")
                if "exec" in container.get(kind, {})
            ]
            for each in (words, *exec_probes):
                if each and each[0] in PROGRAMS:
                    settings = settings_of(each)
                    seen.add((overlay, name, each[0]))
                    probe = container.get("readinessProbe", {})
                    listens = settings.coordinator_listen if each[0] != "mx" else settings.listen
                    if each is words and "grpc" in probe:
                        assert probe["grpc"]["port"] == int(listens.rpartition(":")[2])
                    if (
                        each is words
                        and probe.get("exec", {}).get("command", [""])[0] == "mx-health"
                    ):
                        assert probe["exec"]["command"] == [
                            "mx-health", f"localhost:{listens.rpartition(':')[2]}"
                        ]  # fmt: skip
    assert seen == {
        ("", "mx-cache", "mx"),
        ("", "mx-coordinator", "mx-coordinator"),
        ("", "mx-origin", "mx"),
        ("insecure", "mx-coordinator", "mx-coordinator"),
        ("insecure", "mx-origin", "mx"),
    }


@pytest.mark.parametrize(
    ("overlay", "suffix", "clients"), [("", ".mx.svc", 3), ("insecure", "", 2)]
)
def test_clients_name_each_coordinator_that_there_is(
    overlay: str, suffix: str, clients: int
) -> None:
    (workload,) = (
        each
        for each in manifests(overlay)
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "mx-coordinator"
    )
    service = workload["spec"]["serviceName"]
    expected = ",".join(
        f"mx-coordinator-{n}.{service}{suffix}:7600" for n in range(workload["spec"]["replicas"])
    )
    text = "".join(path.read_text() for path in folder(overlay).glob("*.yaml"))
    assert text.count(expected) == clients
    assert len(re.findall(r"mx-coordinator-0\.", text)) == clients


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_pods(overlay: str) -> None:
    labels = [pod["metadata"]["labels"] for _, pod in pods(overlay)]
    for each in manifests(overlay):
        spec = each.get("spec", {})
        if each["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            selector = spec.get("selector") or spec["podSelector"]
            if "matchExpressions" in selector:
                (expression,) = selector["matchExpressions"]
                wanted = [{expression["key"]: value} for value in expression["values"]]
            else:
                wanted = [selector.get("matchLabels", selector)]
            for one in wanted:
                assert any(one.items() <= found.items() for found in labels), each["metadata"]
        if "template" in spec:
            own = spec["selector"]["matchLabels"]
            assert own.items() <= spec["template"]["metadata"]["labels"].items()


# -- who connects with whom -----------------------------------------------------------------------


def admitted(source: str, target: str, port: int, protocol: str) -> bool:
    """Return what mx and its surroundings need, at the level of ports."""
    peers = ("mx-origin", "mx-cache", "llama-8b")
    control = port in _EPHEMERAL
    match target:
        case "names":
            return port == 53 and source not in ("mx-redis",)
        case _ if protocol == "UDP":
            return False
        case "mx-coordinator" if port == 7600:
            return source in peers
        case "mx-coordinator" | "mx-origin" if port == 7690:
            return source == "prometheus"
        case "mx-redis":
            return port == 6379 and source == "mx-coordinator"
        case "mx-origin":
            return 7601 <= port <= 7605 and source in ("mx-cache", "llama-8b")
        case "llama-8b" if port == 8000:
            return source in ("prometheus", "asking")
        case "llama-8b":
            data = _REPLICA_DATA[0] <= port <= _REPLICA_DATA[1]
            return (data or control) and source in ("mx-cache", "llama-8b")
        case "mx-cache":
            data = _CACHE_DATA[0] <= port <= _CACHE_DATA[1]
            return (data or control) and source == "llama-8b"
        case _:
            return False


@pytest.mark.parametrize(
    "source",
    [name for name, _ in pods()] + ["prometheus", "asking", "stranger", "elsewhere", "internet"],
)
def test_the_network_admits_what_is_needed_and_nothing_else(source: str) -> None:
    ports = (22, 53, 80, 443, 5432, 6379, 6380, *range(7599, 7619), 7665, 7666, 7690, 7691, 8000)
    inside = {name for name, _ in pods() if name != "mx-cache"}
    for target, port in itertools.product(endpoints(), (*ports, 8001, 32_767, *_EPHEMERAL, 61_000)):
        for protocol in ("TCP", "UDP"):
            if target == source and source != "llama-8b":
                continue
            if not {source, target} & inside:
                continue  # between hosts, and elsewhere: not ours
            found = flows_admitted(source, target, port, protocol)
            assert found == admitted(source, target, port, protocol), (
                source,
                target,
                port,
                protocol,
            )


def test_every_pod_is_denied_what_no_policy_names() -> None:
    for space in ("mx", "mx-host"):
        (deny,) = (
            each["spec"]
            for each in manifests()
            if each["kind"] == "NetworkPolicy"
            and each["metadata"] == {"name": "deny", "namespace": space}
        )
        assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
@pytest.mark.parametrize(
    ("overlay", "spaces", "more"), [("", {"mx", "mx-host"}, 4), ("insecure", {"mx"}, 0)]
)
def test_kustomize_builds_it(overlay: str, spaces: set[str], more: int) -> None:
    built_files = subprocess.run(
        ["kubectl", "kustomize", str(folder(overlay))],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = [each for each in yaml.safe_load_all(built_files.stdout) if each]
    assert len(found) == len(manifests(overlay)) + more
    namespaces = {e["metadata"]["name"] for e in found if e["kind"] == "Namespace"}
    assert namespaces == spaces
    assert {e["metadata"].get("namespace", "") for e in found if e["kind"] != "Namespace"} == spaces
    maps = {
        (e["metadata"]["namespace"], e["metadata"]["name"])
        for e in found
        if e["kind"] == "ConfigMap"
    }
    assert maps == (
        {("mx", "mx-policy"), ("mx-host", "mx-policy"), ("mx", "mx-model"), ("mx", "mx-redis")}
        if more
        else set()
    )
    for each in found:
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
