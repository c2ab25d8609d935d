"""The plan of a pool: the simulation by events against the whole stack, and the search for the number of replicas."""

from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean

import pytest
import trio

from replicas import Compared, RealPoolStage, capacity_line
from virtual_replica import VirtualReplica
from wsbatch.batching.costs import CostModel
from wsbatch.client import open_client
from wsbatch.config import ServerConfig
from wsbatch.messages import GenerateRequest, SamplingParams
from wsbatch.pool import open_pool
from wsbatch.server.serve import Server
from wsbatch.testing import MemoryListener
from wsbatch_bench.cli import main
from wsbatch_bench.load.generator import LoadPlan, LoadRun, run_load
from wsbatch_bench.load.record import Record
from wsbatch_bench.load.specs import parse_arrivals, parse_lengths
from wsbatch_bench.load.summary import summarise
from wsbatch_bench.load.target import open_websocket_target
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.plan.planner import Planner, PoolCapacity, Workload, by_rule, capacity, find, routers_for
from wsbatch_bench.plan.pool_sim import EventReplica, PoolStage
from wsbatch_bench.sweep.cell import CellResult
from wsbatch_bench.sweep.setting import Setting, same_for_both
from wsbatch_bench.sweep.slo import parse_slo
from wsbatch_bench.sweep.stage import VirtualStage, run_virtual

from .harness import cell, short_trace

COSTS = CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0005)
STAGE = PoolStage(same_for_both(COSTS))
SLO = parse_slo("e2e_p95<=5s")
WORKLOAD = Workload(
    parse_arrivals("poisson"), parse_lengths("fixed:tokens=20"), parse_lengths("lognormal:median=8,sigma=0.8,max=40")
)


def plan(rate: float, *, warmup: int = 20, measured: int = 120, **more: bool) -> LoadPlan:
    return LoadPlan(trace=WORKLOAD.trace(1, 2000), rate=rate, warmup=warmup, measured=measured, **more)


@pytest.mark.parametrize(
    "setting",
    [
        Setting("continuous", 4),
        Setting("continuous", 4, 0.0, (("max_batch_total_tokens", 256), ("prefill_chunk_tokens", 16))),
        Setting("dynamic", 4, 20.0),
    ],
    ids=str,
)
def test_one_replica_by_events_is_the_whole_server_to_the_digit(setting: Setting) -> None:
    load = plan(20.0, measured=80)
    events, whole = STAGE.run(setting, load), VirtualStage(STAGE.costs).run(setting, load)
    for ours, theirs in zip(events.measured, whole.measured, strict=True):
        assert (ours.index, ours.scheduled_s) == (theirs.index, theirs.scheduled_s)
        assert ours.ttft_s == pytest.approx(theirs.ttft_s, abs=1e-9)
        assert ours.e2e_s == pytest.approx(theirs.e2e_s, abs=1e-9)
    ours_sum, theirs_sum = summarise(events), summarise(whole)
    assert not ours_sum.invalid
    assert ours_sum.stability == theirs_sum.stability
    assert ours_sum.mean_rows == theirs_sum.mean_rows
    assert ours_sum.waste_fraction == pytest.approx(theirs_sum.waste_fraction)


def whole_pool(setting: Setting, load: LoadPlan, replicas: int) -> LoadRun:
    """Client, router and replicas as they are, in virtual time."""

    async def run() -> LoadRun:
        config = setting.config(model="simulated")
        servers = {name: VirtualReplica(config, costs=COSTS) for name in "abcdefgh"[:replicas]}
        listener = MemoryListener()

        @asynccontextmanager
        async def connect():  # type: ignore[no-untyped-def]
            async with open_client(await listener.connect(), "virtual", keepalive_s=None) as client:
                yield client

        async with trio.open_nursery() as nursery:
            for server in servers.values():
                await nursery.start(server.run)
            async with open_pool({name: server.dial for name, server in servers.items()}) as pool:
                while any(replica.state != "ready" for replica in pool.replicas.values()):  # noqa: ASYNC110
                    await trio.sleep(0.01)
                router = Server(pool, ServerConfig(frame_interval_ms=0.0), addresses=[("127.0.0.1", 1)])
                await nursery.start(router.run, [listener])
                async with open_websocket_target(connect, dial=listener.connect, host="v", connections=1) as target:
                    done = await run_load(target, load)
                nursery.cancel_scope.cancel()
        return done

    return run_virtual(run)


