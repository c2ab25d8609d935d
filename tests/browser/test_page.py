"""The page in a real browser, against a real server."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from websockets.sync.client import connect

pytestmark = pytest.mark.browser

START = Callable[..., Any]  # LiveServer
OPEN = Callable[[str], Any]  # Page


def test_a_prompt_streams_in_a_chat_and_as_a_completion(start_server: START, open_page: OPEN) -> None:
    page = open_page(start_server().url)
    page.wait_connected()
    assert page.status.startswith("simulated on ws://127.0.0.1:")
    page.fill("max_tokens", 40)
    pane = page.pane()
    pane.type("Hello" + Keys.ENTER)
    lengths = set()
    page.wait(lambda: lengths.add(len(pane.answer)) or not pane.busy, "the answer never ended")
    assert len(lengths) > 3, "it came all at once"
    first = pane.answer
    assert len(first) == 40
    assert "40 tokens" in pane.stats
    assert "tokens/s" in pane.stats
    assert "token limit" in pane.stats
    # The conversation goes on: the next prompt is longer by the first turn and its answer.
    pane.type("And then?" + Keys.ENTER)
    page.wait(lambda: not pane.busy and pane.answer not in ("", first), "no second answer")
    assert pane.log.count("Hello") == 1
    page.one("option[value=completion]", pane.element).click()
    assert pane.log == ""
    pane.type("Once upon a time")
    pane.press("send")
    page.wait(lambda: not pane.busy and len(pane.answer) == 40, "no completion")
    assert pane.log.startswith("Once upon a time")


def test_sampling_controls_reach_the_server(start_server: START, open_page: OPEN) -> None:
    page = open_page(start_server().url)
    page.wait_connected()
    page.fill("max_tokens", 12)
    page.fill("seed", 7)
    pane, texts = page.pane(), []
    for _ in range(2):
        pane.press("clear")
        pane.type("same" + Keys.ENTER)
        page.wait(lambda: not pane.busy and len(pane.answer) == 12, "no answer")
        texts.append(pane.answer)
    assert texts[0] == texts[1], "the same seed repeats the run"
    page.fill("stop", texts[0][4:6])
    pane.press("clear")
    pane.type("same" + Keys.ENTER)
    page.wait(lambda: not pane.busy and pane.answer != "", "no answer")
    assert pane.answer == texts[0][: texts[0].index(texts[0][4:6])]
    page.fill("temperature", -1)
    pane.press("clear")
    pane.type("bad" + Keys.ENTER)
    assert not pane.busy, "a value out of bounds is shown in the form and sends nothing"
    assert page.browser.execute_script("return document.querySelector('[name=temperature]').matches(':invalid')")


def test_one_of_several_is_stopped_and_the_others_go_on(start_server: START, open_page: OPEN) -> None:
    page = open_page(start_server("--scheduler", "continuous", "--allow-watch").url)
    page.wait_connected()
    page.fill("max_tokens", 120)
    page.one("#add-pane").click()
    page.one("#add-pane").click()
    panes = [page.pane(index) for index in range(3)]
    for number, pane in enumerate(panes):
        pane.type(f"prompt {number}")
    page.one("#send-all").click()
    page.wait(lambda: all(pane.answer for pane in panes), "not all of them stream")
    assert all(pane.busy for pane in panes)
    panes[1].press("stop")
    page.wait(lambda: not panes[1].busy, "it did not stop")
    assert "stopped" in panes[1].stats
    page.wait(lambda: not (panes[0].busy or panes[2].busy), "the others did not end")
    assert [len(pane.answer) == 120 for pane in panes] == [True, False, True]
    page.wait(lambda: page.one("#n-running").text.startswith("0 of"), "the slot was not given back")


@pytest.mark.parametrize(
    ("scheduler", "phases"),
    [("dynamic", {"prefill", "decode", "kept", "idle"}), ("continuous", {"prefill", "decode", "idle"})],
)
def test_the_lanes_move(start_server: START, open_page: OPEN, scheduler: str, phases: set[str]) -> None:
    server = start_server("--allow-watch", "--scheduler", scheduler, "--max-batch-size", "6")
    page = open_page(server.url)
    page.wait_connected()
    page.wait(lambda: page.one("#n-scheduler").text == scheduler, "no timeline")
    page.wait(lambda: page.phases_drawn() == {"idle"}, "idle slots are not drawn")
    page.one("#load-start").click()
    seen: set[str] = set()
    waste = set()

    def all_seen() -> bool:
        seen.update(page.phases_drawn())
        waste.add(page.one("#n-waste").text)
        return seen >= phases

    page.wait(all_seen, f"not all phases were drawn, only {seen}")
    before = page.pixels()
    page.wait(lambda: page.pixels() != before, "the timeline stands still")
    assert float(page.one("#n-rate").text) > 0
    if scheduler == "dynamic":
        page.wait(lambda: waste.add(page.one("#n-waste").text) or max(map(share, waste)) > 20, "no waste shown")
    else:
        assert "kept" not in seen
        assert max(map(share, waste)) == 0
    page.one("#load-stop").click()
    page.wait(lambda: page.one("#load-start").is_enabled(), "it did not stop")
    label = page.one("#timeline").get_attribute("aria-label")
    assert "of 6 are running" in label


def share(text: str) -> int:
    return int(text.split()[0]) if text[:1].isdigit() else 0


def test_without_allow_watch_there_is_no_timeline_and_no_error(start_server: START, open_page: OPEN) -> None:
    page = open_page(start_server().url)
    page.wait_connected()
    assert not page.one("#batch").is_displayed()


def test_a_killed_server_is_waited_for_and_the_answer_goes_on(start_server: START, open_page: OPEN) -> None:
    server = start_server("--allow-watch", "--scheduler", "dynamic")
    page = open_page(server.url)
    page.wait_connected()
    page.fill("max_tokens", 100)
    page.fill("seed", 3)
    pane = page.pane()
    pane.type("whole" + Keys.ENTER)
    page.wait(lambda: not pane.busy and len(pane.answer) == 100, "no answer")
    whole = pane.answer
    pane.press("clear")
    pane.type("whole" + Keys.ENTER)
    page.wait(lambda: 5 < len(pane.answer) < 90, "no tokens")
    server.kill()
    page.wait(lambda: "cannot be reached" in page.status, "the loss was not noticed")
    assert "Trying again in" in page.status
    page.wait(lambda: "waiting for the server" in pane.stats, "the pane does not wait")
    server.start()
    page.wait_connected()
    page.wait(lambda: not pane.busy, "the answer never ended")
    assert pane.answer == whole, "it went on where it stopped"
    assert "The connection was lost" in pane.log
    page.wait(lambda: page.one("#n-scheduler").text == "dynamic", "the timeline did not come back")


def test_text_that_a_shutdown_sends_early_is_shown_once(start_server: START, open_page: OPEN) -> None:
    server = start_server("--drain-s", "0")
    page = open_page(server.url)
    page.wait_connected()
    page.fill("max_tokens", 160)
    page.fill("seed", 3)
    pane = page.pane()
    pane.type("whole" + Keys.ENTER)
    page.wait(lambda: not pane.busy and len(pane.answer) == 160, "no answer")
    whole = pane.answer
    # Held back from the tenth character on, until the last but ten: it matches all of the stop string but its end.
    page.fill("stop", whole[10:150] + "#")
    pane.press("clear")
    pane.type("whole" + Keys.ENTER)
    page.wait(lambda: pane.answer == whole[:10], "no tokens")
    server.terminate()
    page.wait(lambda: "The connection was lost" in pane.log, "the loss was not noticed")
    assert pane.answer == whole[:10]
    server.start()
    page.wait(lambda: not pane.busy, "the answer never ended")
    assert pane.answer == whole


def test_a_full_server_is_said_to_be_full(start_server: START, open_page: OPEN) -> None:
    server = start_server("--max-connections", "8")
    with ExitStack() as others:
        for _ in range(8):
            others.enter_context(connect(server.url.replace("http", "ws")))
        page = open_page(server.url)
        page.wait(lambda: "The server is full. Trying again in" in page.status, "it does not say full")
    page.wait_connected()


def test_a_missing_token_is_asked_for(start_server: START, open_page: OPEN) -> None:
    server = start_server("--auth-token", "s3cret")
    page = open_page(server.url)
    page.wait(lambda: "wants its token" in page.status, "it does not say why")
    page.one("#token").send_keys("s3cret" + Keys.ENTER)
    page.wait_connected()
    assert "s3cret" not in page.browser.page_source
    page = open_page(f"{server.url}?token=s3cret")
    page.wait_connected()
    assert "s3cret" not in page.status


def test_a_page_from_one_server_can_speak_to_another(start_server: START, open_page: OPEN) -> None:
    one, other = start_server(), start_server("--auth-token", "s3cret")
    page = open_page(f"{one.url}?url=ws://127.0.0.1:{other.port}&token=s3cret")
    page.wait_connected()
    assert str(other.port) in page.status
    page.fill("max_tokens", 3)
    pane = page.pane()
    pane.type("x" + Keys.ENTER)
    page.wait(lambda: not pane.busy and len(pane.answer) == 3, "no answer")
    page = open_page(f"{one.url}?url=ws://127.0.0.1:{other.port}")
    page.wait(lambda: "wants its token" in page.status, "the probe of another origin cannot be read")


def test_the_keyboard_alone_is_enough(start_server: START, open_page: OPEN) -> None:
    page = open_page(start_server().url)
    page.wait_connected()
    for _ in range(40):
        page.browser.switch_to.active_element.send_keys(Keys.TAB)
        if "prompt" in (page.browser.switch_to.active_element.get_attribute("class") or ""):
            break
    active = page.browser.switch_to.active_element
    active.send_keys("line one" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "line two" + Keys.ENTER)
    pane = page.pane()
    page.wait(lambda: pane.answer, "no answer")
    assert "line one\nline two" in pane.log
    active.send_keys(Keys.ESCAPE)
    page.wait(lambda: not pane.busy, "Escape does not stop it")
    assert "stopped" in pane.stats


def test_a_phone_has_no_sideways_scrolling(start_server: START, open_page: OPEN) -> None:
    page = open_page(start_server("--allow-watch").url)
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        page.wait_connected()
        page.pane().type("x" * 400 + Keys.ENTER)
        page.wait(lambda: len(page.pane().answer) > 30, "no answer")
        widths = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        assert page.browser.execute_script(widths) == [360, 360]
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
