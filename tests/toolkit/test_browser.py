"""The site, its sliders and the page of `brigade trace` work in a real browser: Debian's chromium, without a window."""

import http.server
import itertools
import re
import shutil
import threading
from functools import partial

import pytest
from playwright.sync_api import sync_playwright

from brigade.course.modules import ROOT
from brigade.events import LAUNCH_FIELDS, Launch
from brigade.lab import cost_model, timeline, timeline_view
from brigade.lab.planners import import_solution
from brigade.rank.emulated_link import Link

CHROMIUM = shutil.which("chromium")
PHONE = {"width": 390, "height": 844}
STEP_MS = 30_000  # the deadline of one action or one page
LINKS = (Link(0.0, 1e8), Link(1e-5, 1.25e10), Link(1e-3, 1e11))
WORLD_SIZES = (2, 64, 1024)

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium: `apt-get install chromium` installs it")


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=STEP_MS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """Yield an empty page. No script may fail in it, and it may load nothing from another machine."""
    context = chromium.new_context()
    context.set_default_timeout(STEP_MS)
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(message.text) if is_error(message) else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    is_remote = re.compile("http(?!://127.0.0.1:)").match
    page.on("request", lambda request: problems.append(request.url) if is_remote(request.url) else None)
    yield page
    context.close()
    assert problems == []


def is_error(message):
    """Return whether a console message is an error. A failed request for the site's icon is not one."""
    return message.type == "error" and not message.location["url"].endswith("/favicon.ico")


def find_sideways(page):
    """Return the classes of boxes that scroll sideways or are cut off, except code and tables."""
    return page.evaluate(
        """() => [...document.querySelectorAll("html, body, body *")].filter((box) => box.clientWidth
             && getComputedStyle(box).overflowX !== "visible" && box.scrollWidth > box.clientWidth + 1
             && !box.matches("pre, .table-wrapper")).map((box) => `${box.localName}.${box.className}`)"""
    )


def test_no_page_of_the_site_fails_or_scrolls_sideways_on_a_phone(page, site):
    page.set_viewport_size(PHONE)
    found = {}
    for path in sorted(site.rglob("*.html")):
        if "_modules" not in path.parts and path != site / "index.html":  # which leads to the start page
            page.goto(path.as_uri())
            found[path.relative_to(site).as_posix()] = find_sideways(page)
    assert {"site/index.html", "docs/glossary.html", "notebooks/04_bucketed_ddp.html"} <= found.keys()
    assert {path: boxes for path, boxes in found.items() if boxes} == {}
    page.evaluate("document.querySelector('article p').style.width = '600px'")
    assert find_sideways(page)


