"""clients/web/wsbatch.d.ts names the fields that the messages have, and no others."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from wsbatch.messages import (
    Accepted,
    BatchReport,
    BatchSnapshot,
    BatchStep,
    DrainingNotice,
    Finished,
    GenerateRequest,
    Hello,
    Limits,
    SamplingParams,
    Timing,
    Tokens,
    Usage,
)

TYPES = (Path(__file__).parents[2] / "clients" / "web" / "wsbatch.d.ts").read_text()

# Fields of maps within a frame stand in the frame's own interface.
INTERFACES = {
    "GenerateRequest": (GenerateRequest, SamplingParams),
    "Accepted": (Accepted,),
    "Tokens": (Tokens,),
    "Finished": (Finished, Usage, Timing, BatchReport),
    "BatchFrame": (BatchSnapshot, BatchStep),
    "Hello": (Hello, Limits),
    "Draining": (DrainingNotice,),
}
# The client chooses the id; sampling parameters stand in the frame itself.
NOT_ON_THE_WIRE = {"GenerateRequest": {"id", "sampling"}}


@pytest.mark.parametrize("name", INTERFACES)
def test_an_interface_has_the_fields_of_its_message(name: str) -> None:
    (body,) = re.findall(rf"^export interface {name} {{\n(.*?)^}}", TYPES, re.MULTILINE | re.DOTALL)
    code = re.sub(r"/\*.*?\*/|\[.*?\]", "", body, flags=re.DOTALL)
    named = {field for field, _ in re.findall(r"(\w+)(\?)?:", code)} - {"type"}
    assert named == {spec.name for cls in INTERFACES[name] for spec in fields(cls)} - NOT_ON_THE_WIRE.get(name, set())


@pytest.mark.parametrize("name", ["Hello", "Tokens", "Finished", "BatchFrame"])
def test_a_field_that_may_be_absent_is_optional(name: str) -> None:
    (body,) = re.findall(rf"^export interface {name} {{\n(.*?)^}}", TYPES, re.MULTILINE | re.DOTALL)
    optional = set(re.findall(r"(\w+)\?:", body))
    frame = INTERFACES[name][0]
    assert {spec.name for spec in fields(frame) if spec.default is None} <= optional, "a field of null is not sent"
    assert not {spec.name for spec in fields(frame) if spec.default is MISSING} & optional
