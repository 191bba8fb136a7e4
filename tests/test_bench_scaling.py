"""The picture of bench/scaling.py."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "bench" / "scaling_picture.py"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    """`bench/scaling_picture.py` as a module."""
    spec = importlib.util.spec_from_file_location("scaling_picture", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def point(x: int, step_s: float, predicted_step_s: float, curve: str = "layers, TP 2") -> dict[str, Any]:
    """A row as the bench writes it."""
    return {
        "curve": curve,
        "x": x,
        "gpus": 2,
        "tokens": 1000,
        "step_s": step_s,
        "predicted_step_s": predicted_step_s,
    }


def read(svg: str) -> ET.Element:
    """The picture as XML reads it."""
    return ET.fromstring(svg)  # noqa: S314 - our own


def test_speed_is_drawn_from_zero(picture: ModuleType) -> None:
    """Heights above the axis stand to each other as tokens a second do, and doublings lie equally far apart."""
    svg = read(picture.draw([point(1, 1.0, 1.0), point(2, 2.0, 1.0), point(4, 4.0, 1.0)]))
    axes = next(path.get("d", "") for path in svg.iter(f"{SVG}path") if "H" in path.get("d", ""))
    bottom = float(re.findall(r"V(\S+)H", axes)[0])
    dots = [(float(dot.get("cx", "")), bottom - float(dot.get("cy", ""))) for dot in svg.iter(f"{SVG}circle")]
    (x1, y1), (x2, y2), (x3, y3) = dots
    assert y1 / y2 == pytest.approx(2, rel=0.01)
    assert y1 / y3 == pytest.approx(4, rel=0.01)
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)


def test_each_curve_has_a_panel_and_failures_none(picture: ModuleType) -> None:
    """Curves are told apart by name; a point that ran out of memory is not drawn."""
    failed = {key: value for key, value in point(8, 1.0, 1.0).items() if key != "step_s"}
    svg = read(picture.draw([point(1, 1.0, 1.0), failed, point(1, 1.0, 1.0, "a < b")]))
    assert len(list(svg.iter(f"{SVG}g"))) == 2
    assert len(list(svg.iter(f"{SVG}circle"))) == 2
    assert "a < b" in [text.text for text in svg.iter(f"{SVG}text")]
