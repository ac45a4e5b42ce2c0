"""The page in a real browser: no requests, errors or overflow, and working controls."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedflat.flatness.landscapes.grid import Landscape, Mark
from fedflat.reporting.figures.style import COLOURS
from fedflat.reporting.page.document import report_document
from fedflat.reporting.page.gather import gather
from fedflat.reporting.page.page import report_page
from tests.time_limits import scaled

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture
def page(compared: Path, tmp_path: Path) -> Path:
    """The report of nine runs; the name of one algorithm tries to close the script element."""
    document = report_document(gather([compared]), targets=[0.7, 0.86], by="last")
    path = tmp_path / "report.html"
    path.write_text(report_page(document, title="</script><b>A title</b>"), encoding="utf-8")
    return path


def test_the_page_is_self_contained(page):
    text = page.read_text()
    assert len(text) < 100_000
    assert "3 algorithms, 3 seeds." in text
    assert re.search("began with data of hash [0-9a-f]{12}", text)
    assert "</script><b>" not in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#|data:)""", text)
    assert "@import" not in text and "url(http" not in text
    for number, colour in enumerate(COLOURS):
        assert text.count(f"--c{number}: {colour};") == 2  # on the screen and on paper


def test_embedded_values_cannot_close_the_script_element(compared):
    document = report_document(gather([compared]))
    document["sections"][0]["rows"][0]["label"] = "</script><script>alert(1)</script>"
    text = report_page(document)
    assert "<script>alert(1)" not in text
    inside = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(inside[1])["sections"][0]["rows"][0]["label"].startswith("</script>")


METADATA = {"described": "server model, seed 0, round 3"}


def bowl() -> Landscape:
    axis = tuple(np.linspace(-1, 1, 5))
    values = {"train_loss": np.add.outer(np.square(axis), np.square(axis)) + 0.1}
    return Landscape("around", (axis, axis), values, (Mark("model", (0.0, 0.0), 0.0, {"train_loss": 0.1}),), METADATA)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium with logs of messages and requests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install -e '.[dev]')")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # Drawing surfaces without a graphics card takes half a minute.
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars", "disable-3d-apis"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def show(browser: Any, page: Path, width: int, dark: bool = False) -> None:
    """Open a page at a width (a small width emulates a phone) and wait for its charts."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get(page.as_uri())
    deadline = time.monotonic() + scaled(20)
    while time.monotonic() < deadline:
        if browser.execute_script("return document.querySelectorAll('[data-part=curves] path.curve').length"):
            return
        time.sleep(0.05)
    raise AssertionError(f"no curve was drawn; the console says {browser.get_log('browser')}")


def requests(browser: Any) -> list[str]:
    """All requests since the last call, except for the page itself."""
    entries = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [entry["params"]["request"]["url"] for entry in entries if entry["method"] == "Network.requestWillBeSent"]
    return [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def words(browser: Any, selector: str) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent.trim())", selector
    )


OUTSIDE = """
const wide = document.documentElement.clientWidth, found = [];
for (const text of document.querySelectorAll("figure svg text")) {
  const box = text.getBoundingClientRect(), frame = text.closest("svg").getBoundingClientRect();
  if (box.left < frame.left - 1.5 || box.right > frame.right + 1.5
      || box.top < frame.top - 1.5 || box.bottom > frame.bottom + 1.5)
    found.push(text.textContent);
}
for (const one of document.querySelectorAll("h1, h2, h3, p, li, dd, dt, figcaption, button, label, select, svg"))
  if (!one.closest(".scroll") && one.getBoundingClientRect().right > wide + 1)
    found.push(one.tagName + " " + one.textContent.slice(0, 40));
