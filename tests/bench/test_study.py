"""The study of waiting, on workloads small enough for a test: the effects that it is there to show do show."""

from math import isfinite
from pathlib import Path

from wsbatch.batching.costs import CostModel
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.sweep.setting import Setting, same_for_both
from wsbatch_bench.sweep.stage import VirtualStage
from wsbatch_bench.sweep.study import Scenario, Study, StudyRow, draw_study, run_study, studies, study_table

STAGE = VirtualStage(same_for_both(CostModel(tau_s=0.010, alpha_s=0.0005, beta_s=0.0001)))


def rows(
    scenario: Scenario, *settings: Setting, measured: int = 120, predictor: VirtualStage | None = None
) -> list[StudyRow]:
    return list(
        run_study(
            Study("test", (scenario,), settings),
            STAGE,
            capacity=30.0,
            prompts=parse_lengths("fixed:tokens=8"),
            outputs=parse_lengths("fixed:tokens=10"),
            warmup=20,
            measured=measured,
            seed=1,
            predictor=predictor,
        )
    )


def test_a_wait_of_the_bursts_spread_helps_and_none_is_the_base() -> None:
    base, waiting = rows(
        Scenario("bursts", "bursts:k=4,spread_ms=10", 0.3), Setting("dynamic", 8), Setting("dynamic", 8, 10.0)
    )
    assert base.change.value == 0
    assert waiting.change.high < -0.10
    assert waiting.summary.mean_rows > base.summary.mean_rows


def test_in_continuous_batching_nobody_waits() -> None:
    _, continuous = rows(Scenario("Poisson", "poisson", 0.5), Setting("dynamic", 8), Setting("continuous", 8))
    assert continuous.change.high < 0
    assert continuous.summary.ttft_parts["batch_wait"] == 0


def test_a_split_closed_loop_is_mended_by_the_idle_anchor_alone() -> None:
    """Eight clients in two groups: each waits behind the other's batch, so the oldest's wait is always over."""
    anchors = [Setting("dynamic", 8, 20.0, (("wait_anchor", anchor),)) for anchor in ("oldest", "idle")]
    oldest, idle = rows(Scenario("closed", "closed:clients=8"), *anchors)
    assert oldest.summary.mean_rows < 5
    assert idle.summary.mean_rows > 7.5
    assert idle.summary.request_throughput > 1.4 * oldest.summary.request_throughput


def test_table_and_chart(tmp_path: Path) -> None:
    settings = (Setting("dynamic", 8), Setting("continuous", 8))
    found = rows(Scenario("Poisson", "poisson", 0.5), *settings, measured=30, predictor=STAGE)
    assert [row.predicted_mean_s for row in found] == [row.summary.e2e.mean for row in found]  # the stage itself
    table = study_table(found)
    assert len(table) == 4
    assert table[3].startswith("|  | continuous b8 |")
    assert "predicted mean, s" in table[0]
    draw_study(found, [tmp_path / "study.png"], title="test")
    assert (tmp_path / "study.png").stat().st_size > 1000


def test_the_studies_of_the_documentation() -> None:
    for study in studies().values():
        assert study.settings[0] == Setting("dynamic", 8)
        assert all(isfinite(scenario.fraction) for scenario in study.scenarios)
        for setting in study.settings:
            setting.config()
