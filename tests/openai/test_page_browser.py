"""The page in a real browser, in front of a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.client.fake_server import FakeServer, forever, hello
from tests.e2e.server import RunningServer
from tests.openai.browser import Browser
from tests.openai.running import RunningGateway

pytestmark = pytest.mark.e2e

MARK = "Zanzibar"  # of prompts, which must not be seen where progress is
LINE = re.compile(r"^([\w:]+)(?:\{([^}]*)\})? (\S+)$", re.M)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, default_model: Path
) -> Iterator[RunningServer]:
    with RunningServer(
        tmp_path_factory.mktemp("page"),
        "--dtype=float32", "--num-blocks=400", "--max-num-seqs=4", "--no-self-check",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    with _gateway(server) as running:
        yield running


def _gateway(server: RunningServer, **settings: Any) -> RunningGateway:
    return RunningGateway(
        f"localhost:{server.grpc_port}",
        metrics_url=f"http://localhost:{server.metrics_port}/metrics",
        heartbeat=0.2,
        **settings,
    )


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(shared_browser: Browser, gateway: RunningGateway) -> Iterator[Browser]:
    """Shows the page anew; afterwards nothing was complained about, and no other place asked."""
    shared_browser.prefer("light")
    shared_browser.open(gateway.url)
    yield shared_browser
    assert shared_browser.take_complaints() == []
    asked = shared_browser.take_requests()
    assert asked
    assert [url for url in asked if not url.startswith(f"{gateway.url}/")] == []


def set_fields(browser: Browser, **values: str) -> None:
    for name, value in values.items():
        browser.script(
            "const field = document.getElementById('settings').elements[arguments[0]];"
            "field.value = arguments[1]; field.dispatchEvent(new Event('input', {bubbles: true}))",
            name, value,
        )  # fmt: skip


def say(browser: Browser, text: str) -> None:
    """Sends a message as somebody does who types."""
    browser.find("#prompt").click()
    browser.press(text, Keys.ENTER)


def is_answering(browser: Browser) -> bool:
    return bool(browser.script("return document.getElementById('send').disabled"))


def wait_answered(browser: Browser, count: int = 1) -> None:
    browser.wait_for(
        lambda: len(browser.all(".message.assistant")) >= count and not is_answering(browser),
        "the answer has come",
    )


def metrics(gateway: RunningGateway) -> dict[str, float]:
    """Each metric of the model, its series added up."""
    totals: dict[str, float] = {}
    for name, labels, value in LINE.findall(gateway.get("/metrics").text):
        if 'model="llm"' in labels:
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def shown(browser: Browser) -> dict[str, float]:
    """The numbers on the page that are a metric's."""
    found = browser.script(
        "return [...document.querySelectorAll('[data-metric]')]"
        ".map((e) => [e.dataset.metric, Number(e.dataset.value)])"
    )
    return dict(found)


