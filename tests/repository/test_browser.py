"""The course's site is complete, and works in a real browser: Debian's chromium, without a window."""

import base64
import functools
import gzip
import itertools
import json
import math
import re
import shutil
import sys
import threading
import zlib
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from unittest.mock import MagicMock
from urllib.parse import quote

import hang_guard
import pytest
import test_term
import torch
import torch.distributed as dist
from nbconvert import HTMLExporter
from test_m13_post_mortem import DUMPS

from brigade.course.table.modules import MODULES, ROOT
from brigade.lab.emulated_link import Link
from brigade.lab.program import Machine, simulate
from solutions.m00_ring import ring
from solutions.m04_bucketed_ddp import bucketed_ddp
from solutions.m13_post_mortem import post_mortem
from tools.live_timelines import replay
from tools.planner.comparison import list_errors
from tools.planner.programs import make_sharded_program
from tools.planner.runs import read_rows
from tools.validate_plan import list_planned

pytestmark = pytest.mark.extended  # building the site takes as long as checking all modules
term, marked = test_term.term, test_term.marked  # fixtures
CHROMIUM = shutil.which("chromium")
PHONE = {"width": 390, "height": 844}
STEP_MS = 1000 * hang_guard.HANG_S  # the deadline of one action or one page
LINKS = (Link(0.0, 1e8), Link(1e-5, 1.25e10), Link(1e-3, 1e11))
WORLD_SIZES = (2, 64, 1024)
STORED_RUNS = "lessons/*/pictures/timeline.json"
OFFLINE = {"preload": False}  # axe does not fetch style sheets from file:// addresses


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the directory of the site, built as `make site` does."""
    directory = tmp_path_factory.mktemp("site")
    hang_guard.run([sys.executable, ROOT / "site" / "pyodide.py"])
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-d", directory / "doctrees"]
    done = hang_guard.run([*command, "-c", ROOT / "site", ROOT, directory / "site"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return directory / "site"


@pytest.fixture(scope="module")
def chromium():
    if not CHROMIUM:
        pytest.skip("there is no chromium: `apt-get install chromium` installs it")
    from playwright.sync_api import sync_playwright  # here, because every process imports this file

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
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    is_remote = re.compile("http(?!://127.0.0.1:)").match
    page.on("request", lambda request: problems.append(request.url) if is_remote(request.url) else None)
    yield page
    context.close()
    assert problems == []


def find_faults(page):
    """Return the names of what axe finds serious on a page."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page, options=OFFLINE).response["violations"]
    return [each["id"] for each in violations if each["impact"] in ("serious", "critical")]


def find_sideways(page):
    """Return the classes of boxes that scroll sideways or are cut off, except code, tables and pictures."""
    return page.evaluate(
        """() => [...document.querySelectorAll("html, body, body *")].filter((box) => box.clientWidth
             && getComputedStyle(box).overflowX !== "visible" && box.scrollWidth > box.clientWidth + 1
             && !box.matches("pre, .table-wrapper, :has(> img:only-child)"))
             .map((box) => `${box.localName}.${box.className}`)"""
    )


