"""The files of `launch` before what would read them: schemas of Kubernetes, Kubeflow and SkyPilot, and a real Ray.

    pip install kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0 skypilot==0.14.1 'ray[default]==2.60.0'
    python bench/launch_engines.py [--ray PYTHON] [--markdown FILE]

Job, Service and ConfigMap are validated strictly against the schemas of Kubernetes 1.37. TrainJob and JobSet are read
by the models of Kubeflow's own package and must come out as they went in, which finds fields that they do not know.
A task is read by SkyPilot. PYTHON is an interpreter with triweave and torch: then a cluster of two Ray nodes is started
on this machine, and the driver trains a tiny model on it, is told to stop, is killed, and goes on. Each file is also
shown with a planted fault.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from launching import resolved_run, settings  # noqa: E402

from triweave.launch import kubernetes, ray, skypilot  # noqa: E402

Document = dict[str, Any]
Check = Callable[[Document], str]
"""Says what is wrong with a document; nothing is nothing."""

KUBERNETES = "1.37"
CLUSTERS = ("4x8xh100-80gb", "1x8xh200-141gb", "8x4xgb200-186gb", "4x8xcpu")


def built_in(document: Document) -> str:
    """Kubernetes' own kinds."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def custom(document: Document) -> str:
    """Kubeflow's and JobSet's kinds, by the models of kubeflow-trainer-api."""
    from kubeflow_trainer_api import models

    names = {"TrainJob": "TrainerV1alpha1TrainJob", "JobSet": "JobsetV1alpha2JobSet"}
    try:
        model = getattr(models, names[document["kind"]]).from_dict(copy.deepcopy(document))
        back = json.loads(model.to_json())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "" if back == document else f"unknown fields: {_lost(document, back)}"


def _lost(given: Any, back: Any, at: str = "") -> str:
    if isinstance(given, dict) and isinstance(back, dict):
        missing = [f"{at}.{key}" for key in given if key not in back]
        deeper = [
            _lost(given[key], back[key], f"{at}.{key}") for key in given if key in back and given[key] != back[key]
        ]
        return ", ".join([*missing, *deeper])
    if isinstance(given, list) and isinstance(back, list):
        return ", ".join(_lost(one, other, f"{at}[]") for one, other in zip(given, back, strict=False) if one != other)
    return at


def sky_task(document: Document) -> str:
    """SkyPilot's task, by its own reader."""
    import sky

    try:
        sky.Task.from_yaml_config(document)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def manifests() -> list[tuple[str, Document, Check]]:
    """Every document of every kind on every cluster, with what checks it."""
    found = []
    for cluster in CLUSTERS:
        run = resolved_run(cluster=cluster, layout__tp="4", layout__pp="2")
        for kind in ("job", "jobset", "trainjob"):
            (text,) = kubernetes.files(run, settings(kind=kind, restarts=2)).values()
            for document in yaml.safe_load_all(text):
                check = custom if document["kind"] in ("JobSet", "TrainJob") else built_in
                found.append((f"{document['kind']} on {cluster}", document, check))
    return found


FAULTS: dict[str, Callable[[Document], object]] = {
    "Job": lambda job: job["spec"].update(completion=4),
    "ConfigMap": lambda one: one.update(datum={}),
    "Service": lambda one: one["spec"].update(selectors={}),
    "JobSet": lambda job: job["spec"].update(maxRestarts=1),
    "TrainJob": lambda job: job["spec"]["trainer"].update(numNode=4),
    "task": lambda task: task.update(num_node=4),
}


def judged() -> list[tuple[str, str, str]]:
    """Rows: what, what is wrong with it, what a planted fault got."""
    cases = manifests()
    for cluster in CLUSTERS:
        (text,) = skypilot.files(resolved_run(cluster=cluster, layout__tp="4", layout__pp="2"), settings()).values()
        cases.append((f"task on {cluster}", yaml.safe_load(text), sky_task))
    rows = []
    for name, document, check in cases:
        broken = copy.deepcopy(document)
        FAULTS[name.partition(" ")[0]](broken)
        rows.append((name, check(copy.deepcopy(document)) or "nothing", check(broken) or "NOT SEEN"))
    return rows


