"""docs/protocol.md says what the code does: codes, fields, defaults, refused names, and every example."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args

import pytest

from wsbatch.errors import BY_CODE
from wsbatch.messages import (
    Accepted,
    BatchSnapshot,
    BatchStep,
    DrainingNotice,
    Failed,
    Finished,
    GenerateRequest,
    Hello,
    Pong,
    RowPhase,
    SamplingParams,
    Started,
    Status,
    Tokens,
)
from wsbatch.text.codec import ROLES
from wsbatch.wire import JSON, DecodeError
from wsbatch.wire.unsupported import EMPTY, IN_MESSAGE, PARAMETERS, SURROUNDING, TUNING

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def section(title: str) -> str:
    _, _, rest = TEXT.partition(f"\n{title}\n")
    assert rest, title
    return re.split(r"\n#+ ", rest, maxsplit=1)[0]


def tables(title: str) -> list[list[list[str]]]:
    """The cells of the section's tables, below their heads."""
    blocks = re.findall(r"(?:^\|.*\n)+", section(title) + "\n", re.MULTILINE)
    return [
        [[cell.strip() for cell in row.strip("|").split("|")] for row in block.splitlines()[2:]] for block in blocks
    ]


def table(title: str) -> list[list[str]]:
    """The section's first table."""
    return tables(title)[0]


def test_the_errors() -> None:
    documented = [tuple(row[:3]) for row in table("## Errors")]
    assert documented == [(f"`{code}`", str(error.status), str(error.close_code)) for code, error in BY_CODE.items()]


def test_the_close_codes() -> None:
    documented = {int(row[0]) for row in table("## Close codes")}
    assert {error.close_code for error in BY_CODE.values()} <= documented


def test_the_fields_of_generate_and_their_defaults() -> None:
    specs = [spec for cls in (GenerateRequest, SamplingParams) for spec in fields(cls) if spec.name != "sampling"]
    documented = {row[0].strip("`"): row[3] for row in table("### `generate`")}
    assert set(documented) == {spec.name for spec in specs}
    assert documented.pop("id") == "required"
    for spec in specs:
        if spec.name != "id":
            assert documented[spec.name] == ("—" if spec.default is None else f"`{json_number(spec.default)}`")


def test_the_roles() -> None:
    (sentence,) = re.findall(r"`role` is (.*?), `content`", section("### `generate`"), re.DOTALL)
    assert tuple(re.findall(r"`(\w+)`", sentence)) == ROLES


def json_number(value: object) -> str:
    """As one would write it: 0 for 0.0."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("hello", Hello),
        ("accepted", Accepted),
        ("tokens", Tokens),
        ("finished", Finished),
        ("error", Failed),
        ("draining", DrainingNotice),
        ("pong", Pong),
        ("started", Started),
        ("status", Status),
        ("batch", BatchSnapshot),
    ],
)
def test_the_fields_from_the_server(title: str, message: type) -> None:
    rows = {row[0].strip("`"): row[2] for row in table(f"### `{title}`")}
    assert set(rows) == {spec.name for spec in fields(message)}
    for spec in fields(message):
        if hasattr(spec.type, "__dataclass_fields__"):
            assert [part.name for part in fields(spec.type) if f"`{part.name}`" not in rows[spec.name]] == []
            assert all(part.default is MISSING or part.default == 0 for part in fields(spec.type))


def test_the_fields_and_phases_of_a_step_of_the_batch() -> None:
    text = section("### `batch`")
    assert [name for spec in fields(BatchStep) if (name := f"`{spec.name}`") not in text] == []
    assert [phase for phase in get_args(RowPhase) if f"`{phase}`" not in text] == []


def listed(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def passing(neutral: tuple[object, ...]) -> str:
    values = " or ".join(f"`{json.dumps(value)}`" for value in neutral)
    return "empty" if neutral == EMPTY else values or "—"


def test_the_names_refused() -> None:
    refused, tuning, in_message = tables("## Parameters of other servers")
    assert refused == [[row.what, passing(row.neutral), listed(row.names)] for row in PARAMETERS]
    assert tuning == [[listed(switches), listed(names)] for switches, names in TUNING.items()]
    assert in_message == [[passing(row.neutral), listed(row.names)] for row in IN_MESSAGE]
    assert listed(SURROUNDING) in section("## Parameters of other servers")


def examples() -> list[str]:
    blocks = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    return [frame for block in blocks for frame in re.split(r"\n(?=\{)", block.strip())]


@pytest.mark.parametrize("frame", examples())
def test_the_examples(frame: str) -> None:
    if json.loads(frame)["type"] in ("generate", "cancel", "ping", "get_status", "watch", "unwatch"):
        JSON.decode_client(frame)
    else:
        assert JSON.decode_server(frame) is not None


def test_the_transcript() -> None:
    timing = '"timing":{"queue_ms":1,"prefill_ms":1,"ttft_ms":1,"total_ms":1}'
    refused = None
    for line in section("## A transcript").replace('"timing":{…}', timing).splitlines():
        if line.startswith("> "):
            try:
                JSON.decode_client(line[2:])
            except DecodeError as exc:
                refused = exc
        elif line.startswith("< "):
            answer = JSON.decode_server(line[2:])
            assert answer is not None
            if refused is not None:
                assert isinstance(answer, Failed)
                assert (answer.id, answer.code, answer.message) == (refused.id, refused.error.code, str(refused))
                refused = None
    assert refused is None
