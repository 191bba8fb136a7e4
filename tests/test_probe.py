"""`triweave probe` on the CPU: the whole of it small, kept part by part, continued, and read back by the planner."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import Running, torchrun, triweave, wait_until

from triweave.cluster import CATALOGUE, GIB
from triweave.errors import InputError
from triweave.planner.profile import Profile, profile_text, read_profile
from triweave.probe import file
from triweave.probe.identity import catalogue_name
from triweave.probe.run import PARTS, kept, missing
from triweave.probe.session import Session
from triweave.probe.shapes import attention_shapes, models, products
from triweave.probe.soak import SHARES, Mixture

H200 = Profile(2, "h200-141gb", "2.11.0", "2026-12-01", "test", gpu_model="NVIDIA H200", num_gpus=2)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A whole rehearsal on two processes."""
    path = tmp_path_factory.mktemp("probe") / "profile.yaml"
    return path, triweave("probe", "--device", "cpu", "--nproc", "2", "--out", str(path), cwd=path.parent)


def test_a_rehearsal_measures_everything(rehearsed: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Every part runs on two gloo processes, is named in the file, and the file says that it was a CPU."""
    path, done = rehearsed
    assert done.returncode == 0, done.stderr
    profile = read_profile(path)
    assert profile.parts == tuple(part.name for part in PARTS)
    assert not missing(profile, PARTS)
    assert profile.gpu == "cpu"
    assert "rehearsal" in profile.source
    tables = {(table.precision, table.operands) for table in profile.matmul}
    assert tables == {(precision, operands) for precision in ("bf16", "fp8") for operands in ("NT", "NN", "TN")}
    assert {curve.kind for curve in profile.collectives} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {point[0] for point in profile.layers} == {1, 2}
    assert "products" not in done.stdout
    assert "layer, tp 2" in done.stdout


def test_the_planner_refuses_a_rehearsal(rehearsed: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """A profile of a CPU prices no GPU, and the message says why."""
    words = ("--model", "llama-3.1-8b", "--cluster", "1x2xh200-141gb", "--seq", "4096", "--global-batch", "8")
    done = triweave("plan", *words, "--profile", str(rehearsed[0]), cwd=rehearsed[0].parent)
    assert done.returncode == 2
    assert "measured on a CPU" in done.stderr


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    """Parts of one call stay bit for bit in the next, which adds the others; a third measures nothing."""
    path = tmp_path / "profile.yaml"
    words = ("probe", "--device", "cpu", "--out", str(path))
    assert triweave(*words, "--only", "host", cwd=tmp_path).returncode == 0
    first = read_profile(path)
    assert first.parts == ("host",)
    assert triweave(*words, "--only", "host,attention", cwd=tmp_path).returncode == 0
    second = read_profile(path)
    assert second == replace(first, parts=("host", "attention"), attention=second.attention)
    done = triweave(*words, "--only", "host,attention", "--json", cwd=tmp_path)
    assert read_profile(path) == second
    assert json.loads(done.stdout)["launch_seconds"] == second.launch_seconds


def test_time_that_is_over_leaves_a_profile(tmp_path: Path) -> None:
    """When there is no time nothing more is begun: exit code 1, and what is missing is named."""
    path = tmp_path / "profile.yaml"
    words = ("probe", "--device", "cpu", "--out", str(path))
    assert triweave(*words, "--only", "host", cwd=tmp_path).returncode == 0
    done = triweave(*words, "--minutes", "1e-9", cwd=tmp_path)
    assert done.returncode == 1
    assert "not measured: gemm, attention, memory, layers, fp8" in done.stderr
    assert read_profile(path).parts == ("host",)


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    """Ctrl-C ends all ranks with exit code 130; the file holds whole parts, and the same command goes on from them."""
    path = tmp_path / "profile.yaml"
    words = ("-m", "triweave", "probe", "--device", "cpu", "--nproc", "2", "--out", str(path))
    with Running(*words, cwd=tmp_path) as running:
        assert wait_until(path.exists)
        running.process.send_signal(signal.SIGINT)
        code, _, told = running.end()
        assert running.all_gone()
    assert code == 130
    assert "keeps what was measured" in told
    assert 0 < len(read_profile(path).parts) < len(PARTS)


def test_a_launcher_may_start_the_ranks(tmp_path: Path) -> None:
    """Under torchrun each process is a rank, and the first alone writes and speaks."""
    path = tmp_path / "profile.yaml"
    done = torchrun(2, "probe", "--device", "cpu", "--only", "links", "--out", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 x CPU") == 1
    assert {curve.ranks for curve in read_profile(path).collectives} == {2}


def test_every_group_of_a_node_is_measured(tmp_path: Path) -> None:
    """Four processes measure collectives and layers over the first two of them as well, while the others wait."""
    path = tmp_path / "profile.yaml"
    words = ("--device", "cpu", "--nproc", "4", "--only", "links,layers", "--out", str(path))
    done = triweave("probe", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    profile = read_profile(path)
    assert {(curve.kind, curve.ranks) for curve in profile.collectives} == {
        (kind, ranks) for kind in ("all_gather", "reduce_scatter", "all_reduce") for ranks in (2, 4)
    }
    assert [point[0] for point in profile.layers] == [1, 2, 4]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--only", "gem"), ["--only = gem", "nearest: gemm"]),
        (("--minutes", "0"), ["--minutes = 0", "above 0"]),
        (("--nproc", "0"), ["--nproc = 0", "at least 1"]),
        (("--device", "cpu", "--out", "nowhere/profile.yaml"), ["--out = nowhere/profile.yaml", "no such folder"]),
    ],
)
def test_bad_words_are_one_message(tmp_path: Path, words: tuple[str, ...], told: list[str]) -> None:
    """What cannot be done is told in one message with the key, the value and the rule, and exit code 2."""
    done = triweave("probe", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert all(word in done.stderr for word in told), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_no_gpu_is_a_message(tmp_path: Path, device: str) -> None:
    """Without a GPU nothing aborts: one message that names the rehearsal, and exit code 2."""
    done = triweave("probe", "--device", device, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --device")
    assert done.stderr.count("\n") == 1
    assert "nearest: cpu" in done.stderr


def test_a_file_of_another_machine_is_not_overwritten(tmp_path: Path) -> None:
    """Another GPU, another number of them or another torch is refused and named; --force starts anew."""
    path = tmp_path / "profile.yaml"
    measured = kept(H200, PARTS[-2], {"launch_seconds": 4e-6})
    file.write(path, measured)
    assert file.begin(path, H200, force=False) == measured
    for other in ({"gpu": "h100-80gb"}, {"num_gpus": 1}, {"torch": "2.12.0"}):
        machine = replace(H200, **other)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="another machine") as refused:
            file.begin(path, machine, force=False)
        assert str(next(iter(other.values()))) in str(refused.value)
        assert file.begin(path, machine, force=True) == machine
    path.write_text("a: file of somebody else\n", encoding="utf-8")
    with pytest.raises(InputError):
        file.begin(path, H200, force=False)


def test_two_probes_do_not_write_one_file(tmp_path: Path) -> None:
    """While one measures for a file another is refused; afterwards it may, and no lock is left."""
    path = tmp_path / "profile.yaml"
    with file.held(path):
        done = triweave("probe", "--device", "cpu", "--out", str(path), cwd=tmp_path)
        assert done.returncode == 2
        assert "another probe measures for" in done.stderr
    with file.held(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_told_before_measuring(tmp_path: Path) -> None:
    """Where nothing can be written that is said at once, and not after the first part."""
    with (
        pytest.raises(InputError, match=r"--out = .*: cannot be written \(File name too long\)"),
        file.held(tmp_path / f"{'x' * 250}.yaml"),
    ):
        pass


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails while a profile is written leaves the former one, and nothing beside it."""
    path = tmp_path / "profile.yaml"
    file.write(path, H200)

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(InputError, match="No space left"):
        file.write(path, replace(H200, date="2027-01-01"))
    assert path.read_text(encoding="utf-8") == profile_text(H200)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("model", "gib", "name"),
    [
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-pcie-80gb"),
        ("NVIDIA B200", 178.4, "b200-180gb"),
        ("NVIDIA L4", 22.0, None),
        ("NVIDIA H100 NVL", 93.1, None),
    ],
)
def test_gpus_are_known_by_their_own_name(model: str, gib: float, name: str | None) -> None:
    """What the driver calls a card gives the catalogue's name, and none where chip, slot or memory is another."""
    assert catalogue_name(model, int(gib * GIB)) == name
    assert name is None or name in CATALOGUE


