"""`wsbatch-bench compare`: results of several loads as one table."""

import argparse
import json
from pathlib import Path
from typing import Any

from wsbatch.cli.parsing import BAD_USAGE, CommandError, Commands, add_parser
from wsbatch_bench.sampling import shown_numbers

_DESCRIPTION = """\
Print the results that `load --save-result` wrote as one table (Markdown), for servers that were
given the same trace. Runs of different traces, and invalid ones, are marked. – is undefined: no
answer has a time per token, or a gap between tokens; ~ is estimated; ∞: too many requests failed.
"""

_EPILOG = """\
example:
  wsbatch-bench compare wsbatch-*.json vllm.json transformers.json
"""

_COLUMNS = {
    "requests/s": "request_throughput",
    "output tokens/s": "output_throughput",
    "TTFT p50 ms": "p50_ttft_ms",
    "TTFT p95 ms": "p95_ttft_ms",
    "per token p50 ms": "p50_tpot_ms",
    "between tokens p50 ms": "p50_itl_ms",
    "between tokens p99 ms": "p99_itl_ms",
    "longest gap ms": "max_itl_ms",
    "end to end p50 ms": "p50_e2el_ms",
    "end to end p95 ms": "p95_e2el_ms",
}


def add_command(commands: Commands) -> None:
    """Add `compare` to the command line."""
    parser = add_parser(
        commands, "compare", help="several results as one table", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="written by `load --save-result`")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the exit status."""
    try:
        results = [(path.stem, json.loads(path.read_text())) for path in arguments.results]
        print("\n".join(table(results)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(repr(error), BAD_USAGE) from error
    return 0


def table(results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Markdown lines; raises KeyError for a result that `load` did not write."""
    first = results[0][1]["wsbatch"]["trace_sha256"]
    lines = [
        "| "
        + " | ".join(["result", "server", "sampling", "stated rate", "offered/s", *_COLUMNS, "answered", "notes"])
        + " |",
        "|---|---|---" + "|--:" * (len(_COLUMNS) + 3) + "|---|",
    ]
    for name, result in results:
        own = result["wsbatch"]
        offered = own["offered"]["requests_per_s"]
        sampling = shown_numbers(own["temperature"], own["top_p"])
        cells = [name, result["backend"], sampling, str(result["request_rate"])]
        cells.append("at once" if offered is None else f"{offered:.3g}")
        cells += [_cell(result, key) for key in _COLUMNS.values()]
        notes = _notes(own, result["completed"]) + ([] if own["trace_sha256"] == first else ["another trace"])
        cells += [f"{result['completed']}/{own['sent']}", "; ".join(notes)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(result: dict[str, Any], key: str) -> str:
    own, value = result["wsbatch"], result[key]
    if value is None:
        # JSON has one word for what is infinite and what is undefined.
        none = key.endswith("_itl_ms") or (key.endswith("_tpot_ms") and own["tpot_undefined"] == result["completed"])
        return "–" if none else "∞"
    about = "~" if key.endswith("_tpot_ms") and own["tpot_estimated"] else ""
    return f"{about}{value:,.3g}"


def _notes(own: dict[str, Any], completed: int) -> list[str]:
    notes = [*own["invalid"]]
    if own["stability"]["verdict"] != "stable":
        notes.append(own["stability"]["verdict"])
    if own["tpot_undefined"]:
        notes.append(f"{own['tpot_undefined']} of {completed} answers have no time per token")
    if own["tpot_estimated"]:
        notes.append("chunks of several tokens, nobody says how many")
    if own["sent_in_all"] > own["trace_requests"]:
        notes.append(f"a trace of {own['trace_requests']} requests, over and over")
    if own["cache_hits"]:
        notes.append(f"{own['cached_share']:.0%} of the prompt tokens from its prefix cache")
    return notes
