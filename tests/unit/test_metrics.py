"""What is counted, under labels of our own choosing."""

from dataclasses import replace

from wsbatch.engine.metrics import EngineMetrics
from wsbatch.messages import BatchReport, Finished, Timing, Usage


def test_a_peer_chooses_no_labels() -> None:
    metrics = EngineMetrics()
    finished = Finished(1, "stop", "", Usage(1, 1), Timing(0, 0, 0, 0), BatchReport(1, 1.0, 1, 1, 0.0))
    before = metrics.render().count(b"\n")
    for number in range(100):
        metrics.count_refused(f"code {number}\n")
        metrics.observe_finished(replace(finished, finish_reason=f"reason {number}"))  # type: ignore[arg-type]
    text = metrics.render()
    assert b'wsbatch_requests_refused_total{code="other"} 100.0\n' in text
    assert b'wsbatch_request_success_total{finished_reason="other"} 100.0\n' in text
    assert text.count(b"\n") <= before + 20
    metrics.count_refused("queue_full")
    assert b'{code="queue_full"} 1.0\n' in metrics.render()
