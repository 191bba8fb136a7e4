"""The files that start a run: what is in them, how names are quoted, and how they are written."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as effort
from hypothesis import strategies as st
from launching import WORKDIR, check_bash, fake_python, resolved_run, settings

from triweave.cli import main
from triweave.errors import InputError
from triweave.launch.engines import ENGINES
from triweave.launch.job import clock, make_job, read_clock
from triweave.launch.slurm import directive
from triweave.launch.write import write_files
from triweave.launch.yaml_text import dump

RUN = resolved_run()
EASY = effort(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PRINTABLE = st.text(st.characters(codec="utf-8").filter(str.isprintable), min_size=1, max_size=20)
NAMES = PRINTABLE.filter(lambda text: text.strip() and "/" not in text and text not in (".", ".."))
NASTY = (
    "a b",
    "it's",
    'say "so"',
    "$HOME",
    "`id`",
    "$(id)",
    "a;b",
    "a#b",
    "a\\b",
    "-x",
    "*",
    "~",
    "ü",
    "a:b",
    "on",
    "1e5",
)


def text_of(engine: str, run: object = RUN, **changed: object) -> str:
    """The first file of an engine."""
    return next(iter(ENGINES[engine].files(run, settings(**changed)).values()))  # type: ignore[arg-type]


def sbatch_argument(line: str) -> str:
    """What sbatch reads after `#SBATCH --option=`: its `_get_argument`, in Python."""
    rest = line.partition("=")[2]
    found, quote, escaped = "", "", False
    for one in rest:
        if not quote and one.isspace():
            break
        if escaped:
            found, escaped = found + one, False
        elif one == "\\":
            escaped = True
        elif one in "\"'" and quote in ("", one):
            quote = "" if quote else one
        elif one == "#":
            break
        else:
            found += one
    return found


@pytest.mark.parametrize("engine", ["torchrun", "slurm", "ray", "megatron"])
def test_scripts_are_bash(engine: str) -> None:
    """Every script that is written can be read by bash, with a name and a folder that need quotes."""
    for name, text in (
        ENGINES[engine]
        .files(RUN, settings(name=None if engine == "ray" else "it's a $run", workdir="/a b/it's"))
        .items()
    ):
        if not name.endswith(".py"):
            check_bash(text)
        else:
            compile(text, name, "exec")


def test_slurm_file_is_sized_from_the_layout() -> None:
    """Nodes, GPUs, time and warning are the plan's, and the job is put back with its log kept."""
    text = text_of("slurm", partition="gpu", account="team")
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        '#SBATCH --partition="gpu"',
        '#SBATCH --account="team"',
        f'#SBATCH --output="{WORKDIR}/runs/llama3-70b/slurm-%j.out"',
    ):
        assert line in text.splitlines()
    job = make_job(RUN, settings())
    assert job.time_limit_s is not None
    assert f"#SBATCH --time={clock(job.time_limit_s)}" in text
    assert f"#SBATCH --signal=B:USR1@{job.warning_s}" in text


def test_directives_stand_before_the_first_command() -> None:
    """sbatch takes no notice of a directive after a command: none comes there, and none holds a variable."""
    lines = text_of("slurm", restarts=2).splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]
    assert not [line for line in lines[:first] if line.startswith("#SBATCH") and "$" in line]


def test_time_is_predicted_from_the_steps() -> None:
    """A limit holds all steps at the slow end of their prediction, and grows with them."""
    one, ten = (make_job(resolved_run(train__steps=steps), settings()).time_limit_s for steps in ("1000", "10000"))
    assert one is not None
    assert ten is not None
    assert ten > 5 * one


def test_unknown_time_is_asked_for() -> None:
    """Slurm needs a limit: a run of epochs is told so, and takes the one that is given."""
    run = resolved_run(train__steps=None, train__epochs="2")
    with pytest.raises(InputError, match="--time-limit: is needed"):
        text_of("slurm", run)
    assert "#SBATCH --time=1-00:00:00" in text_of("slurm", run, time_limit="24:00:00")


@given(st.integers(1, 10**7))
def test_clock_is_read_back(seconds: int) -> None:
    """A duration as Slurm writes it is the same duration when read."""
    assert read_clock(clock(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "90", "1:30", "00:00:00", "1:2:3:4", "-1:00:00", "01:60:00", "١:٠٠:٠٠"])
def test_clock_of_another_form_is_refused(text: str) -> None:
    """A limit that is not hours, minutes and seconds is refused with the form it should have."""
    with pytest.raises(InputError, match="HH:MM:SS"):
        read_clock(text)


@EASY
@given(NAMES)
def test_sbatch_reads_the_value(value: str) -> None:
    """Whatever a directive holds, sbatch's own rule of quoting gives it back."""
    assert sbatch_argument(directive("job-name", value)) == value


@pytest.mark.parametrize("value", NASTY)
def test_sbatch_reads_nasty_values(value: str) -> None:
    """The same for the characters that shells and Slurm take for something else."""
    assert sbatch_argument(directive("output", value)) == value