def test_a_chat_is_shown_while_it_comes(browser: Browser, gateway: RunningGateway) -> None:
    set_fields(browser, temperature="0", max_tokens="24", system="You are brief.")
    browser.script(
        "window.seen = [];"
        "new MutationObserver(() => {"
        "  const body = document.querySelector('.message.assistant .body');"
        "  if (body) window.seen.push(body.textContent);"
        "}).observe(document.getElementById('messages'), {childList: true, subtree: true,"
        " characterData: true})"
    )
    say(browser, "What is the capital of France?")
    wait_answered(browser)
    body = {
        "model": "llm", "temperature": 0, "max_tokens": 24,
        "messages": [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
    }  # fmt: skip
    expected = gateway.post("/v1/chat/completions", body).json()
    text = expected["choices"][0]["message"]["content"]
    assert browser.script("return document.querySelector('.assistant .body').textContent") == text
    states = list(dict.fromkeys(browser.script("return window.seen")))
    assert len(states) > 3
    assert all(text.startswith(state) for state in states)
    facts = browser.text(".message .facts")
    assert f"{expected['usage']['completion_tokens']} tokens" in facts
    # The next message goes on from there.
    set_fields(browser, max_tokens="2")
    say(browser, "And of Spain?")
    wait_answered(browser, 2)
    assert [item.text.split("\n")[0] for item in browser.all(".message.user")] == [
        "What is the capital of France?", "And of Spain?",
    ]  # fmt: skip
    used = int(re.findall(r"of (\d+) prompt tokens", browser.text(".message:last-child .facts"))[0])
    assert used > expected["usage"]["total_tokens"]


def test_every_number_is_the_metric(browser: Browser, gateway: RunningGateway) -> None:
    body = {"model": "llm", "prompt": MARK * 8, "max_tokens": 9, "n": 2, "ignore_eos": True}
    for _ in range(2):
        assert gateway.post("/v1/completions", body).status_code == 200
    gateway.post("/v1/completions", {**body, "timeout": "no"})

    def agrees() -> bool:
        expected, found = metrics(gateway), shown(browser)
        return len(found) >= 9 and all(found[name] == expected[name] for name in found)

    browser.wait_for(agrees, "the numbers are the metrics'")
    expected = metrics(gateway)
    assert {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds_count",
        "vllm:time_per_output_token_seconds_count",
    } <= set(shown(browser))  # fmt: skip
    tiles = {tile.text.split("\n")[0]: tile.text for tile in browser.all(".tile")}
    assert f"{expected['vllm:generation_tokens_total']:,.0f} in all" in tiles["Output tokens/s"]
    hits = expected["vllm:prefix_cache_hits_total"]
    queries = expected["vllm:prefix_cache_queries_total"]
    assert f"{hits:,.0f} of {queries:,.0f} tokens" in tiles["Prefix cache hits"]
    assert hits > 0
    count = expected["vllm:time_to_first_token_seconds_count"]
    mean = expected["vllm:time_to_first_token_seconds_sum"] / count
    found = re.search(r"mean (\S+) (ms|s) .* (\S+) values", browser.text("#ttft"))
    assert found is not None
    assert float(found[1]) / (1000 if found[2] == "ms" else 1) == pytest.approx(mean, rel=0.06)
    assert int(found[3]) == count


def test_blocks_requests_and_steps_are_the_engines(
    browser: Browser, gateway: RunningGateway
) -> None:
    body = {
        "model": "llm", "prompt": f"{MARK} " * 40, "max_tokens": 1500, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60))
        for number in range(6):  # four run, two wait; they end when this test does
            stream = client.stream(
                "POST", f"{gateway.url}/v1/completions", json={**body, "n": 1 + number % 2}
            )
            stack.enter_context(stream)
        browser.wait_for(lambda: browser.all("#requests tr"), "requests are shown")

        def written() -> int:
            bars = "document.querySelectorAll('#requests [aria-label=\"output tokens\"]')"
            return int(
                browser.script(f"return Math.max(0, ...[...{bars}].map((bar) => bar.value))")
            )

        first = written()
        browser.wait_for(lambda: written() > first, "progress")
        browser.wait_for(lambda: "held" in browser.text("#map-legend"), "the map is there")
        assert MARK not in browser.script("return document.body.innerText")
        bars = browser.script(
            "return [...document.querySelectorAll('#requests progress')].map((p) => [p.value, p.max])"
        )
        assert all(0 <= value <= most for value, most in bars)
    browser.wait_for(lambda: browser.text("#requests-note") == "No request is there.", "all end")
    stats = gateway.get("/stats").json()
    counts = dict.fromkeys(("free", "cached", "held", "shared"), 0)
    for state, length in stats["blocks"]["runs"]:
        counts[state] += length
    assert counts["held"] == counts["shared"] == 0
    assert counts["cached"] > 0
    legend = browser.text("#map-legend").replace("\n", " ")
    for state, count in counts.items():
        assert f"{count} {state}" in legend
    assert f"{counts['cached']} cached" in browser.find("#map").get_attribute("aria-label")
    sizes = [one + several for _, one, several, _ in stats["steps"]]
    assert max(sizes) > 1
    assert f"last {len(sizes)}: mean" in browser.text("#steps-note")
    assert f"most {max(sizes)}" in browser.text("#steps-note")


