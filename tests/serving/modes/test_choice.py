"""What `auto` picks, from forecasts made by hand."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serving.modes.auto import choose
from serving.modes.frontier import Forecast, Option


def forecast(bits: float, ms: float, over: float = 1.0) -> Forecast:
    option = Option("ar-speculative", (), bits, 256, 10.0, 10.0 * over, 0.0, 0.0, 0.0)
    return Forecast(option, ms, ms * over, 10.0, ms / 10, 0.0)


forecasts = st.lists(
    st.builds(forecast, st.floats(0.5, 8.0), st.floats(0.1, 1e5), st.floats(1.0, 3.0)), min_size=1, max_size=12
)
budgets = st.floats(0.1, 3e5)


@given(forecasts, budgets)
def test_never_slower_than_the_budget_and_never_worse_than_what_fits(made: list[Forecast], budget: float) -> None:
    choice = choose(made, budget)
    fitting = [f for f in made if f.high_ms <= budget]
    assert (choice is None) == (not fitting)
    if choice is not None:
        assert choice.picked.high_ms <= budget
        assert choice.picked.option.bits == min(f.option.bits for f in fitting)
        assert f"the {len(fitting)} of {len(made)} settings that fit" in choice.reason


@given(forecasts, budgets, budgets)
def test_more_time_is_never_worse(made: list[Forecast], one: float, other: float) -> None:
    less, more = (choose(made, budget) for budget in sorted((one, other)))
    if less is not None:
        assert more is not None
        assert more.picked.option.bits <= less.picked.option.bits


def test_of_two_equals_the_quicker() -> None:
    choice: Any = choose([forecast(2.0, 300.0), forecast(2.0, 200.0)], None)
    assert choice.picked.ms == 200.0


def test_the_reason_tells_what_and_why() -> None:
    choice: Any = choose([forecast(2.0, 900.0, 1.5), forecast(2.5, 200.0)], 1000.0)
    assert choice.reason == (
        "ar-speculative with 2.500 judge bits a byte has the best text of the 1 of 2 settings that fit 1000 ms; "
        "200 ms expected now: 10 sweeps of 20 ms and 0 ms of arithmetic"
    )