def test_three_replicas_by_events_agree_with_router_and_servers() -> None:
    """Not to the digit: a router asks each replica at times of its own, and one request placed otherwise changes what
    comes after it. Busy replicas, so that it matters where a request goes: placed at random they are far off."""
    setting, load = Setting("continuous", 2), plan(33.0, warmup=40, measured=160)
    events = PoolStage(STAGE.costs, 3).run(setting, load)
    whole = whole_pool(setting, load, 3)
    alike = [fmean(record.e2e_s for record in run.measured) for run in (events, whole)]
    assert alike[0] == pytest.approx(alike[1], rel=0.05)
    first, second = summarise(events), summarise(whole)
    assert first.ttft.p95.value == pytest.approx(second.ttft.p95.value, rel=0.15)
    assert first.e2e.p95.value == pytest.approx(second.e2e.p95.value, rel=0.1)


def test_a_replica_tells_its_work_as_the_server_does() -> None:
    """Prompt and output of what waits; of what runs, the output that is left."""
    events: list[tuple[float, Callable[[float], None]]] = []
    replica = EventReplica(
        Setting("continuous", 1).config(model="simulated"),
        COSTS,
        schedule=lambda at_s, act: events.append((at_s, act)),
        ended=lambda record, now_s: None,
    )
    told = []
    for index in range(2):
        request = GenerateRequest(token_ids=(0,) * 20, sampling=SamplingParams(max_tokens=3))
        replica.add(request, Record(index, 20, 3, 0.0), 0.0)
        told.append(replica.work_tokens)
    while events:
        at_s, act = events.pop(0)
        act(at_s)
        told.append(replica.work_tokens)
    assert told == [3, 3 + 23, 2 + 23, 1 + 23, 3, 2, 1, 0]
    assert at_s == pytest.approx(2 * (0.020 + 2 * 0.011))


def test_equal_runs_are_equal_and_a_pool_waits_less_than_its_parts() -> None:
    setting = Setting("continuous", 2)
    pool, again = (summarise(PoolStage(STAGE.costs, 4).run(setting, plan(44.0, measured=400))) for _ in range(2))
    assert pool == again
    alone = summarise(STAGE.run(setting, plan(11.0, measured=400)))
    assert pool.ttft.mean < 0.7 * alone.ttft.mean


def test_routers_hear_late_of_each_others_requests() -> None:
    setting, load = Setting("continuous", 2), plan(44.0, measured=400)
    one, many = (summarise(PoolStage(STAGE.costs, 4, routers).run(setting, load)) for routers in (1, 16))
    assert many.ttft.mean > 1.2 * one.ttft.mean


def test_what_no_replica_has_room_for_is_refused_and_overload_is_stopped() -> None:
    run = PoolStage(STAGE.costs, 2).run(
        Setting("continuous", 1, 0.0, (("max_queue_requests", 3),)), plan(200.0, measured=300)
    )
    errors = summarise(run).errors
    assert errors["queue_full"] > 100
    assert len(run.measured) == 300
    overload = PoolStage(STAGE.costs, 2).run(Setting("continuous", 1), plan(200.0, measured=300, stop_unstable=True))
    assert overload.stopped_early
    assert summarise(overload).stability.verdict == "unstable"


@pytest.mark.parametrize("setting", [Setting("continuous", 4), Setting("dynamic", 4)], ids=str)
def test_a_closed_loop_by_events_serves_what_the_whole_server_does(setting: Setting) -> None:
    """Not to the digit: whose next request is first is decided by the order of tasks there, of events here."""
    load = LoadPlan(trace=short_trace(400, "closed:clients=8,think_ms=5"), rate=1.0, warmup=20, measured=200)
    events, whole = summarise(STAGE.run(setting, load)), summarise(VirtualStage(STAGE.costs).run(setting, load))
    assert events.request_throughput == pytest.approx(whole.request_throughput, rel=0.02)
    assert events.e2e.mean == pytest.approx(whole.e2e.mean, rel=0.02)


