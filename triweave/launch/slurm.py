"""Slurm: one sbatch file."""

from __future__ import annotations

import shlex

from triweave.config.validate import ResolvedRun
from triweave.errors import InputError, Problem
from triweave.launch.job import Job, Settings, clock, make_job
from triweave.launch.shell import AGAIN_S, LEFT_TO_THE_SITE, comment, exports, summary, torchrun
from triweave.launch.variables import NODE_RANK, variables

MOST_REQUEUES = 1000
"""A run that stops before its first save, time after time, must end some day."""


def files(resolved: ResolvedRun, settings: Settings) -> dict[str, str]:
    """The sbatch file, by its name.

    Raises:
        InputError: as `make_job`; a time limit that is not known; a path that Slurm would misread.
    """
    job = make_job(resolved, settings)
    return {f"{job.name}.sbatch": _sbatch(resolved, settings, job)}


def command(resolved: ResolvedRun, settings: Settings, folder: str) -> str:
    """What submits it. Without the folder of its log a job fails at once, and without a log."""
    job = make_job(resolved, settings)
    path = f"{folder}/{job.name}.sbatch"
    return f"mkdir -p -- {shlex.quote(job.output_dir)} && sbatch {shlex.quote(path)}"


def directive(option: str, value: str) -> str:
    r"""One `#SBATCH` line, read by sbatch as `value` whatever it holds.

    sbatch splits at blanks outside quotes, and knows a backslash before one character inside them, where a bare # would
    begin a comment all the same (`_get_argument` of its opt.c; tried with 22.05).

    >>> print(directive("job-name", "a b's #1"))
    #SBATCH --job-name="a b's \#1"
    """
    quoted = "".join(f"\\{one}" if one in '"\\#' else one for one in value)
    return f'#SBATCH --{option}="{quoted}"'


def _sbatch(resolved: ResolvedRun, settings: Settings, job: Job) -> str:
    if job.time_limit_s is None:
        rule = f"is needed: {job.time_source}. A run that comes to its limit is saved and requeued"
        raise InputError(Problem("--time-limit", None, rule, "24:00:00"))
    if "\\" in job.output_dir:
        rule = "must hold no backslash: Slurm would not fill in the job's number in the name of its log"
        raise InputError(Problem("output_dir", job.output_dir, rule))
    log = job.output_dir.replace("%", "%%") + "/slurm-%j.out"
    site = {"partition": settings.partition, "account": settings.account}
    return "\n".join(
        [
            "#!/bin/bash",
            directive("job-name", job.name),
            f"#SBATCH --nodes={job.num_nodes}",
            "#SBATCH --ntasks-per-node=1",
            *([f"#SBATCH --gpus-per-node={job.gpus_per_node}"] if job.gpu else []),
            "#SBATCH --exclusive",
            "#SBATCH --mem=0",
            *comment(f"Time: {job.time_source}. At the limit the run is saved and goes on after a requeue."),
            f"#SBATCH --time={clock(job.time_limit_s)}",
            *comment("Seconds before the limit in which a step and a save must fit; to the batch shell alone."),
            f"#SBATCH --signal=B:USR1@{job.warning_s}",
            "#SBATCH --requeue",
            *comment("A requeued job goes on writing the same log instead of emptying it."),
            "#SBATCH --open-mode=append",
            directive("chdir", job.workdir),
            directive("output", log),
            *(directive(option, value) for option, value in site.items() if value is not None),
            "#",
            *summary(resolved, job),
            "set -uo pipefail",
            "",
            "warned=0",
            *comment(
                "To the processes of the steps: torchrun and the shell around it ignore the signal, the ranks save."
                " Ranks that are not there yet, or have only begun, do not hear it: it is sent again and again."
            ),
            "warn() {",
            "  warned=1",
            '  while kill -0 "${step:-}" 2>/dev/null; do',
            '    scancel --signal=USR1 "$SLURM_JOB_ID"',
            f"    sleep {AGAIN_S}",
            "  done",
            "}",
            "trap warn USR1",
            "",
            f'if [ "$SLURM_JOB_NUM_NODES" -ne {job.num_nodes} ]; then',
            f'  echo "error: the plan is for {job.num_nodes} nodes, and the job has $SLURM_JOB_NUM_NODES" >&2',
            "  exit 2",
            "fi",
            "",
            *exports(variables(resolved, job)),
            *comment(LEFT_TO_THE_SITE),
            "",
            *comment("Slurm's own order of the nodes, so that pipeline neighbours are neighbours of the network."),
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            *comment("Another port for every job: one that is ending may still hold its own."),
            "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
            "export MASTER_ADDR MASTER_PORT",
            f"stopped={shlex.quote(job.stopped_file)}",
            'rm -f -- "$stopped"',
            "",
            "run_ranks() {",
            *comment_inside(
                "The node's number is read on each node. All cores, bound to none: srun would give its task one.",
                "Every variable, also where a site exports none (--export).",
            ),
            '  srun --export=ALL --kill-on-bad-exit=1 --label --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none \\',
            "    bash -c '",
            '      trap "" USR1',
            "      ulimit -l unlimited 2>/dev/null",
            f'      export {NODE_RANK}="$SLURM_NODEID"',
            f'      exec "$0" {torchrun(job)} \\',
            '        --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\',
            '        -m triweave "$@"\' \\',
            "    " + " ".join(shlex.quote(word) for word in (settings.python, *job.words)) + " &",
            "  step=$!",
            '  if [ "$warned" = 1 ]; then warn; fi',
            *comment_inside("`wait` returns when the warning comes; the last one has the exit code."),
            '  while kill -0 "$step" 2>/dev/null; do wait "$step"; done',
            '  wait "$step"',
            "  code=$?",
            "}",
            "",
            "run_ranks",
            *_again(settings.restarts),
            *comment(
                "torchrun leaves with 1 whatever the ranks say; the file says that they saved and may go on. 138: a"
                " warning met the shell of a node before that ignored it, and nothing had begun."
            ),
            'if [ "$warned" = 1 ] && [ "$code" = 138 ]; then touch -- "$stopped"; fi',
            'if [ "$code" != 0 ] && [ -e "$stopped" ]; then',
            f'  if [ "$warned" = 1 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MOST_REQUEUES} ]; then',
            '    exec scontrol requeue "$SLURM_JOB_ID"',
            "  fi",
            "  exit 75",
            "fi",
            'exit "$code"',
            "",
        ]
    )


def comment_inside(*paragraphs: str) -> list[str]:
    """Comment lines of a block."""
    return [f"  {line}" for line in comment(*paragraphs)]


def _again(restarts: int) -> list[str]:
    if not restarts:
        return []
    return [
        *comment(
            "A crash, on nodes that are still there, is started again; the run goes on from its newest checkpoint."
        ),
        f"for again in {' '.join(str(number) for number in range(1, restarts + 1))}; do",
        '  if [ "$code" = 0 ] || [ -e "$stopped" ] || [ "$warned" = 1 ]; then break; fi',
        f'  echo "start $again of {restarts} after a crash (exit code $code)"',
        "  MASTER_PORT=$((20000 + (SLURM_JOB_ID + 101 * again) % 10000))",
        "  run_ranks",
        "done",
    ]
