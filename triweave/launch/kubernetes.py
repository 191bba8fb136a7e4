"""Kubernetes: an indexed Job, a JobSet, or Kubeflow's TrainJob: one pod a node, with the script that it runs."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

from triweave.config.document import to_yaml
from triweave.config.validate import ResolvedRun
from triweave.errors import InputError, Problem
from triweave.launch.job import Job, Settings, make_job
from triweave.launch.shell import Node, comment, node_script, summary
from triweave.launch.yaml_text import dump

MOUNT = "/etc/triweave"
PORT = 29500
STOPPED = 75
MOST_NAME = 45
"""Characters of a name: pods get a suffix, and 63 are all that a host name may have."""
JOIN_S = 3600
"""In which all pods must have come: the last may still pull its image."""
FIELD = "JOB_COMPLETION_INDEX"
"""The number of a pod, which Kubernetes gives every pod of an indexed Job."""
API_VERSIONS = {"job": "batch/v1", "jobset": "jobset.x-k8s.io/v1alpha2", "trainjob": "trainer.kubeflow.org/v1alpha1"}


def files(resolved: ResolvedRun, settings: Settings) -> dict[str, str]:
    """The manifest, by its name.

    Raises:
        InputError: as `make_job`; no image or claim; a name that Kubernetes refuses.
    """
    job = make_job(resolved, settings)
    problems = [
        Problem(key, None, rule)
        for key, value, rule in (
            ("--image", settings.image, "is needed: a container image with triweave in it"),
            ("--claim", settings.claim, "is needed: the PersistentVolumeClaim of model, data and checkpoints"),
        )
        if value is None
    ]
    problems += _name_problems("--name", job.name, MOST_NAME)
    problems += _name_problems("--claim", settings.claim or "x", 253)
    if settings.image is not None and re.search(r"\s", settings.image):
        problems.append(Problem("--image", repr(settings.image), "must hold no blanks"))
    if problems or settings.image is None or settings.claim is None:
        raise InputError(problems)
    pod = _pod(job, settings.image, settings.claim)
    body = {"job": _job, "jobset": _job_set, "trainjob": _train_job}[settings.kind](job, settings, pod)
    head = [
        *summary(resolved, job),
        *comment(
            "A pod that is asked to go (SIGTERM) has the run saved: exit code 75, which counts as no failure. Shared"
            " memory is the host's, not 64 MiB. IPC_LOCK lets InfiniBand pin memory."
        ),
    ]
    return {f"{job.name}.yaml": dump(*([_config_map(resolved, settings, job)]), *body, head=head)}


def command(resolved: ResolvedRun, settings: Settings, folder: str) -> str:
    """What submits it."""
    job = make_job(resolved, settings)
    return f"kubectl apply -f {shlex.quote(f'{folder}/{job.name}.yaml')}"


def _name_problems(key: str, name: str, most: int) -> list[Problem]:
    if len(name) <= most and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        return []
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:most].strip("-")
    rule = f"must be a DNS label of at most {most} characters: a-z, 0-9 and -, a letter first"
    return [Problem(key, repr(name), rule, plain or "run")]


def _config_map(resolved: ResolvedRun, settings: Settings, job: Job) -> dict[str, Any]:
    """The run file with every key, and the script of a node."""
    in_pod = make_job(resolved, _in_pod(settings))
    head = comment("Run by every pod, with NODE_RANK, MASTER_ADDR and MASTER_PORT.")
    script = node_script(resolved, in_pod, settings.python, Node(head=head, join_s=JOIN_S))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job.name},
        "data": {"run.yaml": to_yaml(resolved.run), "run.sh": script},
    }


def _in_pod(settings: Settings) -> Settings:
    # The file in the ConfigMap holds what the words of the command line have changed.
    return replace(settings, run_file=f"{MOUNT}/run.yaml", overrides=())


def _pod(job: Job, image: str, claim: str) -> dict[str, Any]:
    """The pod of one node; `volumes` and `mounts` are also what a TrainJob patches its runtime with."""
    container: dict[str, Any] = {
        "name": "node",
        "image": image,
        "command": ["bash", f"{MOUNT}/run.sh"],
        "env": [],
        "volumeMounts": [
            {"name": "run", "mountPath": MOUNT},
            {"name": "work", "mountPath": job.workdir},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - where it has to be
        ],
    }
    if job.gpu:
        gpus = {"nvidia.com/gpu": job.gpus_per_node}
        container["resources"] = {"requests": dict(gpus), "limits": gpus}
        if job.num_nodes > 1:
            container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.warning_s,
        "containers": [container],
        "volumes": [
            {"name": "run", "configMap": {"name": job.name}},
            {"name": "work", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _environment(master: str) -> list[dict[str, Any]]:
    return [
        {"name": "NODE_RANK", "value": f"$({FIELD})"},
        {"name": "MASTER_ADDR", "value": master},
        {"name": "MASTER_PORT", "value": str(PORT)},
    ]


def _indexed(job: Job, pod: dict[str, Any], backoff: int) -> dict[str, Any]:
    """The spec of an indexed Job with one pod a node."""
    return {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimit": backoff,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onExitCodes": {"containerName": "node", "operator": "In", "values": [STOPPED]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }


def _job(job: Job, settings: Settings, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """A headless Service that names the pods, and the Job. Kubernetes fills $(JOB_COMPLETION_INDEX) in."""
    pod["subdomain"] = job.name
    pod["containers"][0]["env"] = _environment(f"{job.name}-0.{job.name}")
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            # The ranks look for one another before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
        },
    }
    # One crash ends the pods of all nodes, and each of them counts.
    spec = _indexed(job, pod, settings.restarts * job.num_nodes)
    return [service, {"apiVersion": API_VERSIONS["job"], "kind": "Job", "metadata": {"name": job.name}, "spec": spec}]


def _job_set(job: Job, settings: Settings, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """A JobSet of one Job: after a crash all of its pods are made anew together."""
    pod["containers"][0]["env"] = _environment(f"{job.name}-node-0-0.{job.name}")
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
        "failurePolicy": {"maxRestarts": settings.restarts},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": _indexed(job, pod, 0)}}],
    }
    return [{"apiVersion": API_VERSIONS["jobset"], "kind": "JobSet", "metadata": {"name": job.name}, "spec": spec}]


def _train_job(job: Job, settings: Settings, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """A TrainJob on the runtime `torch-distributed`, whose PET_ variables say where a node is."""
    container = pod["containers"][0]
    told = {"NODE_RANK": "PET_NODE_RANK", "MASTER_ADDR": "PET_MASTER_ADDR", "MASTER_PORT": "PET_MASTER_PORT"}
    words = " ".join(f'{ours}="${theirs}"' for ours, theirs in told.items())
    trainer: dict[str, Any] = {
        "image": container["image"],
        "command": ["bash", "-c", f"{words} exec bash {MOUNT}/run.sh"],
        "numNodes": job.num_nodes,
        "numProcPerNode": job.gpus_per_node,
    }
    if "resources" in container:
        trainer["resourcesPerNode"] = container["resources"]
    patched: dict[str, Any] = {"name": "node", "volumeMounts": container["volumeMounts"]}
    if "securityContext" in container:
        patched["securityContext"] = container["securityContext"]
    patch = {
        "terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
        "volumes": pod["volumes"],
        "containers": [patched],
    }
    runtime = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": patch}}}}]}
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [{"manager": "triweave.dev/launch", "trainingRuntimeSpec": {"template": {"spec": runtime}}}],
    }
    return [{"apiVersion": API_VERSIONS["trainjob"], "kind": "TrainJob", "metadata": {"name": job.name}, "spec": spec}]