def test_the_products_are_those_of_the_family() -> None:
    """Shapes of one rank as the layers issue them, each once: Llama-3-70B's at TP 8 and Llama-3-8B's head at TP 2."""
    found = products(small=False)
    assert len(found) == len(set(found))
    for shape in (
        ("NT", 4096, 1280, 8192),
        ("NN", 4096, 8192, 7168),
        ("TN", 8192, 3584, 4096),
        ("NT", 8192, 64128, 4096),
    ):
        assert shape in found
    assert {shape.head_dim for shape in attention_shapes(small=False)} == {64, 128}
    assert {shape.seq for shape in attention_shapes(small=False)} == {1024, 2048, 4096, 8192, 16384, 32768}
    assert models(small=False)[0].hidden_size == 4096


def test_the_mixture_keeps_a_steps_shares() -> None:
    """However long what is timed takes, products, attention and the rest run in the shares of a training step."""
    from triweave.groups import alone

    mixture = Mixture(Session(alone(), torch.device("cpu"), small=True))
    ran: dict[str, float] = dict.fromkeys(SHARES, 0.0)
    mixture.takes = dict.fromkeys(SHARES, 0.01)
    for kind, filler in list(mixture.fillers.items()):

        def counted(kind: str = kind, filler: object = filler) -> torch.Tensor:
            ran[kind] += 0.01
            return torch.empty(0)

        mixture.fillers[kind] = counted
    for _ in range(60):
        mixture.add("attention", 0.05)
        ran["attention"] += 0.05
    total = sum(ran.values())
    assert all(abs(ran[kind] / total - share) < 0.03 for kind, share in SHARES.items()), ran
