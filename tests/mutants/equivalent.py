"""Mutants that change nothing that anyone could see, each with the reason why."""

EQUIVALENT: dict[str, str] = {}
