"""Peers over OpenAI-compatible HTTP, against a small server in memory; and the calibration that guards every load."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from math import isnan
from pathlib import Path
from typing import Any

import h11
import pytest
import tokenizers
import trio
from trio.testing import MockClock

from wsbatch.messages import SamplingParams
from wsbatch.testing import MemoryListener, MemoryStream
from wsbatch_bench.cli import main as bench_main
from wsbatch_bench.cli.calibrate import Calibration, load_calibration, measure_client
from wsbatch_bench.cli.compare import table
from wsbatch_bench.load.generator import LoadPlan, LoadRun, run_load
from wsbatch_bench.load.openai_target import OpenAiTarget, TextPrompts
from wsbatch_bench.load.results import result_json, summary_lines
from wsbatch_bench.load.summary import summarise
from wsbatch_bench.sampling import GREEDY
from wsbatch_bench.sweep.setting import Setting
from wsbatch_bench.sweep.stage import open_virtual_target, run_virtual

from .harness import COSTS, short_trace

Answer = Callable[[dict[str, object]], list[bytes]]


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def well_behaved(body: dict[str, object]) -> list[bytes]:
    """As llama.cpp does: usage at the end only."""
    tokens = body["max_tokens"]
    assert isinstance(tokens, int)
    finish = event(choices=[{"text": "", "finish_reason": "length"}])  # no token comes with this one
    last = event(choices=[], usage={"completion_tokens": tokens})
    return [*(event(choices=[{"text": "x"}]) for _ in range(tokens)), finish, last, b"data: [DONE]\n\n"]


def by_characters(body: dict[str, object]) -> list[bytes]:
    """As transformers does: a token that is half a character has no event; the usage comes with the finish."""
    tokens = body["max_tokens"]
    assert isinstance(tokens, int)
    usage = {"prompt_tokens": 20, "completion_tokens": tokens}
    finish = event(choices=[{"text": "", "finish_reason": "length"}], usage=usage)
    return [*(event(choices=[{"text": "é"}]) for _ in range(tokens // 2)), finish]


def merging(body: dict[str, object]) -> list[bytes]:
    """As vLLM under load does: several tokens in one event, usage with each."""
    tokens = body["max_tokens"]
    assert isinstance(tokens, int)
    first = event(choices=[{"text": "x"}], usage={"completion_tokens": 1})
    return [first, event(choices=[{"text": "yz"}], usage={"completion_tokens": tokens}), b"data: [DONE]\n\n"]


def in_one_piece(body: dict[str, object]) -> list[bytes]:
    """As a server that does not stream, behind one that does."""
    return [event(choices=[{"text": "wxyz"}]), event(choices=[], usage={"completion_tokens": body["max_tokens"]})]


def in_chunks(body: dict[str, object]) -> list[bytes]:
    """Five tokens in each event, and usage at the end only."""
    tokens = body["max_tokens"]
    assert isinstance(tokens, int)
    last = event(choices=[], usage={"completion_tokens": tokens})
    return [*(event(choices=[{"text": "vwxyz"}]) for _ in range(tokens // 5)), last]


@asynccontextmanager
async def peer(answer: Answer, *, status: int = 200, **options: Any) -> AsyncIterator[OpenAiTarget]:
    listener = MemoryListener()

    async def serve(stream: MemoryStream) -> None:
        connection = h11.Connection(h11.SERVER)
        body = b""
        while not isinstance(each := connection.next_event(), h11.EndOfMessage):
            if each is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some())
            elif isinstance(each, h11.Data):
                body += bytes(each.data)
        headers = [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")]
        with suppress(trio.BrokenResourceError):  # the client has heard enough
            await stream.send_all(connection.send(h11.Response(status_code=status, headers=headers)) or b"")
            for chunk in answer(json.loads(body)):
                await trio.sleep(0.1)
                for part in (chunk[:7], chunk[7:]):  # events are cut anywhere
                    await stream.send_all(connection.send(h11.Data(data=part)) or b"")
            await stream.send_all(connection.send(h11.EndOfMessage()) or b"")
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield OpenAiTarget("m", dial=listener.connect, host="peer", path="/v1/completions", **options)
        nursery.cancel_scope.cancel()


async def load(target: OpenAiTarget, *, output: int = 4, sampling: SamplingParams = GREEDY) -> LoadRun:
    trace = short_trace(6, "constant", output=output)
    return await run_load(target, LoadPlan(trace=trace, rate=1.0, warmup=0, measured=6, sampling=sampling))


@pytest.mark.parametrize("answer", [well_behaved, merging, by_characters])
async def test_tokens_of_a_peer_are_counted_not_its_events(autojump_clock: MockClock, answer: Answer) -> None:
    async with peer(answer) as target:
        run = await load(target)
    assert [record.tokens for record in run.records] == [4] * len(run.records)
    assert all(record.ok and record.reported_tokens == 4 for record in run.records)
    assert run.records[0].ttft_s == pytest.approx(0.1)
    summary = summarise(run)
    assert summary.invalid == ()
    assert summary.server_tokens is None


async def test_a_peer_that_does_not_stream_has_no_time_per_token(autojump_clock: MockClock) -> None:
    async with peer(in_one_piece) as target:
        run = await load(target)
    summary = summarise(run, goodput={"tpot": 60.0})
    assert summary.invalid == ()
    assert summary.tpot_undefined == 6
    assert isnan(summary.tpot.p50)
    assert isnan(summary.itl.longest)
    assert summary.goodput == 0  # it has not shown its pace
    *_, row = table([("peer", result_json(run, summary, backend="openai", model="m"))])
    assert row.count("| – ") == 4
    assert "6 of 6 answers have no time per token" in row


async def test_chunks_of_unknown_size_are_said_and_mark_the_time_per_token(autojump_clock: MockClock) -> None:
    """Twenty tokens in four chunks, one each 100 ms: 15 tokens after the first chunk in 0.3 s."""
    async with peer(in_chunks) as target:
        run = await load(target, output=20)
    summary = summarise(run)
    assert summary.invalid == ()
    assert summary.tpot.p50 == pytest.approx(0.02)
    assert summary.itl.p50 == pytest.approx(0.1)
    assert (summary.tpot_undefined, summary.tpot_estimated) == (0, 6)
    text = "\n".join(summary_lines(run, summary))
    assert "~20.0" in text
    assert "the server does not say how many" in text
    *_, row = table([("peer", result_json(run, summary, backend="openai", model="m"))])
    assert "| ~20 |" in row
    async with peer(well_behaved) as target:  # a token an event: nothing is guessed
        assert summarise(await load(target, output=20)).tpot_estimated == 0
    async with peer(merging) as target:  # several, and how many is said with each
        assert summarise(await load(target, output=20)).tpot_estimated == 0


async def test_a_peers_cached_tokens_are_read(autojump_clock: MockClock) -> None:
    def cached(body: dict[str, object]) -> list[bytes]:
        usage = {"prompt_tokens": 20, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 15}}
        return [event(choices=[{"text": "x"}], usage=usage), event(choices=[], usage={"completion_tokens": 4})]

    async with peer(cached) as target:
        summary = summarise(await load(target))
    assert (summary.cache_hits, summary.cached_share) == (6, 0.75)


async def test_a_peer_that_stops_short_makes_the_run_invalid(autojump_clock: MockClock) -> None:
    def short(body: dict[str, object]) -> list[bytes]:
        return well_behaved(body | {"max_tokens": 2})

    async with peer(short) as target:
        summary = summarise(await load(target))
    assert "did not get exactly the tokens" in summary.invalid[0]


async def test_an_error_of_a_peer_is_a_failure(autojump_clock: MockClock) -> None:
    async with peer(lambda _: [b"overloaded"], status=503) as target:
        run = await load(target)
    assert {record.error for record in run.records} == {"http_503"}
    async with peer(lambda _: [event(error={"message": "out of memory"})]) as target:
        run = await load(target)
    assert {record.error for record in run.records} == {"server_error"}


async def test_a_peer_that_is_not_there_is_a_failure(autojump_clock: MockClock) -> None:
    async def refuse() -> trio.abc.Stream:
        raise ConnectionRefusedError("nobody listens")

    run = await load(OpenAiTarget("m", dial=refuse, host="peer", path="/"))
    assert {record.error for record in run.records} == {"ConnectionRefusedError"}


async def test_a_peer_that_counts_another_prompt_did_not_do_the_same_work(autojump_clock: MockClock) -> None:
    def other(body: dict[str, object]) -> list[bytes]:
        return [event(choices=[{"text": "x"}], usage={"prompt_tokens": 21, "completion_tokens": 4})]

    async with peer(other) as target:
        run = await load(target)
    assert {record.error for record in run.records} == {"prompt_length"}


async def test_fields_that_a_peer_refuses_are_left_out_and_others_added(autojump_clock: MockClock) -> None:
    bodies: list[dict[str, object]] = []

    def keep(body: dict[str, object]) -> list[bytes]:
        bodies.append(body)
        return well_behaved(body)

    async with peer(keep, extra={"min_tokens": None, "ignore_eos": None, "top_k": 1}) as target:
        await load(target)
    assert bodies[0].keys() >= {"prompt", "max_tokens", "stream"}
    assert bodies[0].keys().isdisjoint({"min_tokens", "ignore_eos"})
    assert bodies[0]["top_k"] == 1
    assert bodies[0]["prompt"] == list(short_trace(6).prompt_ids(0, 20))


async def test_a_peer_is_asked_to_sample_as_the_load_does(autojump_clock: MockClock) -> None:
    bodies: list[dict[str, object]] = []

    def keep(body: dict[str, object]) -> list[bytes]:
        bodies.append(body)
        return well_behaved(body)

    async with peer(keep) as target:
        greedy = await load(target)
        sampled = await load(target, sampling=SamplingParams(temperature=0.7, top_p=0.9))
    assert bodies[0]["temperature"] == 0
    assert "top_p" not in bodies[0]
    assert (bodies[-1]["temperature"], bodies[-1]["top_p"]) == (0.7, 0.9)
    assert len({body["seed"] for body in bodies[len(greedy.records) :]}) == len(sampled.records)
    rows = table(
        [(name, result_json(run, summarise(run), backend="openai", model="m")) for name, run in
         (("one", greedy), ("other", sampled))]
    )  # fmt: skip
    assert "| one | openai | greedy |" in rows[2]
    assert "| other | openai | temperature 0.7, top_p 0.9 |" in rows[3]


@pytest.mark.parametrize("bos", [False, True])
async def test_text_prompts_are_of_the_same_number_of_tokens(
    autojump_clock: MockClock, tmp_path: Path, bos: bool
) -> None:
    file, tokenizer = small_tokenizer(tmp_path, bos=bos)
    bodies: list[dict[str, object]] = []

    def keep(body: dict[str, object]) -> list[bytes]:
        bodies.append(body)
        return by_characters(body)

    async with peer(keep, make_prompt=TextPrompts(file)) as target:
        run = await load(target)
    assert all(record.ok for record in run.records)
    texts = [str(body["prompt"]) for body in bodies]
    assert {len(tokenizer.encode(text).ids) for text in texts} == {20}
    assert len(set(texts)) == len(texts)


def small_tokenizer(folder: Path, *, bos: bool) -> tuple[Path, tokenizers.Tokenizer]:
    """A byte-level one that knows four words, and writes a BOS before every text or does not."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" one two three four"] * 4, trainer)
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json", tokenizer


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--extra-body", "[1]"], "must be an object, got '[1]'"),
        (["--extra-body", "{"], "must be JSON"),
        (["--text-prompts", "no/such/file"], "no/such/file: not a tokenizer"),
    ],
)
def test_flags_for_peers_are_checked(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_main(["load", "http://peer/v1/completions", "--model", "m", *flags])
    assert complaint in capsys.readouterr().err


def test_a_vocabulary_without_words_makes_no_prompts(tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(ValueError, match="no token is a space and a word"):
        TextPrompts(tmp_path / "empty.json")


def test_two_results_in_one_table() -> None:
    async def main() -> list[str]:
        results = []
        async with peer(well_behaved) as target:
            run = await load(target)
            results.append(("peer", result_json(run, summarise(run), backend="openai", model="m")))
        async with open_virtual_target(Setting("dynamic", 4).config(model="simulated"), COSTS) as (ours, _):
            run = await run_load(ours, run.plan)
            results.append(("ours", result_json(run, summarise(run), backend="wsbatch", model="m")))
        json.dumps(results, allow_nan=False)
        return table(results)

    head, _, first, second = run_virtual(main)
    assert head.count("|") == first.count("|") == second.count("|")
    assert "another trace" not in first + second
    assert "| peer | openai | greedy | 1.0 |" in first


def test_a_client_is_not_asked_for_more_than_half_of_its_floor() -> None:
    known = Calibration(frames_per_s=20_000, ttft_p50_s=0.001, ttft_p95_s=0.002, machine="m", date="d")
    assert known.refusal(100.0, 99.0) is None
    refusal = known.refusal(100.0, 101.0)
    assert refusal is not None
    assert "at most 10,000" in refusal


def test_calibration_counts_frames_and_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("WSBATCH_CACHE", str(tmp_path))
    assert load_calibration() is None

    async def main() -> Calibration:
        async with open_virtual_target(Setting("dynamic", 16).config(model="simulated"), COSTS) as (target, _):
            return await measure_client(target, stream_tokens=50)

    measured = run_virtual(main)
    assert measured.frames_per_s > 100
    assert measured.ttft_p50_s == pytest.approx(0.0101)  # tau, and one prompt token
    measured.save()
    assert load_calibration() == measured