if (document.documentElement.scrollWidth > wide) found.push("the page itself");
return found;
"""


@pytest.mark.parametrize("width", [1280, 390])
def test_loads_without_error_request_or_overflow(browser, page, width):
    requests(browser), errors(browser)
    show(browser, page, width)
    assert browser.execute_script(OUTSIDE) == []
    assert errors(browser) == []
    assert requests(browser) == []
    assert {"target 70", "target 86"} <= set(words(browser, "[data-part=curves] svg text"))
    assert words(browser, "h1") == ["</script><b>A title</b>"]


def test_sorting(browser, page):
    show(browser, page, 1280)
    first = "table.results tbody tr td:first-child"
    assert words(browser, first) == ["fedavg", "fedmoswa", "fedsam"]
    heads = browser.find_elements("css selector", "table.results th")
    heads[2].click()
    assert words(browser, first) == ["fedmoswa", "fedsam", "fedavg"]
    heads[2].click()
    assert words(browser, first) == ["fedavg", "fedsam", "fedmoswa"]
    assert heads[2].get_attribute("aria-sort") == "ascending"
    heads[0].click()
    assert words(browser, first) == ["fedavg", "fedmoswa", "fedsam"]
    censored = words(browser, "table.results th").index("rounds to 86 %")
    heads[censored].click()
    heads[censored].click()
    assert words(browser, first)[0] == "fedmoswa"  # the row that reached the target comes before all 3+


def test_switching_metric_axis_and_rows(browser, page):
    show(browser, page, 1280)
    drawn = "return document.querySelectorAll('[data-part=curves] path.curve').length"
    path = "return document.querySelector('[data-part=curves] path.curve').getAttribute('d')"
    choose = (
        "const s = document.querySelector(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))"
    )
    accuracy = browser.execute_script(path)
    browser.execute_script(choose, "[data-part=metric]", "loss")
    assert browser.execute_script(path) != accuracy
    for axis, label in {
        "bytes": "bytes sent, up and down",
        "seconds": "seconds",
        "backward_passes": "backward passes",
    }.items():
        browser.execute_script(choose, "[data-part=over]", axis)
        assert label in words(browser, "[data-part=curves] svg text")
    assert browser.execute_script(drawn) == 3
    browser.find_element("css selector", ".legend button").click()
    assert browser.execute_script(drawn) == 2
    assert browser.find_element("css selector", ".legend button").get_attribute("aria-pressed") == "false"


def test_light_and_dark(browser, page):
    ground = "return getComputedStyle(document.body).backgroundColor"
    show(browser, page, 1280, dark=True)
    assert words(browser, "#s0-partition ~ p .one")[:10] == list("0123456789")  # the legend of the partition
    assert browser.execute_script(ground) == "rgb(20, 24, 29)"
    browser.find_element("id", "theme").click()
    assert browser.execute_script(ground) == "rgb(255, 255, 255)"
    for value in ("light", "dark"):  # a later change of the system's theme does not override the choice
        scheme = [{"name": "prefers-color-scheme", "value": value}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    assert browser.execute_script(ground) == "rgb(255, 255, 255)"
    show(browser, page, 1280)
    assert browser.execute_script(ground) == "rgb(255, 255, 255)"
    browser.execute_script("localStorage.clear()")  # it stores the chosen theme


def test_tables_fit_the_paper(browser, page):
    show(browser, page, 760)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 760
        for hidden in (".controls", ".hint"):
            display = f"return getComputedStyle(document.querySelector('{hidden}')).display"
            assert browser.execute_script(display) == "none"
        assert any(line.startswith("sam(rho=0.05, ") for line in words(browser, "dl.facts dd"))  # no default is hidden
        cropped = "return [...document.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert browser.execute_script(cropped) == 0
        separated = "return getComputedStyle(document.querySelector('h3 + p')).breakAfter"
        assert browser.execute_script(separated) == "avoid"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_charts_are_drawn_for_the_width_of_the_paper(browser, page):
    show(browser, page, 1280)
    width = "return document.querySelector('[data-part=curves] svg').viewBox.baseVal.width"
    on_screen = browser.execute_script(width)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert on_screen > 1000 and browser.execute_script(width) <= 680
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(width) == on_screen


MODELS = ("fedavg", "fedsam")


def measured(document: dict[str, Any]) -> dict[str, Any]:
    """The document with flatness of fedavg and fedsam, the rows 0 and 2."""
    views = document["sections"][0]["views"]
    lines = [{"row": row, "x": [0, 1, 2, 3], "y": [4.0, 3.0, 2.0, 1.0 + row]} for row in (0, 2)]
    views["log"] = {"lambda_max": {"words": "largest eigenvalue of the Hessian", "lines": lines}}
    numbers: dict[str, Any] = dict.fromkeys(("loss", "lambda_min", "ratio", "trace"), 1.0)
    numbers["spread"] = dict.fromkeys((*numbers, "lambda_max"), 0.5)
    about = {
        "on": "train",
        "examples": 10,
        "subsets": 1,
        "described": "server model, seed 0, round 3",
        "matrix": "hessian",
    }
    about |= numbers
    views["spectra"] = [
        {"label": name, "style": style, "eigenvalues": [5.0, 2.0, 1.0], "lambda_max": 5.0, **about}
        for style, name in enumerate(MODELS)
    ]
    x, y = [0.01, 0.1, 1], [-1, 1, 20]
    rises = [{"label": name, "style": style, "x": x, "y": y} for style, name in enumerate(MODELS)]
    views["rises"] = {"sam": [rises[0] | {"std": [1, 2, 3]}, rises[1]], "asam": rises[:1]}
    row = {"label": "fedavg", "described": "server model", "numbers": [0.25, 1442, None], "spreads": [0.5]}
    heads = ["model", "measured", *(f"a measure with a long name {number}" for number in range(3))]
    views["tables"] = [{"title": "Norms", "note": "a note", "heads": heads, "rows": [row]}]
    return document


def test_flatness_has_legends_and_tooltips_whole_rounds(browser, compared, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(report_page(measured(report_document(gather([compared])))), encoding="utf-8")
    show(browser, path, 1280)
    rises = words(browser, "[data-part=rises] svg text")
    assert rises[-1] == "rise of the loss (2 of 6 values ≤ 0 omitted)" and {"0.01", "0.1", "10"} <= set(rises)
    bands = "return document.querySelectorAll('[data-part=rises] path[fill-opacity]').length"
    assert browser.execute_script(bands) == 1 and errors(browser) == []
    for legend in ("log-legend", "spectra-legend", "rises-legend"):
        assert words(browser, f"[data-part={legend}] button") == [*MODELS]
        browser.find_elements("css selector", f"[data-part={legend}] button")[1].click()
        chart = legend.partition("-")[0]
        assert browser.execute_script(f"return document.querySelectorAll('[data-part={chart}] path.curve').length") == 1
    browser.find_element("css selector", "[data-part=rises-legend] button").click()
    empty = ["No row is selected; choose one below."]
    assert words(browser, "[data-part=rises] svg text") == empty
    browser.find_elements("css selector", "[data-part=rises-legend] button")[1].click()
    browser.find_element("css selector", "[data-part=kind] option[value=asam]").click()
    assert words(browser, "[data-part=rises] svg text") == empty  # only fedavg has been measured
    assert words(browser, "#s0-measures ~ .scroll td")[:5] == ["fedavg", "server model", "0.2500 ± 0.5", "1,442", "–"]
    pressed = "return [...document.querySelectorAll('[data-part=legend] button')].map(b => b.ariaPressed)"
    assert browser.execute_script(pressed) == ["true", "true", "false"]  # the curves hide fedsam, too
    browser.execute_script("""
        const svg = document.querySelector("[data-part=curves] svg"), box = svg.getBoundingClientRect();
        const place = { clientX: box.left + 0.4 * box.width, clientY: box.top + 50, bubbles: true };
        svg.dispatchEvent(new PointerEvent("pointermove", place));""")
    assert words(browser, "[data-part=curves] .tip .quiet") == ["communication round 1"]
    assert "server model, seed 0, round 3" in words(browser, "td.words")
    assert browser.execute_script(OUTSIDE) == []


def test_landscapes_fit_a_phone_in_dark_mode_without_a_network(browser, compared, tmp_path):
    path, bowls = tmp_path / "report.html", {"fedavg": bowl(), "fedsam": bowl()}
    path.write_text(report_page(report_document(gather([compared])), landscapes=[bowls]), encoding="utf-8")
    requests(browser), errors(browser)
    show(browser, path, 390, dark=True)
    assert not browser.execute_script("return !!window.Plotly")
    for last in (-1, -2):
        browser.execute_script(f"[...document.querySelectorAll('.later')].at({last}).scrollIntoView()")
    labels = "[...document.querySelectorAll('.js-plotly-plot .xtitle')].map(e => getComputedStyle(e))"
    drawn = f"return {labels}.filter(style => style.fill === 'rgb(228, 232, 236)' && style.stroke === 'none').length"
    deadline = time.monotonic() + scaled(30)
    while browser.execute_script(drawn) < 2:  # only contours, because the browser has no WebGL
        assert time.monotonic() < deadline, "no landscape was drawn in the colours of the theme"
        time.sleep(0.1)
    assert [message for message in errors(browser) if "WebGL" not in message] == []
    assert requests(browser) == []
    assert browser.execute_script(OUTSIDE) == []
    ground = "return getComputedStyle(document.querySelector('.js-plotly-plot .main-svg')).backgroundColor"
    assert browser.execute_script(ground) == "rgba(0, 0, 0, 0)"
    assert words(browser, ".title") == [f"{name}server model, seed 0, round 3" for name in ("fedavg", "fedsam")]
    bold = "return document.querySelectorAll('.contourlayer .contour:nth-child(2) .contourlines path').length"
    assert browser.execute_script(bold) >= 2  # one line of equal loss per panel
    assert words(browser, ".js-plotly-plot .xtitle") == ["direction 1 (filter norms)"] * 2
    buttons = "return [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title || 'logo')"
    assert not {"logo", "Share chart..."} & set(browser.execute_script(buttons))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        boxes = (
            "return [...document.querySelectorAll('.panel')].map(b => [b.scrollWidth, getComputedStyle(b).breakInside])"
        )
        assert browser.execute_script(boxes) == [[340, "avoid"]] * 4
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    show(browser, path, 1280)  # two landscapes fill a wide page
    deadline = time.monotonic() + scaled(30)
    browser.execute_script("[...document.querySelectorAll('.later')].at(-1).scrollIntoView()")
    last = "const b = [...document.querySelectorAll('.panel')].at(-1); return [b.clientWidth, b.clientHeight > 560]"
    while browser.execute_script(last) != [560, True]:
        assert time.monotonic() < deadline, "the landscapes are not enlarged"
        time.sleep(0.1)


def test_many_runs_stay_usable(browser, clone, tmp_path):
    """With 22 rows, ten lines are drawn at first, the page stays small, and a click sorts all rows."""
    for lr in range(11):
        values = [0.1, 0.5, 0.7 + 0.001 * lr]
        clone("fedavg", 0, values, name=f"a{lr}", training={"lr": 0.1 + 0.01 * lr})
        clone("fedsam", 0, values, name=f"b{lr}", training={"lr": 0.1 + 0.01 * lr})
    page = tmp_path / "report.html"
    page.write_text(report_page(report_document(gather([tmp_path / "runs"]))), encoding="utf-8")
    assert page.stat().st_size < 160_000
    show(browser, page, 1280)
    assert browser.execute_script("return document.querySelectorAll('[data-part=curves] path.curve').length") == 10
    browser.find_elements("css selector", "table.results th")[2].click()
    assert words(browser, "table.results tbody tr td:first-child")[0].endswith("lr=0.2")
    assert browser.execute_script(OUTSIDE) == []


def test_long_names_that_differ_at_the_end_can_be_distinguished(browser, compared, tmp_path):
    document = report_document(gather([compared]), by="last")
    name = f"fedmoswa({'parameter=1,' * 10})"
    differences = document["sections"][0]["differences"]
    for number, difference in enumerate(differences):
        difference["label"] = f"{name}+average{number}"
    page = tmp_path / "report.html"
    page.write_text(report_page(document), encoding="utf-8")
    show(browser, page, 1280)
    scroll = "document.querySelector('[data-part=differences]').scrollIntoView()"
    browser.execute_script(scroll)
    read = "return [...document.querySelectorAll('[data-part=differences] svg text')].map(e => e.lastChild.data)"
    deadline = time.monotonic() + scaled(10)
    labels: list[str] = []
    while not labels and time.monotonic() < deadline:
        labels = [text for text in browser.execute_script(read) if text and "…" in text]
    assert [text.endswith(f"+average{number}") for number, text in enumerate(labels)] == [True] * len(differences)
    assert browser.execute_script(OUTSIDE) == []
