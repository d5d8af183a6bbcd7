"""The example that shows why weights alone are no model (L54)."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "two_contracts.py"


def test_two_contracts_over_the_same_weights_give_different_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    same, differ, headers, digests, witness = capsys.readouterr().out.splitlines()
    assert same == "same weights: True"
    by_token = [float(number) for number in differ.partition(": ")[2].strip("[]").replace("'", "").split(", ")]
    assert by_token[0] == 0.0  # the first token sees only itself, at position 0
    assert min(by_token[1:]) > 0.001
    assert headers == "headers: passed"
    assert digests == "digests: passed"
    assert witness.startswith("witness: probe 'plain' differs first, its logits by ")
