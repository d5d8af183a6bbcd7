"""Faulty copies of our own source are found out; each copy differs from the original in one place."""

import ast

import pytest

from mutants.equivalent import EQUIVALENT
from mutants.killers import killer
from mutants.mutate import FILES, SOURCE, Mutant, mutants
from mutants.run import chosen

FAMOUS = (
    ("visibility/primitives.py Lookahead._visible: ", "<= ", "< "),  # who sees itself
    ("visibility/primitives.py Window._visible: ", "> ", ">= "),  # one key too many
)

SAMPLE = 120
QUICK = ("nn/embedding.py",)  # files whose tests are few


def test_each_mutant_is_the_source_with_one_change():
    every = [mutant for file in FILES for mutant in mutants(file)]
    assert len({mutant.name for mutant in every}) == len(every) > 800
    for mutant in every[::25]:
        original = ast.unparse(ast.parse((SOURCE / mutant.file).read_text(encoding="utf-8")))
        assert mutant.source != original
        assert mutant.before != mutant.after


KINDS = {
    "a < b": {"a <= b", "a >= b"},
    "0 <= a < b": {"0 < a < b", "0 > a < b", "0 <= a <= b", "0 <= a >= b"},
    "a is None": {"a is not None"},
    "seen & real": {"seen", "real"},
    "~seen": {"seen"},
    "a and b": {"a", "b"},
    "a and b and c": {"b and c", "a and c", "a and b"},
    "torch.where(seen, x, 0)": {"x", "0"},
    "x.masked_fill(seen, 0)": {"x"},
    "x[a, 1:b]": {"x[a, 1 + 1:b]", "x[a, 1:b + 1]"},
    "x[-1]": {"x[-1 + 1]"},
    "range(a, b)": {"range(a + 1, b)", "range(a, b + 1)"},
    "slice(None, a)": {"slice(None, a + 1)"},
    "a + b": {"a - b"},
    "np.minimum(a, b)": {"np.maximum(a, b)"},
    "seen &= real": {"pass"},
    "a += b": {"a -= b"},
}


@pytest.mark.parametrize("text", KINDS)
def test_every_kind_of_change_is_made(text, tmp_path):
    """Comparisons flipped, masks dropped, indices shifted, in each of the forms in which they are written."""
    file = tmp_path / "module.py"
    file.write_text(f"def f():\n    {text}\n")
    assert {mutant.after for mutant in mutants(str(file)) if mutant.before == text} == KINDS[text]


def test_names_tell_places_apart(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("def f():\n    a < b\n    a < b\n\ndef g():\n    a < b\n    raise E(a < b)\n")
    assert len({mutant.name for mutant in mutants(str(file))}) == 6


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[] if file in QUICK else pytest.mark.slow) for file in FILES]
)
def test_the_source_itself_is_innocent(file):
    """Who condemns the original would condemn every copy of it."""
    assert killer(Mutant(file, "", 0, "", "", (SOURCE / file).read_text(encoding="utf-8"))) is None


@pytest.mark.parametrize(
    ("name", "before", "after"), [FAMOUS[0], pytest.param(*FAMOUS[1], marks=pytest.mark.slow)], ids=["itself", "far"]
)
def test_famous_mistakes_are_found_out(name, before, after):
    (mutant,) = [m for m in chosen(None, name) if before in m.before and after in m.after]
    assert killer(mutant) in ("audit", "tests")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(SAMPLE))
def test_mutants_are_found_out(number):
    mutant = chosen(SAMPLE)[number]
    if mutant.name in EQUIVALENT:
        pytest.skip(EQUIVALENT[mutant.name])
    assert killer(mutant) is not None, mutant.name


def test_every_excuse_is_about_a_mutant():
    assert EQUIVALENT.keys() <= {mutant.name for file in FILES for mutant in mutants(file)}
