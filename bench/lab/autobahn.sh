#!/usr/bin/env bash
# The Autobahn testsuite's fuzzing client against our WebSocket transport with an echo session: groups 1 to 7 and 10.
#
#   PYTHON27=/path/to/python2.7 bench/lab/autobahn.sh [RESULTS]
#
# The suite runs on CPython 2.7 only, which Debian no longer has (pyenv builds it). It is installed with pip into
# RESULTS/lib on the first run; reports go to RESULTS/reports. Exits non-zero unless every case passed.
set -euo pipefail
cd "$(dirname "$0")"

python27=${PYTHON27:-python2.7}
python=${PYTHON:-python3}
results=$(realpath -m "${1:-../../build/autobahn}")
mkdir -p "$results"

if [ ! -e "$results/lib/autobahntestsuite" ]; then
    "$python27" -m pip install --quiet --target "$results/lib" "autobahntestsuite==25.10.1"
fi
# zope is a namespace package, which a folder that is no site-packages does not have.
touch "$results/lib/zope/__init__.py"

mkfifo "$results/address.$$"
"$python" echo_server.py >"$results/address.$$" &
server=$!
trap 'kill $server; rm -f "$results/address.$$"' EXIT
read -r _ _ url <"$results/address.$$"

cat >"$results/spec.json" <<SPEC
{
  "outdir": "$results/reports",
  "servers": [{"agent": "wsbatch", "url": "$url"}],
  "cases": ["1.*", "2.*", "3.*", "4.*", "5.*", "6.*", "7.*", "10.*"],
  "exclude-cases": [],
  "exclude-agent-cases": {}
}
SPEC
cd "$results"
PYTHONPATH="$results/lib" "$python27" -c 'from autobahntestsuite.wstest import run; run()' \
    --mode fuzzingclient --spec spec.json >wstest.log 2>&1

"$python" - "$results/reports/index.json" <<'COUNT'
import collections, json, sys

cases = json.load(open(sys.argv[1]))["wsbatch"]
counts = collections.Counter(case["behavior"] for case in cases.values())
counts.update(f"closing {case['behaviorClose']}" for case in cases.values() if case["behaviorClose"] != "OK")
print(f"{len(cases)} cases:", ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
for name, case in cases.items():
    if case["behavior"] != "OK" or case["behaviorClose"] != "OK":
        print(f"  {name}: {case['behavior']}, closing {case['behaviorClose']}")
good = {"OK", "NON-STRICT", "INFORMATIONAL"}
sys.exit(len(cases) != 247 or any(not {case["behavior"], case["behaviorClose"]} <= good for case in cases.values()))
COUNT
