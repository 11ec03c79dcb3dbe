"""`deploy/kubernetes/`: the cluster takes the manifests, they agree with each other, and with the program."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as validator

from app import cli
from app.discovery.sources import DnsSource
from app.http.openapi import document
from app.metrics.families import FAMILIES
from app.settings import Settings, variables_of
from tests.support.redis import Space
from tests.test_deploy import promtool

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
MONITORING = FOLDER / "prometheus"
VERSIONS = ("1.30", kubernetes_validate.latest_version())  # the oldest with `sleep` in `preStop`, and the newest known
MIB = 2**20

Resource = dict[str, Any]


def resources_of(folder: Path) -> list[Resource]:
    """Those that `kubectl apply -k` sends, less what kustomize generates."""
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [resource for name in names for resource in yaml.safe_load_all((folder / name).read_text())]


def in_pages() -> Iterator[Resource]:
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL):
        yield from (found for found in yaml.safe_load_all(block) if "kind" in found)


BASE, EXTRA = resources_of(FOLDER), resources_of(MONITORING)
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
SECRETS = {
    found["metadata"]["name"]: found for found in yaml.safe_load_all((FOLDER / "secrets.example.yaml").read_text())
}
STANDARD = [r for r in [*BASE, *EXTRA, *SECRETS.values(), *in_pages()] if r["kind"] != "PodMonitor"]


def the(kind: str, name: str = "evenhand", *, among: list[Resource] = BASE) -> Resource:
    (found,) = [r for r in among if r["kind"] == kind and r["metadata"]["name"] == name]
    return found


POD: Resource = the("Deployment")["spec"]["template"]
(MAIN,) = POD["spec"]["containers"]
LABELS: dict[str, str] = POD["metadata"]["labels"]
MOUNTS: dict[str, str] = {mount["mountPath"]: mount["name"] for mount in MAIN["volumeMounts"]}
VOLUMES: dict[str, Resource] = {volume["name"]: volume for volume in POD["spec"]["volumes"]}


def environment() -> dict[str, str]:
    """The variables of the container that are written out."""
    return {variable["name"]: variable["value"] for variable in MAIN["env"] if "value" in variable}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Those of a pod, with the files of keys found here."""
    text = (FOLDER / "evenhand.toml").read_text()
    for name in ("api-keys", "admin-keys", "reader-keys"):
        (tmp_path / name).write_text("sha256:" + "0f" * 32)
        text = text.replace(f"/etc/evenhand/keys/{name}", str(tmp_path / name))
    (tmp_path / "evenhand.toml").write_text(text)
    for name in [name for name in os.environ if name.startswith("EVENHAND_")]:
        monkeypatch.delenv(name)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EVENHAND_CONFIG", str(tmp_path / "evenhand.toml"))
    monkeypatch.setenv("EVENHAND_REDIS_URL", "redis://redis:6379/0")
    return Settings.load()


