"""Kubernetes and SkyPilot: every rule that their servers would check and this machine cannot ask them for."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from launching import check_bash, resolved_run, settings

from triweave.config.validate import ResolvedRun
from triweave.errors import InputError
from triweave.launch import kubernetes, skypilot

RUN = resolved_run()
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
KINDS = {
    "ConfigMap": "v1",
    "Service": "v1",
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
FIELDS = {
    "ConfigMap": {"apiVersion", "kind", "metadata", "data"},
    "Service": {"apiVersion", "kind", "metadata", "spec"},
    "job": {"completionMode", "completions", "parallelism", "backoffLimit", "podFailurePolicy", "template"},
    "pod": {"restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes", "subdomain"},
    "container": {"name", "image", "command", "env", "volumeMounts", "resources", "securityContext"},
    "jobset": {"network", "failurePolicy", "replicatedJobs"},
    "trainjob": {"runtimeRef", "trainer", "runtimePatches"},
    "trainer": {"image", "command", "numNodes", "numProcPerNode", "resourcesPerNode"},
}
"""What of each object is written; a field of another name is a misspelt one."""


def manifest(kind: str, run: ResolvedRun = RUN, **changed: object) -> list[dict[str, Any]]:
    """The documents of a manifest."""
    (text,) = kubernetes.files(run, settings(kind=kind, **changed)).values()
    return list(yaml.safe_load_all(text))


def problems(documents: list[dict[str, Any]]) -> list[str]:
    """What a server of the kinds, or their webhooks, would refuse."""
    return [problem for document in documents for problem in _document(document)]


def _document(document: dict[str, Any]) -> Iterator[str]:
    kind = document.get("kind")
    if KINDS.get(str(kind)) != document.get("apiVersion"):
        yield f"{kind}: apiVersion"
        return
    name = document["metadata"]["name"]
    if not LABEL.fullmatch(name) or name[0].isdigit():
        yield f"{kind}: name"
    if kind == "Job":
        yield from _job(document["spec"], name, f"{name}-{{}}")
    elif kind == "JobSet":
        spec = document["spec"]
        yield from _fields("jobset", spec)
        if spec["failurePolicy"]["maxRestarts"] < 0:
            yield "jobset: maxRestarts"
        for one in spec["replicatedJobs"]:
            yield from _job(one["template"]["spec"], spec["network"]["subdomain"], f"{name}-{one['name']}-0-{{}}")
    elif kind == "TrainJob":
        yield from _train_job(document["spec"])


def _fields(what: str, given: dict[str, Any]) -> Iterator[str]:
    for field in given.keys() - FIELDS[what]:
        yield f"{what}: {field} is no field"


def _job(spec: dict[str, Any], subdomain: str, pod_name: str) -> Iterator[str]:
    yield from _fields("job", spec)
    if spec["completionMode"] != "Indexed":
        yield "job: completionMode"
    if spec["completions"] != spec["parallelism"] or spec["completions"] < 1:
        yield "job: all pods must run at once"
    if spec["backoffLimit"] < 0:
        yield "job: backoffLimit"
    pod = spec["template"]["spec"]
    if pod["restartPolicy"] != "Never":
        yield "job: podFailurePolicy needs restartPolicy Never"
    names = [container["name"] for container in pod["containers"]]
    for rule in spec["podFailurePolicy"]["rules"]:
        if rule["action"] not in ("Ignore", "FailJob", "Count", "FailIndex"):
            yield "job: action"
        if "onExitCodes" in rule and (
            rule["onExitCodes"]["containerName"] not in names or 0 in rule["onExitCodes"]["values"]
        ):
            yield "job: onExitCodes"
    last = pod_name.format(spec["completions"] - 1)
    if not LABEL.fullmatch(last):
        yield "job: the name of its last pod"
    masters = [env["value"] for one in pod["containers"] for env in one["env"] if env["name"] == "MASTER_ADDR"]
    if masters != [f"{pod_name.format(0)}.{subdomain}"]:
        yield "job: the master is not its first pod"
    yield from _pod(pod)


def _pod(pod: dict[str, Any]) -> Iterator[str]:
    yield from _fields("pod", pod)
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        yield from _fields("container", container)
        for mount in container["volumeMounts"]:
            if mount["name"] not in volumes:
                yield f"pod: no volume {mount['name']}"
            if not mount["mountPath"].startswith("/") or ":" in mount["mountPath"]:
                yield "pod: mountPath"
        if any(not isinstance(env["value"], str) for env in container.get("env", [])):
            yield "pod: a variable's value is a text"
        if "image" not in container:
            yield "pod: image"
        yield from _resources(container.get("resources", {}))
    if pod["terminationGracePeriodSeconds"] < 1:
        yield "pod: terminationGracePeriodSeconds"


def _resources(resources: dict[str, Any]) -> Iterator[str]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    if requests.get("nvidia.com/gpu") != limits.get("nvidia.com/gpu"):
        yield "resources: GPUs cannot be overcommitted"
    if any(not isinstance(number, int) or number < 1 for number in limits.values()):
        yield "resources: quantity"


def _train_job(spec: dict[str, Any]) -> Iterator[str]:
    yield from _fields("trainjob", spec)
    yield from _fields("trainer", spec["trainer"])
    if not spec["runtimeRef"].get("name"):
        yield "trainjob: runtimeRef"
    if not isinstance(spec["trainer"]["numProcPerNode"], int) or spec["trainer"]["numNodes"] < 1:
        yield "trainjob: sizes"
    yield from _resources(spec["trainer"].get("resourcesPerNode", {}))
    for patch in spec["runtimePatches"]:
        if not patch.get("manager"):
            yield "trainjob: manager"
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            pod = job["template"]["spec"]["template"]["spec"]
            volumes = {volume["name"] for volume in pod["volumes"]}
            for container in pod["containers"]:
                if container.keys() - {"name", "env", "volumeMounts", "securityContext"}:
                    yield "trainjob: a patch cannot change that"
                if any(mount["name"] not in volumes for mount in container["volumeMounts"]):
                    yield "trainjob: no such volume"


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("cluster", ["4x8xh100-80gb", "4x8xcpu"])
def test_manifest_is_legal(kind: str, cluster: str) -> None:
    """Every kind, on GPUs and without, keeps the rules of its server."""
    assert problems(manifest(kind, resolved_run(cluster=cluster), restarts=2)) == []


def _set(path: str, value: object) -> Callable[[list[dict[str, Any]]], None]:
    def change(documents: list[dict[str, Any]]) -> None:
        *parents, last = [int(part) if part.lstrip("-").isdecimal() else part for part in path.split("/")]
        at: Any = documents
        for part in parents:
            at = at[part]
        at[last] = value

    return change


POD = "-1/spec/template/spec"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_set("-1/apiVersion", "batch/v2"), "apiVersion"),
        (_set("-1/metadata/name", "Tw_Job"), "name"),
        (_set("-1/spec/completionMode", "Index"), "completionMode"),
        (_set("-1/spec/parallelism", 2), "at once"),
        (_set("-1/spec/completion", 4), "no field"),
        (_set(f"{POD}/restartPolicy", "Always"), "restartPolicy"),
        (_set(f"{POD}/containers/0/env/1/value", "elsewhere"), "first pod"),
        (_set(f"{POD}/containers/0/env/2/value", 29500), "text"),
        (_set(f"{POD}/containers/0/volumeMounts/0/name", "nowhere"), "no volume"),
        (_set(f"{POD}/containers/0/resources/limits", {"nvidia.com/gpu": 4}), "overcommitted"),
        (_set(f"{POD}/terminationGracePeriodSeconds", 0), "terminationGracePeriodSeconds"),
        (_set("-1/spec/podFailurePolicy/rules/0/onExitCodes/values", [0]), "onExitCodes"),
        (_set("-1/spec/podFailurePolicy/rules/0/action", "Forgive"), "action"),
    ],
)
def test_broken_manifest_is_seen(change: Callable[[list[dict[str, Any]]], None], found: str) -> None:
    """The rules above find one planted fault each."""
    documents = copy.deepcopy(manifest("job"))
    change(documents)
    assert any(found in problem for problem in problems(documents))


def test_stop_is_no_failure() -> None:
    """A pod that stopped on request, or was asked to go, does not count against the Job, and has time to save."""
    (job,) = [document for document in manifest("job") if document["kind"] == "Job"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {"Ignore"} == {rule["action"] for rule in rules}
    assert rules[0]["onExitCodes"]["values"] == [75]
    assert rules[1]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 120


def test_script_and_run_file_travel_along() -> None:
    """The ConfigMap holds a script that bash reads, and the run file that it names."""
    (found,) = [document for document in manifest("job") if document["kind"] == "ConfigMap"]
    check_bash(found["data"]["run.sh"])
    assert "-m triweave train /etc/triweave/run.yaml" in found["data"]["run.sh"]
    assert yaml.safe_load(found["data"]["run.yaml"])["layout"]["tp"] == 8


def test_trainjob_leaves_the_runtime_its_variables() -> None:
    """TrainJob's webhook refuses PET_ variables: they are read and not set."""
    (job,) = [document for document in manifest("trainjob") if document["kind"] == "TrainJob"]
    assert "env" not in job["spec"]["trainer"]
    assert "$PET_NODE_RANK" in job["spec"]["trainer"]["command"][2]


@pytest.mark.parametrize(
    ("key", "value"), [("name", "Llama"), ("name", "a" * 46), ("claim", "my claim"), ("image", "a b")]
)
def test_names_that_kubernetes_refuses_are_refused(key: str, value: str) -> None:
    """A name that no server takes is refused before a file is made."""
    with pytest.raises(InputError, match=f"--{key}"):
        manifest("job", **{key: value})


def test_skypilot_task_is_sized_and_stops_well() -> None:
    """Nodes and GPUs are the plan's; a stop with everything saved is recovered from, and counts as no error."""
    (text,) = skypilot.files(RUN, settings(restarts=3)).values()
    task = yaml.safe_load(text)
    assert task["num_nodes"] == 4
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    check_bash(task["run"])


def test_skypilot_run_file_is_the_run() -> None:
    """The run file in the script is closed by a word of its own, whatever the run file holds."""
    run = resolved_run(output_dir="END_OF_RUN_FILE")
    (text,) = skypilot.files(run, settings(name="x")).values()
    check_bash(yaml.safe_load(text)["run"])
