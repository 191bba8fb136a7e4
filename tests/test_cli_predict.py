"""`triweave predict`: published rows predicted blind, and honestly compared."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from triweave.cli import main
from triweave.planner.predict import COLUMNS, MEASURED, errors_of, predict_row, summary

ROW = {
    "source": "NVIDIA dgxc-benchmarking",
    "model": "Llama-3-70B",
    "layers": "80",
    "hidden": "8192",
    "ffn": "28672",
    "heads": "64",
    "kv_heads": "8",
    "vocab": "128256",
    "seq": "8192",
    "gpus": "64",
    "gpus_per_node": "8",
    "gpu_type": "H100-SXM-80GB",
    "gbs": "128",
    "mbs": "1",
    "tp": "4",
    "pp": "4",
    "vpp": "5",
    "cp": "1",
    "dp": "4",
    "zero": "1",
    "sp": "1",
    "precision": "bf16",
    "recompute": "none",
    "tokens_per_s_per_gpu": "",
    "tflops_per_gpu": "",
    "mfu": "",
    "step_time_s": "20.0",
    "peak_mem_gib": "70.0",
}


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def predicted(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["predict", str(path), "--json"])
    assert ended.value.code == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_one_prediction_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step, tokens a second, peak and fits; signed errors of what the row measured, and their summary."""
    document = predicted(write(tmp_path / "rows.csv", [ROW, ROW | {"step_time_s": "40.0"}]), capsys)
    assert set(document) == {"rows", "summary"}
    first, second = document["rows"]
    for name in ("step_s", "tokens_per_s_per_gpu", "peak_gib", "fits", "errors"):
        assert first[name] is not None
    assert first["errors"]["step_s"] == pytest.approx(first["step_s"] / 20 - 1)
    assert first["errors"]["tokens_per_s_per_gpu"] == pytest.approx(20 / first["step_s"] - 1)
    assert first["errors"]["peak_gib"] == pytest.approx(first["peak_gib"] / 70 - 1)
    told = document["summary"]["step_s"]
    errors = [row["errors"]["step_s"] for row in (first, second)]
    assert told["rows"] == 2
    assert told["mean_signed"] == pytest.approx(sum(errors) / 2)
    assert told["mean_absolute"] == pytest.approx(sum(map(abs, errors)) / 2)
    assert told["worst"] == max(errors, key=abs)


def test_never_reads_what_was_measured() -> None:
    """Another measurement, or none, changes no prediction; nor does a measured out-of-memory."""
    expected = predict_row(ROW)
    for name in MEASURED:
        for value in ("", "1.0", "123456"):
            assert predict_row(ROW | {name: value}) == expected
    assert predict_row(ROW | {"mfu": "OOM"}) == expected


def test_files_without_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The measured columns may be missing: predictions without errors."""
    bare = {name: ROW[name] for name in COLUMNS}
    document = predicted(write(tmp_path / "rows.csv", [bare]), capsys)
    assert document["rows"][0]["step_s"] == predict_row(ROW)["step_s"]
    assert document["rows"][0]["errors"] == {}
    assert document["summary"] == {}


def test_says_why_it_cannot() -> None:
    """A GPU that nobody measured: no step, and the reason."""
    answer = predict_row(ROW | {"gpu_type": "MI300X"})
    assert answer["step_s"] is None
    assert "MI300X" in answer["unpredicted"]["step_s"]


def test_fits_is_held_against_out_of_memory() -> None:
    """A row that ran out of memory is right to be predicted not to fit, and wrong otherwise."""
    answer = predict_row(ROW)
    ran, died = ROW, ROW | {"mfu": "OOM", "step_time_s": "", "peak_mem_gib": ""}
    assert errors_of(ran, answer)["fits_right"] is answer["fits"]
    assert errors_of(died, answer)["fits_right"] is not answer["fits"]
    assert set(errors_of(died, answer)) == {"fits_right", "missed_out_of_memory"}
    assert errors_of(died, answer)["missed_out_of_memory"] is answer["fits"]
    assert errors_of(ran, answer)["missed_out_of_memory"] is False


def test_summary_is_signed() -> None:
    """One too slow and one too fast: no bias, and the absolute mean tells."""
    told = summary(
        [
            {"step_s": 0.1},
            {"step_s": -0.3},
            {"fits_right": True, "missed_out_of_memory": False},
            {"fits_right": False, "missed_out_of_memory": True},
        ]
    )
    assert told["step_s"] == {
        "rows": 2,
        "mean_absolute": pytest.approx(0.2),
        "mean_signed": pytest.approx(-0.1),
        "worst": -0.3,
    }
    assert told["fits"] == {"rows": 2, "right": 0.5, "missed": 0.5}


@pytest.mark.parametrize(
    ("content", "told"),
    [("a,b\n1,2\n", "lacks the columns source, model"), ("", "lacks the columns"), ("\xff\xfe", "")],
)
def test_a_file_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, told: str) -> None:
    """One message, exit code 2."""
    path = tmp_path / "rows.csv"
    path.write_bytes(content.encode("latin-1"))
    for file in (path, tmp_path / "missing.csv"):
        with pytest.raises(SystemExit) as ended:
            main(["predict", str(file), "--json"])
        output, errors = capsys.readouterr()
        assert (ended.value.code, output) == (2, "")
        assert errors.startswith("error: ROWS.csv")
        assert told in errors or file is not path


@pytest.mark.parametrize(
    ("key", "value"),
    [("tp", "eight"), ("tp", ""), ("gbs", "7"), ("heads", "0"), ("mbs", "-1"), ("seq", "nan"), ("dp", "1e99")],
)
def test_a_broken_row_says_so_and_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    """A cell that makes no sense costs its own row's prediction, with a reason, and nothing else."""
    document = predicted(write(tmp_path / "rows.csv", [ROW | {key: value}, ROW]), capsys)
    broken, good = document["rows"]
    assert good["step_s"] is not None
    if broken["step_s"] is None or broken["peak_gib"] is None:
        assert broken["unpredicted"]


def test_a_measurement_that_is_no_number_is_none() -> None:
    """`n/a` or a NaN where a measurement belongs: nothing to compare with."""
    answer = predict_row(ROW)
    for value in ("n/a", "nan", "0", "-3", "inf"):
        assert errors_of(ROW | {"step_time_s": value, "peak_mem_gib": value}, answer) == {}


def test_says_the_summary_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json: a line a quantity, and how many rows were not predicted."""
    with pytest.raises(SystemExit):
        main(["predict", str(write(tmp_path / "rows.csv", [ROW, ROW | {"gpu_type": "MI300X"}]))])
    output = capsys.readouterr().out
    assert "mean_signed" in output
    assert "2 rows, 1 of them" in output