def test_a_client_that_is_refused_does_not_ask_at_once() -> None:
    setting = Setting("continuous", 1, 0.0, (("max_queue_requests", 1),))
    load = LoadPlan(trace=short_trace(99, "closed:clients=4"), rate=1.0, warmup=0, measured=20)
    assert 0 < summarise(STAGE.run(setting, load)).errors["queue_full"] < 20


@dataclass(frozen=True)
class Known(Planner):
    """A replica that truly carries `truth` requests a second, whatever the pool; on another trace a bit less."""

    truth: float = 10.0
    truth_on_another: float = 10.0
    asked: list[tuple[int, float]] = field(default_factory=list)

    def measure(self, replicas: int, rate: float, *, another: bool = False) -> CellResult:
        self.asked.append((replicas, rate))
        truth = self.truth_on_another if another else self.truth
        return cell(rate=rate, verdict="stable" if rate <= replicas * truth else "unstable")


def known(**fields: float) -> Known:
    return Known(STAGE.costs, Setting("continuous", 4), SLO, WORKLOAD, 400, **fields)  # type: ignore[arg-type]


def test_the_capacity_of_a_pool_is_found_by_bisection() -> None:
    planner = known()
    found = capacity(planner, 2)
    assert found.passed <= 20.0 < found.missed <= 1.03 * found.passed
    assert found.at is not None
    assert found.at.rate == found.passed == 2 * found.share
    assert max(rate for _, rate in planner.asked) < 2 * planner.most


def test_nothing_can_exceed_what_full_steps_give() -> None:
    """Two rows always busy: decodes share a step of 12 ms, 20 prompt tokens cost 10 ms; closed-form and simulated."""
    planner = Planner(
        STAGE.costs,
        Setting("continuous", 2),
        SLO,
        Workload(parse_arrivals("poisson"), parse_lengths("fixed:tokens=20"), parse_lengths("fixed:tokens=10")),
        400,
    )
    assert planner.most == pytest.approx(1 / (9 * 0.006 + 0.010))
    below, above = planner.measure(1, 0.9 * planner.most), planner.measure(1, 1.1 * planner.most)
    assert (below.verdict, above.verdict) == ("stable", "unstable")
    assert above.request_throughput <= planner.most


@pytest.mark.parametrize("first", [4, 7, 8, 12])
def test_the_fewest_replicas_are_found_from_any_guess(first: int) -> None:
    planner = known()
    answer = find(planner, 75.0, first)
    assert answer is not None
    assert (answer.replicas, answer.too_few, answer.simulated, answer.confirmed) == (8, 7, 8, True)
    assert all(rate == 75.0 for _, rate in planner.asked)


def test_it_must_hold_on_a_second_trace() -> None:
    answer = find(known(truth_on_another=9.0), 75.0, 8)
    assert answer is not None
    assert (answer.replicas, answer.too_few) == (9, 8)


def test_a_part_stands_for_a_pool_that_is_too_large_to_simulate() -> None:
    planner = known()
    answer = find(planner, 750.0, 76, most_tokens=planner.tokens(750.0) / 10)
    assert answer is not None
    # Fewer than the rule says are not tried: the part cannot tell a difference of one in ten.
    assert (answer.replicas, answer.too_few, answer.simulated) == (76, 0, 7)
    assert planner.asked == [(7, pytest.approx(750 * 7 / 76, rel=1e-5))] * 2
    more = find(planner, 750.0, 70, most_tokens=planner.tokens(750.0) / 10)
    assert more is not None
    assert more.replicas >= 75


def test_where_no_number_helps_there_is_no_answer() -> None:
    assert find(known(truth=0.0), 75.0, 8) is None
    assert find(known(truth_on_another=0.0), 75.0, 8) is None
    none = capacity(known(truth=0.0), 2)
    assert (none.passed, none.at, none.share) == (0.0, None, 0.0)


def test_the_rule_rounds_up() -> None:
    pool = PoolCapacity(8, (), passed=80.0, missed=82.0, at=None)
    assert [by_rule(pool, rate) for rate in (1.0, 80.0, 80.1, 100.0)] == [1, 8, 9, 10]


def test_routers_are_kept_half_idle() -> None:
    assert routers_for(300_000, 1) == ceil(300_000 / 6_500) == 47
    assert routers_for(300_000, 4) == 12