def test_token_probabilities_are_those_of_the_answer(
    browser: Browser, gateway: RunningGateway
) -> None:
    set_fields(browser, temperature="0", max_tokens="6")
    browser.find("#shades").click()
    say(browser, "Name a color.")
    wait_answered(browser)
    body = {
        "model": "llm", "messages": [{"role": "user", "content": "Name a color."}],
        "temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 5,
    }  # fmt: skip
    choice = gateway.post("/v1/chat/completions", body).json()["choices"][0]
    expected = choice["logprobs"]["content"]
    doubts = browser.script(
        "return [...document.querySelectorAll('.token')]"
        ".map((t) => [t.textContent, Number(t.style.getPropertyValue('--doubt'))])"
    )
    assert [text for text, _ in doubts] == [token["token"] for token in expected]
    assert [doubt for _, doubt in doubts] == [
        pytest.approx(1 - 2.718281828 ** token["logprob"], abs=0.02) for token in expected
    ]
    browser.script("document.querySelectorAll('.token')[1].click()")
    candidates = [
        item.find_element("tag name", "code").text for item in browser.all("#inspector li")
    ]
    tops = [token["token"].replace(" ", "␣") for token in expected[1]["top_logprobs"]]
    assert candidates == tops  # greedy: the chosen one is the likeliest


def test_the_theme_is_the_systems_or_the_chosen_one(browser: Browser) -> None:
    def colors() -> list[str]:
        return list(
            browser.script(
                "const of = (e) => getComputedStyle(e); return [of(document.body).backgroundColor,"
                " of(document.body).color, of(document.querySelector('.swatch.held')).backgroundColor]"
            )
        )

    def brightness(color: str) -> float:
        return sum(map(float, re.findall(r"[\d.]+", color)[:3]))

    light = colors()
    assert brightness(light[0]) > 3 * 200 > 3 * 60 > brightness(light[1])
    browser.prefer("dark")
    dark = colors()
    assert brightness(dark[0]) < 3 * 60 < 3 * 200 < brightness(dark[1])
    assert light[2] != dark[2]
    browser.find("#theme").click()
    assert browser.text("#theme") == "Theme: light"
    assert colors() == light
    browser.driver.refresh()
    browser.wait_ready()
    assert colors() == light
    browser.find("#theme").click()
    browser.prefer("light")
    assert browser.text("#theme") == "Theme: dark"
    assert colors() == dark


def test_the_keyboard_is_enough(browser: Browser) -> None:
    set_fields(browser, temperature="0", max_tokens="4")
    browser.press(Keys.TAB)
    assert browser.focus() == "skip"
    browser.press(Keys.ENTER)
    browser.wait_for(lambda: browser.focus() == "prompt", "the link leads to the chat")
    browser.press(Keys.TAB)
    assert browser.focus() == "shades"
    browser.press(Keys.SPACE)
    browser.press(Keys.TAB)
    assert browser.focus() == "send"
    browser.script("document.getElementById('prompt').focus()")
    browser.press("Hello")
    browser.press_with_shift(Keys.ENTER)
    browser.press("there", Keys.ENTER)
    wait_answered(browser)
    assert browser.text(".message.user") == "Hello\nthere"
    browser.script("document.getElementById('messages').focus()")
    browser.press(Keys.ARROW_RIGHT)
    first = browser.script("return document.activeElement.textContent")
    assert browser.script("return document.activeElement.className").startswith("token")
    browser.press(Keys.ARROW_RIGHT)
    assert browser.script("return document.activeElement.textContent") != first
    assert browser.find("#inspector").is_displayed()
    # Everything that can be used is reached by Tab, and seen to be.
    reached = set()
    for _ in range(40):
        browser.press(Keys.TAB)
        reached.add(browser.focus())
    assert {
        "model",
        "theme",
        "new-chat",
        "messages",
        "prompt",
        "shades",
        "send",
        "pause",
    } <= reached