def mib(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([MG])i", text).groups()  # type: ignore[union-attr]
    return int(number) * {"M": 1, "G": 1024}[unit]


# --- the cluster takes them --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _schemas_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validator, "schema_contents", _schema_contents)


_schema_contents = functools.cache(validator.schema_contents)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_one_of_that_version(version: str) -> None:
    assert len(STANDARD) >= 12
    for resource in STANDARD:
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_field_that_there_is_not_is_refused() -> None:
    wrong = copy.deepcopy(the("Deployment"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_no_manifest_is_forgotten() -> None:
    apart = {"kustomization.yaml", "secrets.example.yaml", "adapter-values.yaml"}
    for folder in (FOLDER, MONITORING):
        named = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        assert sorted(named) == sorted({path.name for path in folder.glob("*.yaml")} - apart)


def test_everything_is_in_one_namespace() -> None:
    for folder in (FOLDER, MONITORING):
        of = yaml.safe_load((folder / "kustomization.yaml").read_text())["namespace"]
        assert of == the("Namespace")["metadata"]["name"]
    assert not [r for r in BASE + EXTRA if "namespace" in r["metadata"]]
    assert {secret["metadata"]["namespace"] for secret in SECRETS.values()} == {"evenhand"}


def test_the_pod_keeps_to_the_standard_restricted() -> None:
    whole = POD["spec"]["securityContext"]
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    assert (whole["runAsUser"], whole["runAsGroup"], whole["fsGroup"]) == (int(user[1]), int(user[2]), int(user[2]))
    assert whole["runAsNonRoot"] is True and whole["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (MAIN, *POD["spec"]["initContainers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_pod_has_no_token() -> None:
    assert POD["spec"]["serviceAccountName"] == the("ServiceAccount")["metadata"]["name"]
    assert POD["spec"]["automountServiceAccountToken"] is False
    assert the("ServiceAccount")["automountServiceAccountToken"] is False


# --- they agree with the program ---------------------------------------------------------------------


def test_the_settings_are_right(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check"]) == 0
    said = capsys.readouterr()
    assert said.err == "", "nothing is allowed but most likely not meant"


def test_variables_are_settings() -> None:
    known = {variable for name in Settings.model_fields for variable in variables_of(name)}
    for container in (MAIN, *POD["spec"]["initContainers"]):
        assert {variable["name"] for variable in container["env"]} <= known
    assert POD["spec"]["enableServiceLinks"] is False


def test_commands_are_commands() -> None:
    cli.build_parser("serve").parse_args(MAIN["args"])
    (redis,) = POD["spec"]["initContainers"]
    loop = re.fullmatch(r"until evenhand (.*); do sleep \d+; done", redis["command"][-1])
    assert loop is not None
    words = loop[1].split()
    assert cli.build_parser(words[0]).parse_args(words).once is True
    # A shell as process 1 would not hear SIGTERM.
    assert redis["command"][:-1] == ["tini", "--", "sh", "-c"]
    assert 'ENTRYPOINT ["tini"' in (ROOT / "Dockerfile").read_text()


def test_a_new_pod_waits_for_redis_and_not_for_other_pods(
    redis: Space, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVENHAND_REDIS_URL", redis.url)
    monkeypatch.setenv("EVENHAND_NAMESPACE", redis.namespace)
    assert cli.main(["top", "--once"]) == 0
    assert "0/0 nodes ready" in capsys.readouterr().out
    monkeypatch.setenv("EVENHAND_REDIS_URL", "redis://127.0.0.1:1/0")
    assert cli.main(["top", "--once"]) == 1
    assert "Redis can't be used" in capsys.readouterr().err


def test_probes_ask_a_route_that_does_not_look_at_redis_or_engines() -> None:
    routes = document()["paths"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = MAIN[name]["httpGet"]
        assert "get" in routes[asked["path"]]
        assert asked == {"path": "/health", "port": "http"}, "/ready is 503 on all pods at once"
    (scraped,) = the("PodMonitor", among=EXTRA)["spec"]["podMetricsEndpoints"]
    assert "get" in routes[scraped["path"]]


def test_a_drain_ends_before_its_pod_is_killed(settings: Settings) -> None:
    before = MAIN["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before >= 5, "until every proxy has heard of it"
    assert POD["spec"]["terminationGracePeriodSeconds"] >= before + 2 * settings.grace_s + 20


def test_the_master_finds_a_stuck_worker_before_the_pod_is_killed() -> None:
    probe = MAIN["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60
    assert probe["timeoutSeconds"] > Settings.model_fields["redis_timeout_s"].default


def test_files_are_mounted_where_the_settings_look_for_them(settings: Settings) -> None:
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    config = Path(environment()["EVENHAND_CONFIG"])
    assert VOLUMES[MOUNTS[str(config.parent)]]["configMap"]["name"] == generated["name"]
    assert generated["files"] == [config.name]
    written = re.findall(r'-keys-file = "(.*)/(.*)"', (FOLDER / "evenhand.toml").read_text())
    assert {folder for folder, _ in written} == {"/etc/evenhand/keys"}
    secret = SECRETS[VOLUMES[MOUNTS["/etc/evenhand/keys"]]["secret"]["secretName"]]
    assert {name for _, name in written} == set(secret["stringData"])
    assert not any("subPath" in mount for mount in MAIN["volumeMounts"]), "it would never be updated"
    assert VOLUMES["keys"]["secret"]["defaultMode"] == 0o440


def test_only_what_has_to_be_written_can_be(settings: Settings) -> None:
    writable = {path for path, name in MOUNTS.items() if "emptyDir" in VOLUMES[name]}
    assert writable == {str(settings.state_dir), "/tmp"}
    assert all(mount.get("readOnly") for mount in MAIN["volumeMounts"] if mount["mountPath"] not in writable)
    room = mib(VOLUMES["tmp"]["emptyDir"]["sizeLimit"])
    assert room >= 10 * settings.max_body_size / MIB, "a pod that goes beyond it is evicted"


def test_memory_is_enough_for_what_the_settings_allow(settings: Settings) -> None:
    at_rest = {1: 113, 2: 126, 4: 156}[settings.workers]  # docs/performance.md, the most that was seen
    streams, bodies = 2 * 17.1, 5 * 2 * settings.max_body_size / MIB
    assert mib(MAIN["resources"]["limits"]["memory"]) >= at_rest + streams + bodies
    assert mib(MAIN["resources"]["requests"]["memory"]) >= at_rest + streams
    assert "cpu" not in MAIN["resources"]["limits"]


def test_redis_is_the_secrets_and_no_pod_starts_without_one() -> None:
    for container in (MAIN, *POD["spec"]["initContainers"]):
        (url,) = [v["valueFrom"]["secretKeyRef"] for v in container["env"] if v["name"] == "EVENHAND_REDIS_URL"]
        assert set(url) == {"name", "key"}, "optional would be an embedded Redis in each pod"
        assert url["key"] in SECRETS[url["name"]]["stringData"]


def test_the_example_of_secrets_opens_nothing(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {text for secret in SECRETS.values() for text in secret["stringData"].values()}
    assert texts == {""}
    (tmp_path / "api-keys").write_text("")
    assert cli.main(["config", "check"]) == 2
    assert "api-keys" in capsys.readouterr().err


def test_nobody_is_trusted_by_address(settings: Settings) -> None:
    assert settings.trusted_nodes == ()


# --- they agree with each other ----------------------------------------------------------------------


def test_selectors_find_the_pods() -> None:
    selectors = [
        the("Deployment")["spec"]["selector"]["matchLabels"],
        the("Service")["spec"]["selector"],
        the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        the("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        the("NetworkPolicy", "evenhand-prometheus", among=EXTRA)["spec"]["podSelector"]["matchLabels"],
        the("PodMonitor", among=EXTRA)["spec"]["selector"]["matchLabels"],
        *(spread["labelSelector"]["matchLabels"] for spread in POD["spec"]["topologySpreadConstraints"]),
    ]
    assert selectors == [LABELS] * 8


def test_ports_are_those_that_are_listened_on(settings: Settings) -> None:
    assert MAIN["ports"] == [{"name": "http", "containerPort": settings.server_port}]
    assert [port["targetPort"] for port in the("Service")["spec"]["ports"]] == ["http"]
    for policy in (the("NetworkPolicy"), the("NetworkPolicy", "evenhand-prometheus", among=EXTRA)):
        (rule,) = policy["spec"]["ingress"]
        assert rule["ports"] == [{"protocol": "TCP", "port": "http"}]
    (scraped,) = the("PodMonitor", among=EXTRA)["spec"]["podMetricsEndpoints"]
    assert scraped["port"] == "http"


def test_engines_are_found_and_reached(settings: Settings) -> None:
    (source,) = settings.sources
    assert isinstance(source, DnsSource)
    service = the("Service", source.host)
    assert service["spec"]["clusterIP"] == "None", "one with an address would be one node"
    assert [port["port"] for port in service["spec"]["ports"]] == [source.port]
    (rule,) = [r for r in the("NetworkPolicy")["spec"]["egress"] if r["ports"][0]["port"] == source.port]
    assert [to["podSelector"]["matchLabels"] for to in rule["to"]] == [service["spec"]["selector"]]
    (engine,) = [r["spec"]["template"] for r in in_pages() if r["kind"] == "Deployment"]
    assert service["spec"]["selector"].items() <= engine["metadata"]["labels"].items()
    assert not LABELS.items() <= engine["metadata"]["labels"].items(), "it would be behind both services"
    (container,) = engine["spec"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [source.port]
    left_out_s, ends = 30 + source.interval_s, engine["spec"]["terminationGracePeriodSeconds"]
    sleeps = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert left_out_s + settings.grace_s <= sleeps < ends, "an engine outlives its drain"


def test_names_and_redis_are_reached() -> None:
    rules = the("NetworkPolicy")["spec"]["egress"]
    ports = {(port["protocol"], port["port"]) for rule in rules for port in rule["ports"]}
    assert ports == {("UDP", 53), ("TCP", 53), ("TCP", 6379), ("TCP", 8000)}
    assert the("NetworkPolicy")["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_pods_are_moved_one_after_another() -> None:
    assert the("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert the("HorizontalPodAutoscaler")["spec"]["minReplicas"] >= 2
    assert the("Deployment")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


# --- how many pods -----------------------------------------------------------------------------------


def adapter_rule() -> dict[str, Any]:
    (rule,) = yaml.safe_load((MONITORING / "adapter-values.yaml").read_text())["rules"]["external"]
    found: dict[str, Any] = rule
    return found


def test_the_autoscaler_goes_by_a_metric_that_the_adapter_makes_of_ours() -> None:
    scaler = the("HorizontalPodAutoscaler")["spec"]
    deployment = the("Deployment")
    target = {"apiVersion": deployment["apiVersion"], "kind": "Deployment", "name": deployment["metadata"]["name"]}
    assert scaler["scaleTargetRef"] == target
    assert "replicas" not in deployment["spec"], "each apply would set them back"
    external, resource = scaler["metrics"]
    assert external["external"]["metric"] == {"name": adapter_rule()["name"]["as"]}
    assert external["external"]["target"]["type"] == "AverageValue", "it is of all pods"
    assert resource["resource"]["name"] in MAIN["resources"]["requests"], "a share of nothing is unknown"
    (family,) = [family for family in FAMILIES if family.name == adapter_rule()["seriesQuery"]]
    assert "node" in family.labels


def test_the_adapter_counts_each_running_request_once(tmp_path: Path) -> None:
    """Two pods tell the same of two nodes; another namespace has a deployment of its own."""
    query = adapter_rule()["metricsQuery"]
    query = query.replace("<<.Series>>", adapter_rule()["seriesQuery"])
    query = query.replace("<<.LabelMatchers>>", 'namespace="evenhand"')
    series = [
        ("evenhand", "a", "http://1", 400),
        ("evenhand", "b", "http://1", 400),
        ("evenhand", "a", "http://2", 300),
        ("evenhand", "b", "http://2", 310),
        ("other", "c", "http://1", 50),
    ]
    told = [
        {"series": f'evenhand_node_unfinished{{namespace="{of}",pod="{pod}",node="{node}"}}', "values": str(value)}
        for of, pod, node, value in series
    ]
    expected = [{"labels": "{}", "value": 710}]
    case = {
        "input_series": told,
        "promql_expr_test": [{"expr": query, "eval_time": "0m", "exp_samples": expected}],
    }
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": [], "tests": [case]}))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "test.yml")
