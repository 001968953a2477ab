"""What texts are worth, from records of the ruler: one figure for each arm, all of one kind."""

import json
from pathlib import Path
from typing import Any

import pytest

from onesweep.loadtest.frontier.points import frontier_of, option_of
from onesweep.loadtest.frontier.worth import Ranking, ranking_of, read_ranking
from onesweep.loadtest.latency.interleave import Sample
from onesweep.loadtest.quality.generation import parse_arms
from onesweep.loadtest.quality.panel import AT_HUMAN_ENTROPY, GRAMS, JUDGED, QualityRow
from onesweep.loadtest.report.table import Estimate
from onesweep.serving.modes import MODES
from onesweep.stages.errors import InputError


def row(spec: str, bits: float, grams: float = 9.0, matched: float | None = None, **values: Any) -> dict[str, Any]:
    figures = {JUDGED: Estimate(bits, bits - 0.1, bits + 0.1), GRAMS: Estimate(grams)}
    figures |= {AT_HUMAN_ENTROPY: Estimate(matched)} if matched is not None else {}
    values = {"temperature": None if spec == "human" else 0.8, **values}
    return QualityRow(spec.partition(":")[0], spec=spec, figures=figures, **values).to_record()


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"quality": "run", "judge": "judge", "weights": {"ar": "a" * 64}, "rows": [*rows, row("human", 1.5, 9.0)]}


def bits(ranking: Ranking) -> dict[str, float]:
    return {worth.arm.label: worth.bits for worth in ranking.worths}


def test_one_temperature() -> None:
    ranking = ranking_of(record(row("local", 2.5), row("chunked", 4.0, chunk=32), row("verified", 2.0, scorer="ar")))
    assert bits(ranking) == {
        "local:temperature=0.8": 2.5,
        "chunked:chunk=32:temperature=0.8": 4.0,
        "verified:ar:temperature=0.8": 2.0,
    }
    assert (ranking.basis, ranking.human_bits, ranking.judge) == (JUDGED, 1.5, "judge")
    assert (ranking.worths[0].low, ranking.worths[0].high) == pytest.approx((2.4, 2.6))


def test_temperatures_where_none_is_matched_give_way_to_the_one_of_human_variety() -> None:
    cold = [row(f"{m}:temperature=0.5", 1.0, grams=7.0, temperature=0.5) for m in ("local", "ar")]
    warm = [row(f"{m}:temperature=0.9", 2.0, grams=8.9, temperature=0.9) for m in ("local", "ar")]
    ranking = ranking_of(record(*cold, *warm))
    assert bits(ranking) == {"local:temperature=0.9": 2.0, "ar:temperature=0.9": 2.0}


def test_matched_bits_are_taken_where_all_have_them() -> None:
    rows = [row(f"ar:temperature={t}", b, g, 2.2, temperature=t) for t, b, g in ((0.8, 2.0, 8.0), (1.0, 2.3, 9.1))]
    ranking = ranking_of(record(*rows))
    assert (bits(ranking), ranking.basis) == ({"ar:temperature=1.0": 2.2}, AT_HUMAN_ENTROPY)
    assert ranking_of(record(*rows, row("local", 2.5))).basis == JUDGED


def test_infill_and_auto_answer_other_questions() -> None:
    ranking = ranking_of(record(row("infill", 1.0), row("auto:budget_ms=100", 1.0), row("ar", 2.0)))
    assert list(bits(ranking)) == ["ar:temperature=0.8"]


def test_a_choice_of_arms() -> None:
    ranking = ranking_of(record(row("local", 2.5), row("verified:ar", 2.0)))
    assert list(bits(ranking.only(parse_arms("verified:ar", MODES)))) == ["verified:ar:temperature=0.8"]
    with pytest.raises(InputError, match="'sweep': what its text is worth was not measured; there are local:temp"):
        ranking.only(parse_arms("sweep", MODES))


def test_a_frontier_is_a_ranking_too(tmp_path: Path) -> None:
    ranking = ranking_of(record(row("local", 2.5), row("resample:ar:chunk=32:candidates=8", 2.0)))
    account = {
        "sweeps": 8,
        "output_tokens": 64,
        "hosts": [{"compute_ms": 30.0}, {"compute_ms": 30.0}],
        "compute_ms": 80.0,
        "ahead_ms": 0.0,
        "batches": 1,
        "wire_bytes_total": 5000,
    }
    options = [option_of(worth, [Sample(0, 0, 100.0, account=account)]) for worth in ranking.worths]
    assert (options[1].host_ms, options[1].router_ms, options[1].sweeps) == (60.0, 20.0, 8.0)
    assert options[1].output_symbols == 64
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps(frontier_of(ranking, options).to_record()))
    again = read_ranking(path)
    assert [worth.arm for worth in again.worths] == [worth.arm for worth in ranking.worths]
    assert (bits(again), again.weights, again.basis) == (bits(ranking), ranking.weights, ranking.basis)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "no record of `onesweep bench quality"),
        ('{"quality": "check"}', "no record of `onesweep bench quality"),
        ('{"quality": "run"}', "the record is damaged"),
        ('{"quality": "run", "judge": "j", "weights": {}, "rows": [3]}', "the record is damaged"),
        ('{"quality": "run", "judge": "j", "weights": {}, "rows": []}', "no mode in it has judge bits"),
        ('{"frontier": 1}', "'options' must be a list"),
    ],
)
def test_a_bad_file(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "q.json"
    path.write_text(content)
    with pytest.raises(InputError, match=str(path)) as error:
        read_ranking(path)
    assert says in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_ranking(tmp_path / "q.json")