def test_every_document_and_notebook_is_a_page(site):
    """The fixture builds the site without warnings. The hints are not pages, because students open them one by one."""
    sources = [*ROOT.glob("lessons/*/[Ra]*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    pages = {site / path.relative_to(ROOT).with_suffix(".html") for path in [*sources, ROOT / "assignments.md"]}
    assert {path for path in pages if not path.exists()} == set()
    assert not list(site.rglob("*hints*"))
    described = re.compile(
        '<meta name="description" content="[^"]{20,200}">\n<meta property="og:title" content="[^"]+">.*'
        '<link rel="[a-z ]*icon" href="[./]*_static/favicon.svg"',
        re.DOTALL,
    )
    assert (site / "_static" / "timeline.png").exists(), "a link to a published site shows it"
    assert not [path for path in pages if not described.search(path.read_text())], "a link in a chat shows its text"
    reference = (site / "site" / "api.html").read_text()
    names = [f"lessons.{entry.package}.{entry.name}.{name}" for entry in MODULES for name in entry.public]
    assert [name for name in names if f'id="{name}"' not in reference] == []


@pytest.fixture
def served(page, site):
    """Return the address of the site, which this process serves."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        page.wait_for_load_state("networkidle")
        server.shutdown()


@pytest.fixture
def search(page, served):
    """Return a function that types words into the search of the site. It returns the addresses of the first results."""

    def find(words):
        page.goto(f"{served}/search.html?q={quote(words)}")
        page.wait_for_function("/finished|did not match/.test(document.querySelector('.search-summary')?.textContent)")
        return [link.get_attribute("href") for link in page.locator("#search-results li > a").all()[:9]]

    return find


def test_the_search_shows_the_explanation_of_a_term_first_and_the_api_reference_last(search):
    found = search("reduce-scatter")
    assert found[0].endswith("docs/glossary.html#reduce-scatter"), found
    assert any("lessons/" in address for address in found[1:4]), found
    places = ["site/api" in address for address in search("ZeroOptimizer")]
    assert places == sorted(places) and not places[0], places


def test_the_search_leads_from_public_wordings_to_their_answers(search):
    """The answer is the first or the second result. The wordings are from public issue trackers and forums."""
    lines = (ROOT / "tests" / "support" / "public_wordings.tsv").read_text().splitlines()
    answers = dict(line.split("\t") for line in lines)
    assert len(answers) >= 30
    found = {words: search(words)[:2] for words in answers}
    wrong = {words for words, page in answers.items() if not any(page in address for address in found[words])}
    assert wrong == set(), found


def test_the_search_of_the_site_finds_every_error_by_its_text(site):
    """Sphinx's index has the headings of docs/errors.md, which are the texts that people search for."""
    index = (site / "searchindex.js").read_text()
    titles = json.loads(index[index.index("{") : index.rindex("}") + 1])["alltitles"]
    headings = re.findall(r"^### (.*)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    plain = [{text.replace("`", "") for text in texts} for texts in (headings, titles)]
    assert len(headings) >= 45 and plain[0] <= plain[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_fails_or_scrolls_sideways_on_a_phone_and_axe_finds_nothing_serious(page, site, scheme):
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme=scheme)
    found = {}
    for path in sorted({*site.rglob("*.html")} - {site / "index.html", *site.rglob("_modules/**/*.html")}):
        page.goto(path.as_uri())
        found[path.relative_to(site).as_posix()] = find_sideways(page) + find_faults(page)
    assert {name: faults for name, faults in found.items() if faults} == {} and len(found) > 80
    page.goto((site / "lessons/m01_naive_ddp/README.html").as_uri())
    page.evaluate("document.querySelector('article p').style.width = '600px'")
    page.evaluate("document.querySelector('article img').removeAttribute('alt')")
    assert find_sideways(page) and find_faults(page) == ["image-alt"]


def test_every_live_figure_obeys_the_keyboard_on_a_phone(page, site):
    """One key changes each slider, menu, button and folded table, except a step that follows the last event."""
    page.set_viewport_size(PHONE)
    key = """(one) => one.matches("input") ? (one.value === one.max ? "ArrowLeft" : "ArrowRight")
        : one.matches("select") ? (one.selectedIndex ? "ArrowUp" : "ArrowDown") : "Enter\""""
    state = "(box) => box.innerHTML + [...box.querySelectorAll('input, select')].map((one) => one.value)"
    num_figures = 0
    for path in [site / "site/explore.html", site / "site/ring.html", *sorted(site.glob("lessons/m*/README.html"))]:
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('article details').forEach((one) => { one.open = true })")  # answers
        for box in page.locator("[data-model], [data-toy], [data-timeline]").all():
            for control in box.locator("input, select, summary, .buttons button").all():
                before = box.evaluate(state)
                control.press(control.evaluate(key))
                has_changed = box.evaluate(state) != before
                assert has_changed or control.inner_text() == "Step", (path, control)
            num_figures += 1
        assert find_sideways(page) + find_faults(page) == [], path
    assert num_figures == 23


GRAD_BYTES, BACKWARD_S = 400e6, 0.1
OPS = ("all_reduce", "all_gather")
PLANS = {"calibrated": 6, "half": 7, "guessed": 5, "null": 8}  # the place of an error in a list of `list_planned`
RANGES = {"all": (0, 1e9), "0-9": (0, 0.1), "20-": (0.2, 1e9), "1-4": (1, 5), "65-": (65, 1e9)}


def simulate_buckets(link, world_size, bucket_bytes):
    """Return the exposed time of a step with equal buckets, and the number of buckets."""
    count = math.ceil(GRAD_BYTES / bucket_bytes)
    launch = ("all_reduce", GRAD_BYTES / count, world_size, world_size - 1)
    instructions = [
        *itertools.chain(*((("backward", i), ("launch", i, *launch)) for i in range(count))),
        *(("wait", i) for i in range(count)),
    ]
    machine = Machine(0.0, (BACKWARD_S / count,) * count, 1.0, 1.0)
    return simulate(instructions, machine, link).step_s - BACKWARD_S, count


def test_the_model_in_the_browser_equals_pythons(page):
    page.add_script_tag(path=ROOT / "site" / "_static" / "cost_model.js")
    for link, world_size, nbytes in itertools.product(LINKS, WORLD_SIZES, (1e6, 3e7, 4e8)):
        given = [{"latencyS": link.latency_s, "bytesPerS": link.bytes_per_s}, world_size, nbytes]
        found = page.evaluate("(given) => costModel.simulateBuckets(...given)", given)
        exposed_s, num_buckets = simulate_buckets(link, world_size, nbytes)
        assert (found["exposed"], found["numBuckets"]) == (pytest.approx(exposed_s), num_buckets)
        program = make_sharded_program([25_000_000] * 4, (6_250_000, 0), world_size)  # prefetches one unit
        machine = Machine(BACKWARD_S / 2, (*(BACKWARD_S * part / 17 for part in (1, 4, 4, 4, 4)), 0), 1e30, 1e30)
        found = page.evaluate("(given) => costModel.simulatePrefetch(...given).end", [*given[:2], 1])
        assert found == pytest.approx(simulate(program, machine, link).step_s)
    tree = {"latencyS": 1e-5, "bytesPerS": 1e9, "algorithm": "tree"}
    seconds = [page.evaluate("(given) => costModel.computeSeconds(...given)", [tree, op, 1e6, 64]) for op in OPS]
    assert seconds == pytest.approx([2 * 6 * 1e-5 + 2 * 1e-3, 63 * 1e-5 + 63 / 64 * 1e-3])  # only all-reduces


def test_measured_all_reduces_are_points_beside_the_models_line(page, site):
    rows = [row for row in read_rows() if row.subject == "all_reduce"]
    page.goto((site / "site" / "explore.html").as_uri())
    box, on_16_ranks = page.locator("[data-model=measured]"), sum(row.gpus == 16 for row in rows)
    stored = [[row.sequence, row.gpus, pytest.approx(1e3 * row.measured_s, rel=1e-3)] for row in rows]
    assert json.loads(box.locator("script").text_content()) == stored and len(rows) >= 60
    assert box.locator("circle").count() == len(rows) == box.locator("circle.other").count() + on_16_ranks


def test_published_runs_are_points_and_their_errors_are_pythons(page, site):
    runs = list_planned(list_errors(read_rows()))
    page.goto((site / "site" / "explore.html").as_uri())
    box = page.locator("[data-model=planned]")
    assert json.loads(box.locator("script").text_content()) == runs, "run make validate-plan"
    cases = itertools.product(("same", "batch", "sequence"), ("all", "1-4", "65-"), ("all", "0-9", "20-"))
    for plan, (smaller, nodes, share) in zip(itertools.cycle(PLANS), cases):
        settings = {"prediction": plan, "smaller": smaller, "nodes": nodes, "communication": share}
        page.evaluate(
            "(all) => { location.hash = all }", "&".join(f"planned.{one}={settings[one]}" for one in settings)
        )
        (few, many), (little, much) = RANGES[nodes], RANGES[share]
        own = [run for run in runs if run[10] == smaller and few <= run[3] < many and little <= run[9] < much]
        errors = [run[PLANS[plan]] for run in own if run[PLANS[plan]] is not None]
        page.wait_for_function(
            f"document.querySelectorAll('[data-model=planned] circle.block').length === {len(errors)}"
        )
        if sizes := sorted(map(abs, errors)):
            most, short = sizes[math.ceil(0.9 * len(sizes)) - 1], sum(error < 0 for error in errors)
            said = [f"{100 * median(sizes):.1f} %", f"{100 * most:.1f} %", str(short)]
            assert box.locator("[data-name]").all_inner_texts()[1:] == said, settings


def test_a_link_keeps_the_settings_and_wrong_ones_are_ignored(page, served):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{served}/site/explore.html#measured.alpha=20&measured.ranks=seven&buckets.algorithm=none")
    notes = page.locator(".address span").all_inner_texts()
    assert [text.partition("ignores: ")[2] for text in notes] == ["algorithm = none.", "ranks = seven.", "", ""]
    page.locator("[data-model=measured]").get_by_role("button", name="Copy a link").press("Enter")
    page.wait_for_function(
        "[...document.querySelectorAll('.address')].some((row) => row.innerText.includes('Copied.'))"
    )
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.url and "measured.alpha=20&measured.ranks=16&" in copied


def test_the_replay_in_the_browser_equals_pythons(page):
    """This holds for every stored run, at one of five speeds of the link."""
    page.add_script_tag(path=ROOT / "site" / "_static" / "timeline_model.js")
    runs = [run for path in sorted(ROOT.glob(STORED_RUNS)) for run in json.loads(path.read_text())["runs"]]
    assert len(runs) >= 30
    for run, speed in zip(runs, itertools.cycle((0.25, 0.5, 1, 2, 16))):
        found = page.evaluate("(given) => timelineModel.replay(...given)", [run, speed])
        assert found == replay(run, speed)
    assert replay(runs[0], 0.5)["end"] > replay(runs[0], 1)["end"] > replay(runs[0], 2)["end"]


def test_a_chapter_replays_its_step_by_keyboard_and_keeps_the_settings_in_its_address(page, site):
    stored = json.loads((ROOT / "lessons/m04_bucketed_ddp/pictures/timeline.json").read_text())["runs"]
    url = (site / "lessons/m04_bucketed_ddp/README.html").as_uri()
    page.goto(url)
    box = page.locator("[data-timeline]")

    def expect(index, speed):
        end = replay(stored[index], speed)["end"]
        assert box.locator("[data-name=step]").inner_text() == f"{end / 1e3:.1f} ms"

    expect(1, 1)
    page.press("[data-timeline] input[name=run]", "ArrowRight")
    page.press("[data-timeline] input[name=link]", "ArrowLeft")
    expect(2, 0.5)
    status = box.locator("[role=status]")
    texts = []
    for button in ("Step", "Step", "Step back", "Step back", "Whole step", "Step back", "Step back"):
        box.get_by_role("button", name=button, exact=True).press("Enter")
        texts.append(status.inner_text())
    assert texts[0] == texts[2] == texts[3] != texts[1], "the first event has none before it"
    assert "whole step" in texts[4] and "ends the step" in texts[5]
    assert box.locator(".later").count() == 1, "what follows the event is faded"
    box.locator("summary").press("Enter")
    rows = box.locator("table tr").all_inner_texts()
    assert len(rows) == 1 + len(stored[2]["collectives"]) and "launched by rank 1" in rows[0]
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(2, 0.5)
    assert status.inner_text() == texts[6]
    page.evaluate("location.hash = 'timeline.run=0&timeline.link=4'")
    page.wait_for_function(
        "document.querySelector('[data-timeline] [data-name=step]').previousSibling.textContent.includes('computed')"
    )
    expect(0, 4)


def test_an_exported_notebook_has_the_live_figure_of_its_module(page, tmp_path):
    """It needs no network, unlike the libraries that Jupyter adds to every page."""
    exporter = HTMLExporter(mathjax_url="", require_js_url="", jquery_url="", mermaid_js_url="")
    path = tmp_path / "notebook.html"
    path.write_text(exporter.from_filename(ROOT / "notebooks" / "03_overlapped_ddp.ipynb")[0])
    stored = json.loads((ROOT / "lessons/m03_overlapped_ddp/pictures/timeline.json").read_text())["runs"]
    page.goto(path.as_uri())
    frame = page.frame_locator("iframe")
    for name, key in (("run", "ArrowRight"), ("link", "ArrowLeft")):
        frame.locator(f"input[name={name}]").press(key)
    assert frame.locator("[data-name=step]").inner_text() == f"{replay(stored[2], 0.5)['end'] / 1e3:.1f} ms"
    frame.get_by_role("button", name="Step", exact=True).press("Enter")
    assert "(1 of " in frame.locator("[role=status]").inner_text()


@pytest.mark.parametrize(("scheme", "parts"), [("light", ["fill", "stroke"]), ("dark", ["fill"])])
def test_each_mark_of_a_step_stands_out_from_the_page(page, site, scheme, parts):
    """Its colour, or in light mode its border, has a contrast of 3:1 to the page (WCAG 1.4.11)."""

    def measure(colour):  # its relative luminance
        rgb = [(int(one) / 255) ** 2.2 for one in re.findall(r"\d+", colour)[:3]]
        return 0.05 + sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), rgb, strict=True))

    page.emulate_media(color_scheme=scheme)
    for chapter in ("m04_bucketed_ddp", "m08_zero_optimizer"):
        page.goto((site / "lessons" / chapter / "README.html").as_uri())
        page.wait_for_selector("[data-timeline] .launch", state="attached")  # the script has drawn the figure
        ground = measure(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        read = """(parts) => [...document.querySelectorAll("[data-timeline] :is(.block:not(.exposed), .launch)")].map(
            (one) => parts.map((part) => getComputedStyle(one)[part]))"""
        marks = [[measure(tone) / ground for tone in one if tone != "none"] for one in page.evaluate(read, parts)]
        assert len(marks) > 20 and all(max(max(tone, 1 / tone) for tone in one) >= 3 for one in marks)


def test_a_prediction_is_kept_on_this_device_and_compared_after_the_answer_is_open(page, site):
    page.goto((site / "lessons/m01_naive_ddp/README.html").as_uri())
    field = page.get_by_label("Your prediction: exposed part of a step, in %")
    assert not page.locator("[data-predictions]").is_visible()
    field.fill("35 %")
    page.reload()
    assert field.input_value() == "35 %"
    page.locator("[data-predict] + details summary").press("Enter")
    page.wait_for_function("document.querySelector('[data-predict] [role=status]').textContent")
    said = "You predicted “35 %”. Our answer: 47, 48 and 44 %."
    assert page.locator("[data-predict] [role=status]").inner_text() == said
    assert said in page.locator("[data-predictions]").inner_text()
    assert not field.is_editable(), "a prediction is made before the answer is open"
    page.reload()
    assert said in page.locator("[data-predictions]").inner_text()
    page.get_by_role("button", name="Forget my predictions").click()
    assert field.input_value() == "" and not page.locator("[data-predictions]").is_visible()


def test_without_scripts_a_chapter_has_its_pictures_and_no_empty_boxes(chromium, site):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    for chapter in ("m00_ring", "m01_naive_ddp", "m04_bucketed_ddp"):
        page.goto((site / f"lessons/{chapter}/README.html").as_uri())
        boxes = page.locator(".explorer")
        assert boxes.count() and not any(box.is_visible() for box in boxes.all())
    assert page.locator("img[src*=timeline]").is_visible()
    context.close()


def test_all_scripts_of_the_site_are_small(site):
    """These are its own scripts, without those of the page that loads Python. The theme has others."""
    names = {path.name for path in (ROOT / "site" / "_static").glob("*.js") if "post_mortem" not in path.name}
    scripts = [*(site / "_static" / name for name in names), ROOT / "site" / "scorer.js"]
    sizes = {path.name: len(gzip.compress(path.read_bytes())) for path in scripts}
    assert sum(sizes.values()) <= 20_000, sizes


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_messages_of_the_ring_and_the_buckets_are_those_of_the_solutions(page, monkeypatch, size):
    page.add_script_tag(path=ROOT / "site" / "_static" / "toys_model.js")
    sent = []
    for name in ("get_world_size", "recv"):
        monkeypatch.setattr(dist, name, lambda *_, **__: size)
    monkeypatch.setattr(dist, "isend", lambda chunk, **_: sent.append(chunk.numel()) or MagicMock())
    for numel in (1, 2, 8, 10, 16, 24):
        for rank in range(size):
            monkeypatch.setattr(dist, "get_rank", lambda *_, rank=rank: rank)
            ring.ring_all_reduce(torch.ones(numel))
        plans = page.evaluate("(size) => toysModel.planRing(size, 'send')", size)
        lengths = page.evaluate("(given) => toysModel.splitIntoChunks(...given)", [numel, size])
        assert [lengths[call["chunks"][0]] for calls in plans for call in calls if call["op"] == "send"] == sent
        sent.clear()
        numels, cap = [(7 * numel + 3 * i) % 9 + 1 for i in range(10)], numel + 4
        params = [torch.nn.Parameter(torch.ones(one)) for one in numels]
        buckets = bucketed_ddp.plan_buckets(params, 4 * cap)
        found = page.evaluate("(given) => toysModel.planBuckets(...given)", [numels, cap])
        assert [[id(params[i]) for i in bucket] for bucket in found] == [[*map(id, bucket)] for bucket in buckets]


def test_the_toys_show_a_sum_a_deadlock_and_a_mismatch(page, site):
    page.goto((site / "site" / "ring.html").as_uri())

    def step(toy):
        while (button := page.locator(f"[data-toy={toy}] button:has-text('Step')")).is_enabled():
            button.click()
        return page.inner_text(f"[data-toy={toy}] [role=status]")

    assert step("ring") == "Every rank has the sum of all 4 tensors."
    assert page.inner_text("[data-toy=ring] [data-name=elements]") == "12"
    page.select_option("[data-toy=ring] [name=order]", "send")
    assert "Deadlock" in step("ring")
    assert "the same buckets in the same order" in step("buckets")
    page.select_option("[data-toy=buckets] [name=orders]", "other")
    page.select_option("[data-toy=buckets] [name=rule]", "eager")
    assert "Launch 2 is bucket 1 on rank 0 and bucket 2 on rank 1" in step("buckets")
    page.select_option("[data-toy=buckets] [name=rule]", "ordered")
    assert "the same buckets in the same order" in step("buckets")


def test_dumps_are_read_in_the_browser_and_stay_there(page, site, served, tmp_path, capsys):
    """The page shows what the program prints. The fixture `page` fails if anything is asked from another machine."""
    if not (site / "_static" / "pyodide").is_dir():
        pytest.skip("Pyodide could not be downloaded")
    lines = re.findall("^order pickle (.+)$", (DUMPS / "2.11-nccl-timeout.torch").read_text(), re.MULTILINE)
    for rank, line in enumerate(lines):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(zlib.decompress(base64.b64decode(line)))
    assert post_mortem.main([tmp_path]) == 1
    said, requests = capsys.readouterr().out.strip(), []
    page.on("request", lambda request: requests.append((request.method, request.post_data)))
    page.set_viewport_size(PHONE)
    page.goto(f"{served}/site/post_mortem.html")
    page.set_input_files("[webkitdirectory]", tmp_path)
    page.wait_for_selector("[data-dumps] pre:visible")
    assert page.inner_text("[data-dumps] pre") == said and {*requests} == {("GET", None)}
    assert find_sideways(page) + find_faults(page) == []
    assert "rank 2" in page.frame_locator("[data-dumps] iframe").locator("svg").text_content()
    page.context.set_offline(True)  # Python is loaded once
    page.get_by_role("button", name="example").press("Enter")
    page.wait_for_function("document.querySelector('[data-dumps] pre').textContent.includes('Rank 1 skipped a call')")


def test_a_page_that_cannot_read_dumps_says_so(page, site, served, monkeypatch):
    page.goto((site / "site" / "post_mortem.html").as_uri())
    assert "Serve the folder" in page.inner_text("[data-dumps]")
    page.add_init_script("delete globalThis.WebAssembly")
    page.goto(f"{served}/site/post_mortem.html")
    assert "it has no WebAssembly" in page.inner_text("[data-dumps]")
    monkeypatch.syspath_prepend(ROOT / "site")
    import pyodide

    monkeypatch.setattr(pyodide, "HAS_SOLUTIONS", False)  # as in the student edition
    source = [(ROOT / "site/post_mortem.md").read_text()]
    pyodide.choose_content(None, pyodide.PAGE, source)
    assert pyodide.MISSING in source[0] and "data-dumps" not in source[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_of_a_term_are_accessible_on_a_phone(page, marked, tmp_path, scheme):
    marked("mark", "week1")
    marked("term", "report", "week1")
    page.emulate_media(color_scheme=scheme)
    files = [tmp_path / "week1-report.html", tmp_path / "week1-mark-1.html", tmp_path / "week1-feedback/Lace, Ada.html"]
    page.set_viewport_size(PHONE)
    for file in files:
        page.goto(file.as_uri())
        assert find_faults(page) + find_sideways(page) == [], file.name


def test_answers_are_marked_by_keyboard_and_the_marks_are_read(page, marked, tmp_path):
    """Marks survive a reload, and another browser goes on with the file. The gradebook gets points and comments."""

    def read_progress():
        """Return the numbers of the answer, of all answers and of those that are marked, and what follows them."""
        return [int(number) for number in re.findall(r"\d+", progress.inner_text())]

    marked("mark", "week1")
    url = (tmp_path / "week1-mark-1.html").as_uri()
    page.goto(url)
    press, progress = page.keyboard.press, page.locator("#progress")
    for key in ("1", "2", "2", "Enter", "c"):
        press(key)
    page.keyboard.type("a 1 in a comment is no key")
    press("Escape")
    press("Enter")
    assert read_progress() == [3, 9, 2]
    page.reload()
    assert read_progress() == [3, 9, 2]
    for key in ("ArrowLeft", "ArrowLeft"):
        press(key)
    assert page.locator("#points").inner_text() == "1 of 2" and page.locator("input:checked").count() == 1
    with page.expect_download() as saved:
        press("s")
    saved.value.save_as(tmp_path / "begun.json")
    page.evaluate("localStorage.clear()")
    page.reload()
    assert read_progress() == [1, 9, 0]
    page.set_input_files("#load", tmp_path / "begun.json")
    page.wait_for_function("document.getElementById('progress').textContent.startsWith('Answer 3')")
    page.locator("h1").click()
    for _ in range(7):
        press("1")
        press("Enter")
    assert read_progress()[1:4] == [9, 9, 3], "three are marked twice"
    with page.expect_download() as saved:
        press("s")
    assert saved.value.suggested_filename == "week1-marks-1.json"
    saved.value.save_as(tmp_path / "week1-marks-1.json")
    marked("gradebook", "marks", "week1.csv", "week1-marks-1.json")
    text = (tmp_path / "week1.csv").read_text()
    assert "written 1" in text and "a 1 in a comment is no key" in text
    # With more markers, some answers are on another page. Their marks are kept.
    marked("mark", "week1", "--markers", "2")
    counts = []
    for number in (1, 2):
        page.goto((tmp_path / f"week1-mark-{number}.html").as_uri())
        counts.append(read_progress()[2])
    assert sum(counts) == 9 and all(counts)
