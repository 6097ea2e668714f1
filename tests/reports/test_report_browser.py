"""A report in a real browser, Chromium, without a network. References: the pictures' files, the records, the window's
own measures; for text what WCAG 2 asks: 4.5 times the luminance of its ground."""

import base64
import shutil

import pytest
from test_comparison import write_run
from test_report import add_picture, write_start

from tread.reports.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="pip install -r requirements-browser.txt")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")]
ODD = "<b>&amp; run</b>"  # a model's name

# each piece of text that is seen, with its size in pixels and its contrast with what is behind it
LEGIBLE = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    const text = walker.currentNode.textContent.trim();
    if (!text || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName) || !element.checkVisibility()) continue;
    const [a, b] = [light(parse(element instanceof SVGElement ? style.fill : style.color)), light(ground(element))];
    found.push([text, parseFloat(style.fontSize), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
}"""
TITLES = "[...document.querySelectorAll('.xtitle')].map((title) => title.textContent)"
SHOWN = "[...document.querySelectorAll('.pictures img')].filter((i) => i.offsetParent).map((i) => i.src)"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two runs with pictures of three steps each, of other grey values."""
    place = tmp_path_factory.mktemp("runs")
    for number, model in enumerate(("tread", ODD)):
        write_run(place / f"run-{number}", [3.0, 2.0, 1.5 + number], model__name=model)
        write_start(place / f"run-{number}", command=["train.py", "x" * 300], warnings=[ODD])
        for step in (100, 200, 300):
            add_picture(place / f"run-{number}", step, step // 2 + number, size=(526, 658))
    return write_report([place / "run-0", place / "run-1"])


@pytest.fixture(params=[(1280, "light"), (400, "dark")], ids=str)
def page(browser, report, request):
    """The report as it is opened, and all that the browser complains about or asks for."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    context.set_default_timeout(120_000)  # for busy machines
    page, heard = context.new_page(), []
    page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith("data:") else heard.append(asked.url))
    page.goto(report.as_uri())
    page.wait_for_selector(".plot .main-svg")
    yield page
    assert heard == [report.as_uri()]
    context.close()


def test_it_is_legible_and_no_wider_than_the_window(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    texts = page.evaluate(LEGIBLE)
    assert {"Results", "evaluation loss", "steps", ODD} <= {text for text, _, _ in texts}
    assert [text for text, size, _ in texts if size < 12] == []
    assert [(text, round(contrast, 2)) for text, _, contrast in texts if contrast < 4.5] == []
    assert page.evaluate("[...document.querySelectorAll('td, th')].every((cell) => cell.clientWidth >= 40)")


def test_the_slider_moves_through_the_pictures(page, report):
    def files(step: int) -> list[str]:
        places = [report.parent.parent / f"run-{n}/samples/step_{step:07d}.png" for n in (0, 1)]
        return ["data:image/png;base64," + base64.b64encode(path.read_bytes()).decode() for path in places]

    slider, seen = page.get_by_role("slider"), []
    assert page.evaluate(SHOWN) == files(300)
    for key, step in (("Home", 100), ("ArrowRight", 200), ("End", 300)):
        slider.press(key)
        assert page.evaluate(SHOWN) == files(step) and page.locator("output").inner_text() == f"step {step}"
        seen.append(page.locator(".pictures").screenshot())
    assert len(set(seen)) == 3


def test_curves_zoom_toggle_and_change_what_they_are_drawn_against(page):
    assert page.evaluate(TITLES)[:2] == ["steps", "steps"]
    page.get_by_role("button", name="FLOPs", exact=True).click()
    assert all(title.startswith("training FLOPs, 10") for title in page.evaluate(TITLES))
    page.get_by_role("button", name="time", exact=True).click()
    assert page.evaluate(TITLES)[0] == "training time, minutes"
    lines = "document.querySelector('.drawing').querySelectorAll('.scatterlayer .trace').length"
    assert page.evaluate(lines) == 2
    chip = page.get_by_role("button", name=ODD)
    chip.click()
    assert page.evaluate(lines) == 1 and chip.get_attribute("aria-pressed") == "false"
    chip.click()
    assert page.evaluate(lines) == 2
    axis = "document.querySelector('.drawing').layout.xaxis.range"
    before, box = page.evaluate(axis), page.locator(".drawing .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.7, steps=4)
    page.mouse.up()
    page.wait_for_function(f"{axis}[0] > {before[0]} && {axis}[1] < {before[1]}")