@EASY
@given(st.dictionaries(st.sampled_from(["name", "value", "on"]), PRINTABLE | st.sampled_from(NASTY), min_size=1))
def test_yaml_texts_stay_texts(document: dict[str, str]) -> None:
    """A reader of YAML 1.1 gives every text back as a text."""
    assert yaml.safe_load(dump({"a": document, "b": list(document.values())}))["b"] == list(document.values())


@pytest.mark.parametrize("value", ["1e5", "0o17", "on", "y", "12:30", "1_000", "0x1f", "null", "~", "2026-01-01", ".5"])
def test_words_that_a_reader_takes_for_something_else_are_quoted(value: str) -> None:
    """Numbers, truths and dates of any YAML are written in quotes where they are texts."""
    assert dump({"a": value}) == f'a: "{value}"\n'


@EASY
@given(word=PRINTABLE.filter(lambda text: bool(text.strip())), name=NAMES)
def test_words_reach_triweave_as_they_are(word: str, name: str, tmp_path: Path) -> None:
    """A name, a folder and words of the command line come through the shell unchanged."""
    folder = tmp_path / "it's a $folder"
    folder.mkdir(exist_ok=True)
    python = fake_python(tmp_path)
    run = resolved_run(cluster="1x8xh100-80gb", layout__pp="1", model__path="meta-llama/Llama-3.1-8B")
    given_settings = settings(workdir=str(folder), python=str(python), name=name, overrides=("--output_dir", word))
    script = next(iter(ENGINES["torchrun"].files(run, given_settings).values()))
    environment = {**os.environ, "RECORD": str(tmp_path / "record")}
    subprocess.run(["bash", "-c", script], env=environment, check=True, timeout=20)
    words = (tmp_path / "record.words").read_text(encoding="utf-8").split("\n")
    assert words[words.index("triweave") :] == ["triweave", "train", "run.yaml", "--output_dir", word, ""]


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("key", ["name", "workdir", "python"])
def test_line_breaks_are_refused(engine: str, key: str) -> None:
    """No quotes keep a line break inside a directive: it is refused, whatever the engine."""
    with pytest.raises(InputError, match="printable"):
        text_of(engine, **{key: "/a\n#SBATCH --nodes=9"})


def test_cluster_must_be_named() -> None:
    """Without a cluster nothing can be sized."""
    with pytest.raises(InputError, match="cluster: is missing"):
        text_of("torchrun", resolved_run(cluster=None))


def test_cluster_smaller_than_the_plan_is_refused() -> None:
    """A grid of more ranks than GPUs is refused before a file is made."""
    with pytest.raises(InputError, match="ranks"):
        resolved_run(cluster="2x8xh100-80gb", layout__dp="1")


def test_node_script_passes_exit_codes_on(tmp_path: Path) -> None:
    """torchrun's code comes through, and a run that stopped on request leaves with 75 whatever torchrun says."""
    run = resolved_run(cluster="1x8xh100-80gb", layout__pp="1", model__path="meta-llama/Llama-3.1-8B", output_dir="out")
    script = text_of("torchrun", run, workdir=str(tmp_path), python=str(fake_python(tmp_path)))

    def code(script: str, leaves: str) -> int:
        environment = {**os.environ, "RECORD": str(tmp_path / "record"), "FAKE_EXIT": leaves}
        return subprocess.run(["bash", "-c", script], env=environment, timeout=20).returncode

    assert code(script, "0") == 0
    assert code(script, "3") == 3
    stale = tmp_path / "out" / "stopped.json"
    stale.parent.mkdir()
    stale.touch()
    assert code(script, "3") == 3, "what an earlier stop has left is no stop of this run"
    stopping = script.replace("agent=$!", 'agent=$!; touch "$stopped"')
    assert code(stopping, "1") == 75


FAKE_TORCHRUN = """\
#!{python}
import os, signal, subprocess, sys, time

def note(word):
    with open(os.environ["RECORD"], "a") as record:
        print(word, file=record)

def asked(*_):
    note("asked")
    os._exit(0)

if sys.argv[1:] == ["rank"]:
    signal.signal(signal.SIGUSR1, asked)
    note("ready")
    time.sleep(60)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: note("killed"))
subprocess.run([sys.argv[0], "rank"])
sys.exit(7)
"""


def fake_torchrun(folder: Path) -> Path:
    """A stand-in for torchrun with one rank: both write down that they were asked, or killed."""
    agent = folder / "agent"
    agent.write_text(FAKE_TORCHRUN.format(python=sys.executable))
    agent.chmod(0o755)
    return agent


def wait_for(record: Path, word: str) -> None:
    """Wait until a stand-in has written `word`."""
    end = time.monotonic() + 30
    while not (record.exists() and word in record.read_text().split()):
        assert time.monotonic() < end, f"no {word}"
        time.sleep(0.05)


ONE_NODE = {"cluster": "1x8xh100-80gb", "layout__pp": "1", "model__path": "meta-llama/Llama-3.1-8B"}