def test_escape_stops_an_answer(
    shared_browser: Browser, server: RunningServer, shared_server: FakeServer
) -> None:
    """In front of a scripted server, whose answer has no end; it tells nothing of an engine."""
    browser = shared_browser
    shared_server.script = lambda request: (hello if "control" in request.inputs else forever)(
        request
    )
    shared_server.requests = []
    with RunningGateway(shared_server.url) as gateway:
        browser.open(gateway.url)
        say(browser, "Count to ten thousand.")
        browser.wait_for(lambda: browser.text(".message.assistant .body") == "first", "it begins")
        browser.press(Keys.ESCAPE)
        browser.wait_for(lambda: not is_answering(browser), "it has ended")
        assert browser.text(".message .facts") == "stopped"
        (request,) = [each for each in shared_server.requests if "chat" in each.inputs]
        assert request.cancelled()
        assert browser.text("#health-text") != "live"
        browser.wait_for(lambda: "does not tell" in browser.text("#live-note"), "it is said")
    assert browser.take_complaints() == []


def test_what_is_said_is_text_and_never_markup(browser: Browser) -> None:
    set_fields(browser, max_tokens="1")
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    say(browser, text)
    wait_answered(browser)
    assert browser.text(".message.user") == text
    assert browser.all(".message img, .message b") == []


def test_settings_out_of_range_are_not_sent(browser: Browser) -> None:
    set_fields(browser, top_p="7")
    say(browser, "Hello")
    assert browser.all(".message") == []
    assert browser.script("return document.getElementById('settings-box').open")
    set_fields(browser, top_p="0.5", top_k="-5")
    assert "top_p 0.5" in browser.text("#settings-summary")


def test_an_error_is_told_in_the_gateways_words(
    shared_browser: Browser, gateway: RunningGateway
) -> None:
    browser = shared_browser
    browser.open(gateway.url)
    set_fields(browser, max_tokens="1000000")
    say(browser, "Hello")
    wait_answered(browser)
    assert "max_tokens" in browser.text(".message .error")
    (complaint,) = browser.take_complaints()  # the browser's own line about the status
    assert "400" in complaint


def test_all_that_is_shown_has_a_name(browser: Browser) -> None:
    tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})
    roles = {
        "button", "textbox", "combobox", "checkbox", "spinbutton", "image", "region", "table",
        "link", "progressbar",
    }  # fmt: skip
    named: dict[str, list[str]] = {}
    for node in tree["nodes"]:
        role = node.get("role", {}).get("value")
        if not node.get("ignored") and role in roles:
            named.setdefault(role, []).append(node.get("name", {}).get("value", ""))
    assert {"button", "textbox", "combobox", "checkbox", "image", "region"} <= set(named)
    assert [role for role, names in named.items() if role != "table" and not all(names)] == []


def test_a_key_is_asked_for_and_sent_along(
    shared_browser: Browser, server: RunningServer, tmp_path: Path
) -> None:
    browser = shared_browser
    keys = tmp_path / "keys"
    keys.write_text("the-right-key\n")
    with _gateway(server, api_key_file=str(keys)) as gateway:
        browser.open(gateway.url, ready=False)
        browser.wait_for(lambda: browser.script("return document.getElementById('key-dialog').open"),
                         "the key is asked for")  # fmt: skip
        assert not any("stats" in url or "v1" in url for url in browser.take_requests())
        browser.press("wrong", Keys.ENTER)
        browser.wait_for(lambda: "does not know" in browser.text("#key-error"), "it is refused")
        browser.press("the-right-key", Keys.ENTER)
        browser.wait_ready()
        browser.wait_for(lambda: browser.text("#health-text") == "live", "the engine is shown")
        set_fields(browser, max_tokens="2", temperature="0")
        say(browser, "Hello")
        wait_answered(browser)
        assert browser.text(".message.assistant .body")
        browser.driver.refresh()  # the tab keeps the key
        browser.wait_ready()
        assert not browser.script("return document.getElementById('key-dialog').open")
        assert browser.script("return Object.values(localStorage).length") == 0
    complaints = browser.take_complaints()
    assert [line for line in complaints if "401" not in line and "ERR_CON" not in line] == []


def test_a_gateway_that_is_gone_is_said_to_be(
    shared_browser: Browser, server: RunningServer
) -> None:
    browser = shared_browser
    with _gateway(server) as gateway:
        browser.open(gateway.url)
        browser.wait_for(lambda: browser.text("#health-text") == "live", "the engine is shown")
    browser.wait_for(
        lambda: browser.text("#health-text") == "the gateway does not answer", "its end is told"
    )
    browser.driver.get("about:blank")
    browser.take_complaints()
