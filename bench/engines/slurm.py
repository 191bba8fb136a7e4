"""The sbatch file of `triweave launch` on a real Slurm: five hosts with made-up GPUs, four of them in the job, gloo.

python bench/engines/slurm.py                           # as root; 4 hosts x 8 ranks, the file of a 4x8 cluster
python bench/engines/slurm.py --gpus 2                  # 8 ranks

Needs slurmctld, slurmd, munged and the client (Debian: slurmctld slurmd slurm-client munge). Four jobs of one run:
left alone; warned before its time limit, saved and requeued; and with the plug of a host pulled, once the last and once
the batch host, requeued by Slurm onto the spare. All must end with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hosts import HEAD, NET, Hosts, obstacle
from job import environment, make_files, write_run

NODES, SPARE = 4, 1
EVERY, WARNING_S = 5, 60
PATIENCE_S = 900
"""For one state of a job: 32 ranks need a minute on two cores until all have met."""

CONF = """\
ClusterName=test
SlurmctldHost={head}({net}.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdTimeout=10
KillWait=5
MessageTimeout=10
ReturnToService=1
MpiDefault=none
EnforcePartLimits=ALL
NodeName=h[1-{hosts}] CPUs=64 RealMemory=1000000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A controller on the head, a daemon on every host."""

    def __init__(self, hosts: Hosts, folder: Path, gpus: int) -> None:
        self.hosts, self.folder, self.gpus = hosts, folder, gpus
        self.env = {**environment(), "SLURM_CONF": str(folder / "slurm.conf")}
        # The interpreter's own folder first: the file calls `python`.
        self.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the daemons and wait until every host is idle."""
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for number in range(self.gpus):
            # Slurm counts devices, not what they do: these are /dev/null.
            subprocess.run(("mknod", folder / f"gpu{number}", "c", "1", "3"), check=True)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        devices = f"{folder}/gpu[0-{self.gpus - 1}]"
        (folder / "gres.conf").write_text(f"NodeName=h[1-{self.hosts.count}] Name=gpu File={devices}\n")
        conf = CONF.format(head=HEAD, net=NET, folder=folder, hosts=self.hosts.count, gpus=self.gpus)
        (folder / "slurm.conf").write_text(conf)
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        words = [f"--{option}={folder / name}" for option, name in files.items()]
        with (folder / "munged.out").open("wb") as out:
            munged = subprocess.Popen(("munged", "--force", "--foreground", *words), stdout=out, stderr=out)
        try:
            wait_until((folder / "munge.sock").exists, 30)
            self.daemon(HEAD, "slurmctld")
            for number in range(1, self.hosts.count + 1):
                self.daemon(f"h{number}", "slurmd")
            wait_until(lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * self.hosts.count, 120)
            yield
        finally:
            munged.kill()
            munged.wait()

    def daemon(self, name: str, program: str) -> None:
        """Start slurmctld or slurmd in a host."""
        out = self.folder / f"{program}-{name}.out"
        self.hosts.start(name, (program, "-D"), cwd=self.folder, env=self.env, out=out)

    def plug_in(self, name: str) -> None:
        """Start a host again after its plug was pulled, and wait until Slurm has it back."""
        self.daemon(name, "slurmd")
        wait_until(lambda: self.ask("sinfo", "-h", "-n", name, "-o", "%T").strip() == "idle", 120)

    def ask(self, *words: str, cwd: Path | None = None) -> str:
        """What a client says on the head."""
        command = ("ip", "netns", "exec", self.hosts.space(HEAD), *words)
        done = subprocess.run(command, cwd=cwd, env=self.env, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout + done.stderr

    def state(self, job: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        words = self.ask("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def wait_until(condition: Callable[[], bool], within_s: float) -> None:
    """Ask twice a second.

    Raises:
        TimeoutError: it does not come true.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:.0f} s")
        time.sleep(0.5)


def steps_of(gpus: int) -> int:
    """Steps of the run: of few ranks they are short, and the warning must find it running."""
    return 480 // gpus


def submit(slurm: Slurm, folder: Path, name: str, gpus: int) -> str:
    """Write the run and its sbatch file, and submit it; returns the job's number."""
    write_run(
        folder,
        name,
        cluster={},
        data={"seq_len": 64, "packing": False},
        layout={"tp": 2, "pp": NODES},
        train={"steps": steps_of(gpus), "global_batch": 8 * gpus // 2},
        checkpoint={"every_steps": EVERY, "export": True},
    )
    path = folder / f"{name}.yaml"
    path.write_text(path.read_text().replace('"cluster": {}', f'"cluster": "{NODES}x{gpus}xh100-80gb"'))
    launch = ("launch", path.name, "--to", "slurm", "--time-limit", "01:00:00", "--warning", str(WARNING_S), "--force")
    command = (sys.executable, "-m", "triweave", *launch)
    subprocess.run(command, cwd=folder, env=slurm.env, check=True, capture_output=True, timeout=300)
    (folder / name).mkdir(exist_ok=True)
    answer = slurm.ask("sbatch", "--parsable", f"{name}.sbatch", cwd=folder)
    if not answer.strip().isdecimal():
        raise RuntimeError(answer)
    return answer.strip()


def steps_done(folder: Path, name: str) -> int:
    """Lines of the metrics so far."""
    path = folder / name / "metrics.jsonl"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def finish(slurm: Slurm, folder: Path, name: str, job: str, steps: int) -> str:
    """Wait for the end of a job; a row of how it came out."""
    ended = ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED")
    begun = time.monotonic()
    wait_until(lambda: slurm.state(job).get("JobState") in ended, PATIENCE_S)
    state = slurm.state(job)
    weights = folder / name / "hf" / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:12] if weights.exists() else "none"
    log = "".join(path.read_text(encoding="utf-8") for path in (folder / name).glob("slurm-*.out"))
    told = [" ".join(found) for found in re.findall(r"(resumed|stopped) +at step (\d+)", log)]
    ended_as = f"{state['JobState']}, restarts {state['Restarts']}, hosts {state['NodeList']}"
    done = f"{steps_done(folder, name)} of {steps}"
    return f"| {name} | {ended_as} | {done} | {', '.join(told)} | {digest} | {time.monotonic() - begun:.0f} s |"


def warned(slurm: Slurm, folder: Path, gpus: int) -> str:
    """A time limit that the run does not keep: warned, saved, requeued, finished."""
    job = submit(slurm, folder, "warned", gpus)
    wait_until(lambda: steps_done(folder, "warned") > EVERY, PATIENCE_S)
    # How long a step takes here nobody knows before: the limit is brought forward, to the second minute that ends.
    hours, minutes, seconds = map(int, slurm.state(job)["RunTime"].split(":"))
    limit = -(-(3600 * hours + 60 * minutes + seconds + WARNING_S // 2) // 60)
    slurm.ask("scontrol", "update", f"jobid={job}", f"TimeLimit={limit}")
    wait_until(lambda: int(slurm.state(job).get("Restarts", "0")) > 0, PATIENCE_S)
    # What is left may take its time.
    slurm.ask("scontrol", "update", f"jobid={job}", "TimeLimit=60")
    return finish(slurm, folder, "warned", job, steps_of(gpus))


def unplugged(slurm: Slurm, folder: Path, gpus: int) -> str:
    """The plug of the job's last host is pulled after a checkpoint: Slurm requeues the job onto the spare."""
    return _unplugged(slurm, folder, "unplugged", gpus, lambda job: f"h{NODES}")


def batch_host_unplugged(slurm: Slurm, folder: Path, gpus: int) -> str:
    """The same of the host on which the batch script runs, and rank 0."""
    return _unplugged(slurm, folder, "batch_host_unplugged", gpus, lambda job: slurm.state(job)["BatchHost"])


def _unplugged(slurm: Slurm, folder: Path, name: str, gpus: int, host_of: Callable[[str], str]) -> str:
    job = submit(slurm, folder, name, gpus)
    # A checkpoint is written beside training: the first is whole when the second is begun.
    wait_until(lambda: steps_done(folder, name) > 2 * EVERY, PATIENCE_S)
    host = host_of(job)
    slurm.hosts.unplug(host)
    row = finish(slurm, folder, name, job, steps_of(gpus))
    slurm.plug_in(host)
    return row


def alone(slurm: Slurm, folder: Path, gpus: int) -> str:
    """Nothing happens to it."""
    return finish(slurm, folder, "alone", submit(slurm, folder, "alone", gpus), steps_of(gpus))


def main() -> int:
    """Run the four jobs; returns 1 if weights differ, or one did not end well or go on from its checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8, help="of a host: 2 or 8")
    options = parser.parse_args()
    if reason := obstacle("slurmctld", "slurmd", "sbatch", "munged", "mknod"):
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 2
    rows = []
    print("| job | how it ended | steps | told | weights | waited |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="triweave-slurm-") as name, Hosts(NODES + SPARE) as hosts:
        folder = Path(name)
        make_files(folder, hidden=32, layers=4, heads=4, seq=64)
        slurm = Slurm(hosts, folder / "slurm", options.gpus)
        with slurm.running():
            for job in (alone, warned, unplugged, batch_host_unplugged):
                try:
                    rows.append(job(slurm, folder, options.gpus))
                except (TimeoutError, RuntimeError, subprocess.SubprocessError) as error:
                    rows.append(f"| {job.__name__} | {error} | | | none | |")
                    slurm.ask("scancel", "--user=root")
                print(rows[-1], flush=True)
                if "none" in rows[-1]:
                    for log in sorted((folder / job.__name__).glob("slurm-*.out")):
                        print(log.read_text(encoding="utf-8")[-2000:], file=sys.stderr)
    digests = {row.split("|")[5].strip() for row in rows}
    resumed = all("resumed" in row for row in rows[1:])
    return 0 if len(digests) == 1 and "none" not in digests and resumed else 1


if __name__ == "__main__":
    sys.exit(main())
