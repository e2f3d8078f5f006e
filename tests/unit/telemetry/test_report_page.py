"""The report in a real browser: curves are drawn, filters work, nothing spills over, no complaint.

Needs Debian's chromium and the package playwright; pictures are kept where MEGAGRPO_PICTURES names a folder.
"""

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from megagrpo.telemetry import names
from megagrpo.telemetry.report import write_report

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.timeout(300),
]
WAIT_MS = 120_000
STEPS = 300


def write_run(folder, shift=0.0):
    (folder / "completions").mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            row = {
                "step": step,
                names.REWARD: 1 - math.exp(-step / 50) - shift,
                names.REWARD_STD: 0.2,
                names.GROUPS: 16,
                names.SIGNAL_GROUPS: 9,
                names.SOLVED_GROUPS: 4,
                names.LENGTH: 200 + step,
                names.CUT_FRACTION: 0.02,
                names.ENTROPY: 0.5,
                names.LOGPROB_GAP: 1e-6,
                names.STEP_SECONDS: 2.0,
                "time/rollout_seconds": 1.0,
                "time/update_seconds": 0.7,
                "time/publish_seconds": 0.1,
            }
            file.write(json.dumps(row) + "\n")
    for step in (100, 300):
        for name, prompts in (("step", 30), ("held_out", 3)):
            suffix = "_set" if name == "held_out" else ""
            rows = [
                {
                    "prompt_id": prompt,
                    "index": index,
                    "prompt": f"question {prompt} <b>bold</b>",
                    "columns": {"answer": "42"},
                    "completion": f"text {prompt}-{index}",
                    "reward": float((prompt + index + step // 100) % 2),
                    "parts": {"math": 1.0},
                    "outcome": "ok",
                    "finish_reason": "stop",
                    "tokens": 5 + prompt,
                    "weight_version": step - 1,
                }
                for prompt in range(prompts)
                for index in range(4)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "completions" / f"{name}_{step:06d}{suffix}.jsonl").write_text(text)
    (folder / "warnings.jsonl").write_text('{"step": 9, "name": "disk", "text": "nearly full"}\n')
    return folder


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    return write_report([write_run(tmp_path_factory.mktemp("runs") / "run")])


def open_page(browser, file, width=1600, scheme="light"):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.said = []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=WAIT_MS)
    return page


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1600, "dark")])
def test_every_panel_is_drawn_and_nothing_spills_over(browser, report_file, width, scheme):
    page = open_page(browser, report_file, width, scheme)
    panels = page.locator(".panel .plot")
    for place in range(panels.count()):
        panels.nth(place).scroll_into_view_if_needed()
        page.wait_for_function(
            "place => document.querySelectorAll('.panel .plot')[place].querySelector('.trace, .point')",
            arg=place,
            timeout=WAIT_MS,
        )
    assert panels.count() == 6
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(255, 255, 255)") == (scheme == "light")
    assert page.said == []
    if folder := os.environ.get("MEGAGRPO_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{folder}/report_{width}_{scheme}.png", full_page=True)
    page.close()


def test_completions_are_filtered_sorted_and_compared(browser, report_file):
    page = open_page(browser, report_file)
    assert page.inner_text("#found") == "30 groups" and page.locator(".group").count() == 10
    page.click("#more")
    assert page.locator(".group").count() == 20
    page.fill("#text", "question 17")
    assert page.inner_text("#found") == "1 groups"
    assert "question 17 <b>bold</b>" in page.inner_text(".group pre")  # text, never markup
    page.fill("#text", "")
    page.select_option("#order", "longest")
    assert page.inner_text(".group h3 >> nth=0") == "prompt 29"
    page.select_option("#set", "set")
    page.select_option("#order", "changed")
    # every answer of the three held-out prompts flipped between steps 100 and 300? (300 - 100) / 100 is even
    assert page.inner_text("#found") == "0 groups"
    page.select_option("#set", "")
    page.select_option("#step", "100")
    assert page.inner_text("#found") == "0 groups" and page.said == []
    page.close()


def test_theme_and_metric_can_be_changed(browser, report_file):
    page = open_page(browser, report_file)
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.select_option("#metric", names.ENTROPY)
    page.wait_for_function("document.querySelector('#any .trace')", timeout=WAIT_MS)
    assert page.said == []
    page.close()


def test_two_runs_are_drawn_into_the_same_panels(browser, tmp_path):
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", shift=0.1)]
    page = open_page(browser, write_report(runs))
    assert page.inner_text("#legend").split() == ["one", "two"]
    page.wait_for_function(
        "document.querySelector('.panel .plot').querySelectorAll('.scatterlayer .trace').length == 2",
        timeout=WAIT_MS,
    )
    assert page.said == []
    page.close()
