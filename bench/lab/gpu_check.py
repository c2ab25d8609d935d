#!/usr/bin/env python3
"""Check and time the CUDA runner on this machine's GPU, in less than 8 minutes.

    pip install '.[server,bench]'
    python bench/lab/gpu_check.py --random-llama 135m       # a random Llama: no hub and no package index needed
    python bench/lab/gpu_check.py                           # the demo model
    python bench/lab/gpu_check.py --device cpu --quick --random-llama tiny      # the same code, in seconds

Each stage has its own process and its own time limit. One that fails, hangs or crashes is reported, and the next one
runs. Figures are printed as they come and written to --out after every stage.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lab_tools.gpu.choice import RANDOM_LLAMAS, Choice
from lab_tools.gpu.report import knee, summary, table
from lab_tools.gpu.stages import STAGES, Job, Skipped
from lab_tools.gpu.supervise import Outcome, supervise
from wsbatch.model.processes import keep_working_directory_off_paths


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; 1 where one of them failed."""
    keep_working_directory_off_paths()
    arguments = _parser().parse_args(argv)
    choice = Choice(arguments.model, arguments.random_llama, arguments.device, arguments.dtype)
    outcomes: dict[str, Outcome] = {}
    for name in arguments.only or STAGES:
        work, limit_s = STAGES[name]
        print(f"\n== {name}: {(work.__doc__ or '').splitlines()[0]}", flush=True)
        outcome = supervise(
            work,
            Job(choice, arguments.quick),
            limit_s=limit_s,
            # A process that has touched CUDA cannot be forked; without CUDA a fork saves importing torch each time.
            start_method="spawn" if choice.device == "cuda" else "fork",
            skipped=Skipped,
            on_row=lambda row: print(f"   {json.dumps(row)}", flush=True),
        )
        if name == "decode" and (found := knee(outcome.rows)):
            outcome.rows.append(found)
        outcomes[name] = outcome
        print("\n".join(table(outcome.rows)))
        print(f"{outcome.status} after {outcome.seconds:.1f} s", flush=True)
        results = {"choice": asdict(choice), "quick": arguments.quick}
        results["stages"] = {each: asdict(found) for each, found in outcomes.items()}
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(["", *summary(outcomes), "", f"written to {arguments.out}"]))
    return int(any(outcome.status not in ("ok", "skipped") for outcome in outcomes.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as `wsbatch serve` takes it (default: %(default)s)")
    parser.add_argument("--random-llama", choices=tuple(RANDOM_LLAMAS), help="this instead of --model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the timings"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--only", nargs="+", choices=tuple(STAGES), metavar="STAGE", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
