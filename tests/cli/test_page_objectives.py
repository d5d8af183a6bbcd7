"""The page of a run that is not measured in bits per byte: figures with their baselines, and experts' shares."""

import json
import math
from pathlib import Path
from typing import Any

from pellucid.cli.html_report import curves


def line(step: int, final: bool, accuracy: Any) -> dict[str, Any]:
    figures = {"nats a document": {"value": 0.5, "baseline": 0.7}, "accuracy": accuracy}
    return {"kind": "validation", "step": step, "final": final, "loss": 0.5, "metrics": figures}


def test_figures_have_curves_with_their_baseline(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {
            "kind": "step",
            "step": 1,
            "loss": 1.0,
            "routing": {"most": 0.5, "mean": 0.25, "dropped": 0, "balance_loss": 2},
        },
        {
            "kind": "step",
            "step": 2,
            "loss": 0.9,
            "routing": {"most": 0.4, "mean": 0.25, "dropped": 0, "balance_loss": 1},
        },
        line(1, False, {"value": 0.5, "baseline": 0.4}),
        line(2, False, {"value": 0.75, "baseline": 0.4}),
        line(2, True, {"value": 0.7, "baseline": None}),
        line(3, True, "nothing"),
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = {record.title: record for record in curves(path)}
    assert "Bits per byte" not in found
    sample, final, baseline = found["Accuracy"].curves
    assert (sample.x, sample.y) == ((1.0, 2.0), (0.5, 0.75))
    assert (final.x, final.y) == ((2.0,), (0.7,))
    assert baseline.y[:2] == (0.4, 0.4)
    assert math.isnan(baseline.y[2])
    assert found["Loss"].y_label == ""
    assert found["Share of tokens"].curves[0].y == (0.5, 0.4)
    assert found["Balance loss"].curves[0].y == (2.0, 1.0)