RUN_FILE = """\
model: {path: model, dtype: float32, weights: random}
cluster: 2x2xcpu
layout: {tp: 2, pp: 2}
data: {train: train.txt, validation: 0, seq_len: 64, format: text, too_long: split}
train: {steps: 90, global_batch: 8}
optimizer: {warmup_steps: 2}
checkpoint: {export: false}
runtime: {device: cpu}
output_dir: out
"""


def ray_run(python: str) -> list[tuple[str, str]]:
    """Train a tiny model on two Ray nodes of this machine: stop it in the middle, and let it go on to the end."""
    from triweave.config.load import load_run
    from triweave.config.validate import validate
    from triweave.launch.job import Settings

    ray_words = Path(sys.executable).parent / "ray"
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{ray_words.parent}{os.pathsep}{os.environ['PATH']}",
    }
    said = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); from command_line import make_workspace; "
        subprocess.run([python, "-c", f"{make}from pathlib import Path; make_workspace(Path({name!r}))"], check=True)
        (folder / "train.txt").write_text("One two three four five six seven eight nine ten. " * 4000)
        (folder / "run.yaml").write_text(RUN_FILE)
        with contextlib.chdir(folder):
            run = validate(load_run(folder / "run.yaml"), dry=True)
        for file, text in ray.files(run, Settings("run.yaml", name, python=python)).items():
            (folder / file).write_text(text)
        cluster = subprocess.Popen([sys.executable, "-c", TWO_NODES], env=environment, stdout=-1, stdin=-1, text=True)
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        environment["RAY_ADDRESS"] = address
        try:
            driver = [sys.executable, "out.ray.py"]
            first = subprocess.Popen(driver, cwd=folder, env=environment)
            _wait(lambda: _steps(folder) >= 10)
            first.terminate()
            said.append(("driver told to stop (SIGTERM) after 10 steps: exit code", str(first.wait(timeout=120))))
            at = json.loads((folder / "out" / "stopped.json").read_text())["step"]
            said.append(("saved and stopped at step", str(at)))
            killed = subprocess.Popen(driver, cwd=folder, env=environment)
            _wait(lambda: _steps(folder) >= at + 10)
            killed.kill()
            _wait((folder / "out" / "stopped.json").exists)
            said.append(("driver killed: the ranks saved and stopped by themselves at step", _stopped(folder)))
            _wait(lambda: not _locked(folder))
            last = subprocess.run(driver, check=False, cwd=folder, env=environment, timeout=300)
            said.append(("started again: exit code", str(last.returncode)))
            said.append(("steps done", str(_steps(folder))))
        finally:
            cluster.communicate("end\n", timeout=60)
    return said


TWO_NODES = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
cluster.add_node(num_cpus=4)
print(cluster.address, flush=True)
input()
cluster.shutdown()
"""


def _stopped(folder: Path) -> str:
    return str(json.loads((folder / "out" / "stopped.json").read_text())["step"])


def _steps(folder: Path) -> int:
    path = folder / "out" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)


def _locked(folder: Path) -> bool:
    return (folder / "out" / "lock.json").exists()


def _wait(done: Callable[[], bool], limit_s: float = 200) -> None:
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            raise SystemExit("nothing happened for too long")
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ray")
    parser.add_argument("--markdown", type=Path)
    chosen = parser.parse_args()
    rows = judged()
    lines = [
        "# Files of `launch` before the engines' own schemas",
        "",
        "Made by `python bench/launch_engines.py --ray PYTHON --markdown FILE`.",
        "",
        "| file | wrong with it | with a misspelt field |",
        "|---|---|---|",
        *(f"| {name} | {wrong} | {fault.replace('|', chr(92) + '|')[:100]} |" for name, wrong, fault in rows),
        "",
    ]
    if chosen.ray is not None:
        lines += ["## Ray, two nodes on one machine, four ranks", "", "| what | came out |", "|---|---|"]
        lines += [f"| {what} | {out} |" for what, out in ray_run(chosen.ray)] + [""]
    print("\n".join(lines))
    if chosen.markdown is not None:
        chosen.markdown.write_text("\n".join(lines), encoding="utf-8")
    return 0 if all(wrong == "nothing" and fault != "NOT SEEN" for _, wrong, fault in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
