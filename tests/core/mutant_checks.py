"""Would the tests notice? Every mutant of the core must fail them, nearly all of them the state machine.

Run in a process of its own by ``test_mutants``: what Hypothesis tries depends on the modules loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.core.mutants import MUTANTS, Mutant, mutated

SCENARIOS = ("test_scheduler", "test_block_pool", "test_beam")  # tests of single cases
EXAMPLES = 200  # of the state machine at each depth, until the first failure


def _caught(run: Callable[..., Any], *args: Any, **options: Any) -> bool:
    try:
        run(*args, **options)
    except Exception:
        return True
    return False


def _scenarios(load: Callable[[str], Any]) -> list[Callable[[], None]]:
    modules = [load(f"tests.core.{name}") for name in SCENARIOS]
    return [
        function
        for module in modules
        for name, function in vars(module).items()
        if name.startswith("test_") and not inspect.signature(function).parameters
    ]


def _who_catches(mutant: Mutant, load: Callable[[str], Any]) -> str | None:
    if mutant.is_single_case:
        return next((run.__name__ for run in _scenarios(load) if _caught(run)), None)
    machine = load("tests.core.test_scheduler_machine")
    for depth in (2, 0, 1):
        if _caught(machine.run_machine, depth, max_examples=EXAMPLES, shrink=False):
            return f"the state machine, {depth} steps ahead"
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    with mutated(mutant) as load:
        caught = _who_catches(mutant, load)
    assert caught is not None, "nothing fails"
    print(f"{mutant.name}: {caught}")


def test_the_names_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