def test_signal_goes_to_the_ranks_and_not_to_torchrun(tmp_path: Path) -> None:
    """SIGTERM to the script reaches torchrun's children as SIGUSR1, and torchrun itself not at all."""
    script = text_of("torchrun", resolved_run(**ONE_NODE), workdir=str(tmp_path), python=str(fake_torchrun(tmp_path)))
    record = tmp_path / "record"
    started = subprocess.Popen(["bash", "-c", script], env={**os.environ, "RECORD": str(record)})
    wait_for(record, "ready")
    started.send_signal(signal.SIGTERM)
    assert started.wait(timeout=20) == 7
    assert record.read_text().split() == ["ready", "asked"]


def test_killed_ray_actor_has_its_ranks_stop(tmp_path: Path) -> None:
    """Where the actor and the script die at once, the ranks are asked to stop all the same, and not before."""
    changed = {"workdir": str(tmp_path), "python": str(fake_torchrun(tmp_path))}
    script = ENGINES["ray"].files(resolved_run(**ONE_NODE), settings(**changed))["llama3-70b.sh"]
    record = tmp_path / "record"
    environment = {**os.environ, "RECORD": str(record)}
    started = subprocess.Popen(["bash", "-c", script], env=environment, stdin=subprocess.PIPE, start_new_session=True)
    wait_for(record, "ready")
    time.sleep(0.3)
    assert record.read_text().split() == ["ready"]
    started.kill()
    started.wait()
    assert started.stdin is not None
    started.stdin.close()
    wait_for(record, "asked")


def test_environment_has_its_reasons() -> None:
    """Every variable that is exported stands under a comment, and the allocator is the one that the plan counts on."""
    for engine in ("torchrun", "slurm", "megatron"):
        lines = text_of(engine).splitlines()
        exported = [number for number, line in enumerate(lines) if re.match(r"export [A-Z_]+=[^$]", line)]
        assert exported
        assert all(lines[number - 1].startswith("#") for number in exported)
        assert "export PYTORCH_ALLOC_CONF=expandable_segments:True" in lines


def test_one_connection_is_for_megatron_alone() -> None:
    """Our streams wait for peers and need several connections; Megatron asserts one, before Blackwell and with TP."""
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=8" in text_of("slurm")
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in text_of("megatron")
    blackwell = resolved_run(cluster="4x8xb200-180gb")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in text_of("megatron", blackwell)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_files_say_which_node_holds_what(engine: str) -> None:
    """The head of every file has the map of nodes: TP groups inside, stages in order."""
    assert "node 1: ranks 8-15: pp 1, dp 0, tp 0-7" in text_of(engine)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_command_names_the_files(engine: str, tmp_path: Path) -> None:
    """The printed command is one that a shell can read, and names a file that was written."""
    command = ENGINES[engine].command(RUN, settings(), str(tmp_path / "a b"))
    words = " ".join(shlex.split(command))
    assert any(name in words for name in ENGINES[engine].files(RUN, settings()))


def test_files_are_not_written_over(tmp_path: Path) -> None:
    """A file that is there stays, and nothing else is written, unless that is asked for."""
    (tmp_path / "b").write_text("mine")
    with pytest.raises(InputError, match="--force"):
        write_files(tmp_path, {"a": "new", "b": "new"}, force=False)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "mine"}
    write_files(tmp_path, {"a": "new", "b": "new"}, force=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "new", "b": "new"}


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    """Where one file cannot be written, none is, and no temporary one stays."""
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        write_files(tmp_path, {"a": "new", "b": "new"}, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


RUN_FILE = """\
model: {path: meta-llama/Llama-3-70B}
cluster: 4x8xh100-80gb
layout: {tp: 8, pp: 4}
data: {train: chat.jsonl}
train: {steps: 100}
output_dir: runs/llama
"""


def test_verb_writes_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`launch` writes beside the run file, names what it wrote and the command, and refuses to do it twice."""
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    words = ["launch", str(tmp_path / "run.yaml"), "--to", "slurm"]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert f"wrote     {tmp_path}/llama.sbatch" in said
    assert "sbatch" in said.splitlines()[-1]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "slrum"], "nearest: slurm"),
        ([], "must be one of"),
        (["--to", "kubernetes"], "--image: is needed"),
        (["--to", "slurm", "--layout.tp", "3"], "layout.tp"),
        (["--to", "slurm", "--warning", "999999"], "time limit"),
        (["--to", "skypilot", "--name", "a b"], "nearest: a-b"),
        (["--to", "ray", "--name", "$HOME"], "nearest: HOME"),
        (["--to", "kubernetes", "--workdir", "/a:b", "--image", "x", "--claim", "y"], "no colon"),
        (["--to", "kubernetes", "--name", "Llama_3", "--image", "x", "--claim", "y"], "nearest: llama-3"),
        (["--to", "slurm", "--restarts", "-1"], "must not be negative"),
    ],
)
def test_verb_refuses(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong is told with its key, and nothing is written."""
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    with pytest.raises(SystemExit) as left:
        main(["launch", str(tmp_path / "run.yaml"), *words])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