@pytest.fixture
def address(site):
    """Serve the site on this machine. Yield the address of its start page."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/site/index.html"
        server.shutdown()
        thread.join()


def test_the_search_finds_a_term(address, page):  # in this order: the page is closed before its server
    page.goto(address)
    page.fill("input[name=q] >> nth=0", "reduce-scatter")
    page.press("input[name=q] >> nth=0", "Enter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_load_state("networkidle")  # the search loads each page that it lists
    assert "Glossary" in page.locator("#search-results li a").all_inner_texts()


def test_the_model_in_the_browser_equals_pythons(page):
    page.add_script_tag(path=ROOT / "site" / "_static" / "cost_model.js")
    plan_schedule = import_solution("plan_schedule")
    for name, simulate, values in (
        ("simulateBuckets", cost_model.simulate_buckets, (1e6, 3e7, 4e8)),
        ("simulatePrefetch", partial(cost_model.simulate_prefetch, plan_schedule), range(4)),
    ):
        cases = [*itertools.product(LINKS, WORLD_SIZES, values)]
        given = [[{"latencyS": link.latency_s, "bytesPerS": link.bytes_per_s}, *rest] for link, *rest in cases]
        results = page.evaluate(f"(cases) => cases.map((given) => costModel.{name}(...given))", given)
        for case, found in zip(cases, results):
            expected = simulate(*case)
            assert [transfer["op"] for transfer in found["transfers"]] == [one.launch.op for one in expected.transfers]
            for key in ("launched", "start", "end"):
                times = [transfer[key] for transfer in found["transfers"]]
                assert times == pytest.approx([getattr(one, f"{key}_s") for one in expected.transfers])
            assert found["exposed"] == pytest.approx(expected.exposed_s)
            if name == "simulateBuckets":
                assert found["numBuckets"] == expected.num_buckets
            else:
                assert found["peakBytes"] == expected.peak_bytes


def test_the_sliders_change_the_figure_and_the_numbers(page, site):
    page.goto((site / "site" / "explore.html").as_uri())
    link, plan_schedule = Link(1e-5, 1.25e10), import_solution("plan_schedule")  # as the page starts

    def move(model, name, key):
        """Move a slider by one key. Return its new value."""
        page.press(f"[data-model={model}] input[name={name}]", key)
        return float(page.inner_text(f"[data-model={model}] label:has(input[name={name}]) output").split()[0])

    def expect(model, name, text):
        assert page.inner_text(f"[data-model={model}] [data-name={name}]") == text

    bars = page.locator("[data-model=buckets] rect.block")
    many = bars.count()
    mib = move("buckets", "bucket", "ArrowRight")
    step = cost_model.simulate_buckets(link, 64, mib * 2**20)
    assert bars.count() == 2 * step.num_buckets + 1 < many  # on the rank and on the link; one is exposed
    expect("buckets", "exposed", f"{1e3 * step.exposed_s:.1f} ms")
    ranks = move("buckets", "ranks", "End")
    assert ranks == 1024
    expect("buckets", "exposed", f"{1e3 * cost_model.simulate_buckets(link, 1024, mib * 2**20).exposed_s:.1f} ms")
    prefetch = move("prefetch", "prefetch", "ArrowLeft")
    step = cost_model.simulate_prefetch(plan_schedule, link, 64, int(prefetch))
    expect("prefetch", "exposed", f"{1e3 * step.exposed_s:.1f} ms")
    expect("prefetch", "peak", f"{step.peak_bytes / 1e6:.0f} MB")


def make_timeline(label):
    """Return a step of two ranks with two all-reduces. The second has to wait for the first."""
    spans, launched = [], []
    for rank in range(2):
        edges = (0.0, 20.0, 80.0, 95.0, 100.0)
        spans += [timeline.Span(rank, *span) for span in zip(timeline.PHASES, edges, edges[1:])]
        launches = []
        for start_s, end_s in ((0.04, 0.07), (0.06, 0.095)):
            fields = dict.fromkeys(LAUNCH_FIELDS) | {"op": "all_reduce", "dtype": "float32", "nbytes": 4096, "parts": 1}
            fields |= {"phase": "backward", "line": "x.py:7"}
            launches.append(Launch(**fields, step=0, place=0, start=start_s, end=end_s))
        launched += timeline.make_collectives(rank, launches, range(2), 0.0, True)
    return timeline.Timeline(label, 2, spans, launched, 15.0, Link(1e-5, 1e9), 60.0)


def test_the_timeline_shows_both_ranks_zooms_and_tells_about_a_collective(page, tmp_path):
    path = tmp_path / "step.html"
    timeline_view.save_html([make_timeline("3 OverlappedDDP"), make_timeline("torch DDP")], path)
    page.set_viewport_size(PHONE)
    page.goto(path.as_uri())
    assert page.locator("h2").all_inner_texts()[1].startswith("torch DDP, 2 collectives")
    first = page.locator("#timelines svg >> nth=0")
    assert {"rank 0", "rank 1"} <= set(first.locator("text").all_text_contents())
    assert not find_sideways(page)
    block = first.locator("rect.block >> nth=4")  # after the four phases
    before = block.bounding_box()
    block.hover()
    details = page.inner_text("#details")
    assert all(text in details for text in ("all-reduce 0", "rank", "40.000 ms", "70.000 ms", "4,096", "x.py:7"))
    page.mouse.wheel(0, -300)
    assert block.bounding_box()["width"] > 1.5 * before["width"]
    whole = page.inner_text("#range")
    page.click("#whole")
    assert page.inner_text("#range") != whole
    assert block.bounding_box() == before
    page.focus("#timelines svg >> nth=0")
    page.keyboard.press("+")
    assert page.inner_text("#range") == "25.250 ms to 75.750 ms"
