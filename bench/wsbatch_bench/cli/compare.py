"""`wsbatch-bench compare`: results of several loads as one table."""

import argparse
import json
from pathlib import Path
from typing import Any

from wsbatch.cli.parsing import Commands, add_parser, say_error

_DESCRIPTION = """\
Print the results that `load --save-result` wrote as one table (Markdown), for servers that were
given the same trace. Runs of different traces, and invalid ones, are marked.
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
        say_error("wsbatch-bench compare", repr(error))
        return 2
    return 0


def table(results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Markdown lines; raises KeyError for a result that `load` did not write."""
    first = results[0][1]["wsbatch"]["trace_sha256"]
    lines = [
        "| " + " | ".join(["result", "server", "rate", *_COLUMNS, "answered", "notes"]) + " |",
        "|---|---" + "|--:" * (len(_COLUMNS) + 2) + "|---|",
    ]
    for name, result in results:
        own = result["wsbatch"]
        notes = [*own["invalid"]] + ([] if own["trace_sha256"] == first else ["another trace"])
        if own["stability"]["verdict"] != "stable":
            notes.append(own["stability"]["verdict"])
        cells = [name, result["backend"], str(result["request_rate"])]
        cells += ["∞" if result[key] is None else f"{result[key]:,.3g}" for key in _COLUMNS.values()]
        cells += [f"{result['completed']}/{own['sent']}", "; ".join(notes)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
