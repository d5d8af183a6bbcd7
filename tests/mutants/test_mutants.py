"""Faulty copies of our own source are found out; each copy differs from the original in one place."""

import ast

import pytest

from mutants.equivalent import EQUIVALENT
from mutants.killers import killer
from mutants.mutate import FILES, SOURCE, mutants
from mutants.run import chosen

FAMOUS = (
    ("visibility/rules.py Lookahead.sees: ", "<= ", "< "),  # who sees itself
    ("visibility/rules.py Window.sees: ", "> ", ">= "),  # one key too many
)


def test_each_mutant_is_the_source_with_one_change():
    every = [mutant for file in FILES for mutant in mutants(file)]
    assert len(every) > 300
    assert len({(mutant.name, mutant.line) for mutant in every}) > 300
    for mutant in every[::25]:
        original = ast.unparse(ast.parse((SOURCE / mutant.file).read_text(encoding="utf-8")))
        assert mutant.source != original
        assert mutant.before != mutant.after


@pytest.mark.parametrize(("name", "before", "after"), FAMOUS, ids=lambda text: text.strip())
def test_famous_mistakes_are_found_out(name, before, after):
    (mutant,) = [m for m in chosen(None, name) if before in m.before and after in m.after]
    assert killer(mutant) in ("audit", "tests")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", chosen(120), ids=lambda mutant: mutant.name)
def test_mutants_are_found_out(mutant):
    if mutant.name in EQUIVALENT:
        pytest.skip(EQUIVALENT[mutant.name])
    assert killer(mutant) is not None


def test_every_excuse_is_about_a_mutant():
    assert EQUIVALENT.keys() <= {mutant.name for file in FILES for mutant in mutants(file)}
