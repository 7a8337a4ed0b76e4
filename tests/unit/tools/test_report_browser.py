"""Report in a real browser: no requests, no console errors, readable in light, dark and narrow layouts."""

import json

import pytest

from helpers.browser import NAMES, open_browser
from helpers.run_fixtures import CONFIG, line, write_run
from lockstep.tools.report.page import write_page
from lockstep.tools.report.run_data import read_runs

EVIL = "<script>window.pwned=1</script>\"'><img src=http://127.0.0.1:9/a onerror=window.pwned=2>"
GIF = (
    b"GIF89a\x02\x00\x02\x00\x80\x00\x00\x00\x80\x80\xff\xff\xff!\xf9\x04\x00\x00\x00\x00\x00,\x00\x00\x00\x00\x02\x00"
    b"\x02\x00\x00\x02\x02\x84Q\x00;"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of one run, of several experiments, of untrusted data, and one with planted violations."""
    place = tmp_path_factory.mktemp("pages")
    seeds = [write_run(place / f"seed-{n}", seed=n) for n in range(3)]
    (seeds[0] / "best.gif").write_bytes(GIF)
    other = write_run(place / "other", config=CONFIG | {"algo": {"learning_rate": 0.1}})
    told = [line(n, train__loss=1.0, eval__return_mean=n) | {f"train/{EVIL}": float(n)} for n in (1, 2)]
    config = CONFIG | {"recipe": EVIL, "task": {"id": EVIL, EVIL: EVIL}}
    stranger = write_run(place / "stranger", told, config=config, status={"state": EVIL, "why": EVIL})
    rows = [{"processes": n, "event": EVIL, "hash": EVIL} for n in (1, 2)]
    made = {
        "one": write_page(read_runs(seeds[:1])),
        "several": write_page(read_runs([*seeds, other])),
        "stranger": write_page(read_runs([stranger]), proof={"recipe": EVIL, "rows": rows}),
        "planted": f"<title>{EVIL}</title>{EVIL}<script>console.error('x'); nothing()</script>",
    }
    for name, page in made.items():
        (place / f"{name}.html").write_text(page)
    return {name: place / f"{name}.html" for name in made}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def brightness(browser, property_of_body):
    css_color = browser.value(f"getComputedStyle(document.body).{property_of_body}")
    return sum(json.loads(css_color.removeprefix("rgb").replace("(", "[").replace(")", "]"))) / 3


@pytest.mark.parametrize("name", ["one", "several", "stranger"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_makes_no_requests_and_logs_no_errors(browser, pages, name, scheme):
    browser.look(pages[name], scheme)
    assert browser.asked_for() == []
    assert browser.complaints() == []
    assert browser.value("window.pwned") is None
    assert browser.value("document.querySelectorAll('.chart').length") >= 3
    assert browser.value("[...document.images].every(image => image.naturalWidth > 0)")
    page, ink = brightness(browser, "backgroundColor"), brightness(browser, "color")
    assert (page - ink > 150) if scheme == "light" else (ink - page > 150)


def test_browser_helper_detects_planted_violations(browser, pages):
    browser.look(pages["planted"])
    assert browser.asked_for() == ["http://127.0.0.1:9/a"]
    assert len(browser.complaints()) >= 2
    assert browser.value("window.pwned") is not None


@pytest.mark.parametrize("name", ["one", "several", "stranger"])
def test_page_fits_phone_width(browser, pages, name):
    browser.look(pages[name], width=380)
    assert browser.value("document.documentElement.scrollWidth") <= 380
    smallest = "Math.min(...[...document.querySelectorAll('.chart')].map(c => c.getBoundingClientRect().width))"
    assert browser.value(f"document.querySelectorAll('details').forEach(d => d.open = true), {smallest}") > 300


def test_chart_labels_lie_inside_charts(browser, pages):
    browser.look(pages["several"], width=380)
    outside = """[...document.querySelectorAll('section > .charts .chart text')].filter(word => {
        const a = word.getBoundingClientRect(), b = word.closest('svg').getBoundingClientRect()
        return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1
    }).map(word => word.textContent)"""
    assert browser.value(outside) == []


def test_open_browser_without_chromium_skips_but_fails_in_ci(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=NAMES[0]), open_browser(tmp_path):
        pass
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=NAMES[0]), open_browser(tmp_path):
        pass