def run_cli(*argv: str) -> int:
    with pytest.raises(SystemExit) as exited:
        main(argv)
    assert isinstance(exited.value.code, int)
    return exited.value.code


SHORT = ["--prompt-lengths", "fixed:tokens=20", "--output-lengths", "fixed:tokens=8", "--num-prompts", "200"]
COST_MODEL = ["--cost-model", "tau_ms=10,alpha_ms=1,beta_ms=0.5"]


def test_a_plan_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["plan", "--rate", "60", "--slo", "ttft_p95<=200ms", *COST_MODEL, *SHORT, "--setting",
              "continuous:max_batch_size=4", "--pools", "1,2"]  # fmt: skip
    assert run_cli(*wanted) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    answer = next(line for line in lines if line.startswith("answer"))
    replicas = int(answer.split()[1])
    assert 2 <= replicas <= 4
    assert "seen on two traces" in answer
    assert f"--ray auto --replicas {replicas + 1}" in printed
    assert f"ws://MACHINE-{replicas + 1}:8765" in printed
    assert f"{'':11}{replicas + 1} with one to spare" in lines[lines.index(answer) + 1]
    verdicts = [line.split()[-1] for line in lines if line.strip().startswith(f"{replicas} ") and "60" in line.split()]
    assert verdicts.count("pass") >= 2
    assert run_cli(*wanted, "--jobs", "2") == 0
    assert capsys.readouterr().out == printed

    assert run_cli(*wanted, "--whole-tokens", "800") == 0
    assert "extrapolated: a pool of 1 with its share" in capsys.readouterr().out
    assert run_cli(*[each.replace("200ms", "1ms") for each in wanted]) == 4
    assert "answer     none" in capsys.readouterr().out


def test_a_replayed_trace_is_planned_for(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.jsonl"
    draw_trace(900, prompts=parse_lengths("fixed:tokens=20"), outputs=parse_lengths("fixed:tokens=8")).save(path)
    assert run_cli("plan", "--rate", "20", "--slo", "ttft_p95<=1s", *COST_MODEL, "--trace", str(path), "--pools", "1",
                   "--num-prompts", "200") == 0  # fmt: skip
    printed = capsys.readouterr().out
    assert "a trace, replayed" in printed
    assert "seen on the trace" in printed


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--rate", "0"], "must be a number of at least 1e-06"),
        (["--slo", "soon"], "must be METRIC"),
        (["--cost-model", "/nowhere.json"], "No such file"),
        (["--setting", "continuous"], "max_batch_size is required"),
        (["--arrivals", "closed:clients=3"], "open loop"),
        (["--prompt-lengths", "fixed:tokens=99999"], "must be at most"),
        (["--pools", "0"], "at least 1"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said_in_one_line(
    more: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("plan", "--rate", "5", "--slo", "ttft_p95<=1s", *COST_MODEL, *SHORT, *more) == 2
    assert word in capsys.readouterr().err.splitlines()[-1]


def test_help_to_work_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "--help") == 0
    assert "example" in capsys.readouterr().out


def test_two_real_replicas_behind_a_router_answer_everything() -> None:
    """Processes and sockets: nothing is said about time."""
    stage = RealPoolStage(same_for_both(CostModel(tau_s=0.002, alpha_s=0.0, beta_s=0.0)), 2)
    load = LoadPlan(trace=short_trace(40), rate=40.0, warmup=5, measured=30)
    done = stage.run(Setting("continuous", 4), load)
    assert [record.tokens for record in done.measured] == [5] * 30
    assert all(record.ok for record in done.records)


def test_predictions_stand_beside_what_was_measured() -> None:
    def at(rate: float, *, predicted: str, measured: str) -> Compared:
        return Compared(2, rate, cell(rate=rate, e2e_p95_s=3.3, verdict=predicted), cell(rate=rate, verdict=measured))

    done = [
        at(8.0, predicted="stable", measured="stable"),
        at(9.0, predicted="stable", measured="undecided"),
        at(10.0, predicted="unstable", measured="unstable"),
    ]
    assert done[1].e2e_error == pytest.approx(0.1)
    assert done[1].throughput_error == 0.0
    assert done[1].verdicts(SLO) == ("pass", "undecided")
    assert capacity_line(SLO, done) == "2 replicas carry predicted 9 … 10, measured 8 … 9 requests/s"
