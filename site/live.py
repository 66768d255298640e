"""Where live figures and predictions are in the chapters. Code hosts, and readers without scripts, see neither."""

from __future__ import annotations

import csv
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

from brigade.lab.notebook import render_step


class Figure(NamedTuple):
    """A figure at the end of a section: its attribute for the scripts, the section's heading, and what to try."""

    attribute: str
    heading: str
    sentence: str


FIGURES = {
    "m00_ring": [
        Figure(
            'data-toy="ring"',
            "Round 4: the second lap",
            "step through four ranks, and watch rank 0: when does it get its first complete chunk? Then let every "
            "rank send before it receives.",
        )
    ],
    "m02_flat_ddp": [
        Figure(
            'data-model="buckets"',
            "Round 1: one envelope",
            "send one message of 384 MiB, then many of 1 MiB, first with α = 10 µs and then with 1000. Which numbers "
            "change? (These messages overlap with backward, as in module 3.)",
        )
    ],
    "m04_bucketed_ddp": [
        Figure(
            'data-model="buckets"',
            "Round 1: who travels together?",
            "make the buckets smaller until the exposed time grows again. Then set α to 0. Which size is best now?",
        ),
        Figure(
            'data-toy="buckets"',
            "Round 2: whose turn is it?",
            "let the gradients of rank 1 come in another order, and launch each bucket as soon as it is complete. At "
            "which launch do the ranks disagree?",
        ),
    ],
    "m09_prefetched_weights": [
        Figure(
            'data-model="prefetch"',
            "Measure it",
            "compare prefetch 0 and 1. Here, too, each gather begins before its weights are needed. But this model is "
            "already module 11's, which also frees weights and gathers them again for backward.",
        )
    ],
    "m11_fully_sharded": [
        Figure(
            'data-model="prefetch"',
            "Round 3: start early, wait late",
            "compare prefetch 0 and 1, then increase it further: what does a second unit ahead gain, and what does it "
            "cost?",
        )
    ],
}


class Prediction(NamedTuple):
    """A prompt that asks for a number: words of its paragraph, the question in short, and words of the answer."""

    prompt: str
    question: str
    measured: str


PREDICTIONS = {
    "m00_ring": [
        Prediction("960 kB take through the root", "960 kB in the ring, in ms", "1631 and 557 ms"),
    ],
    "m01_naive_ddp": [
        Prediction("what percentage of a step", "exposed part of a step, in %", "47, 48 and 44 %"),
    ],
    "m02_flat_ddp": [
        Prediction("how long these take on your machine", "39 all-reduces, in ms", "about 24 ms"),
    ],
    "m03_overlapped_ddp": [
        Prediction("what each hook leaves", "the first hook's .grad on rank 0", "1 + 3 = 4"),
        Prediction("by what factor is module 3 faster", "how many times as fast as module 1", "1.4 times as fast"),
    ],
    "m04_bucketed_ddp": [
        Prediction("are there more than 762 buckets", "number of buckets", "339"),
        Prediction("How many buckets do rank 1's hooks launch", "buckets that its hooks launch", "launch none"),
        Prediction("what is the norm of", "norm of the average", "14.59"),
        Prediction("which fraction of backward", "exposed part of backward with 1 bucket", "0.84 and 0.71"),
    ],
    "m05_grad_buffer": [
        Prediction("Which of them are in the first bucket", "parameters in the first bucket", "p0 and p1"),
        Prediction("a view still contains a 3", "what the view contains", "0"),
        Prediction("what is the sum in bf16", "the sum in bf16", "1.0000 in bf16"),
        Prediction("whose gradients are 1, 2 and 4", "what main_grad contains", "4 instead of 7"),
        Prediction("How many MB does a step of module 4 copy", "MB that module 4 copies", "6.96 MB"),
    ],
    "m06_coalesced": [
        Prediction("how many bytes does each of two ranks send", "a reduce-scatter, in S", "1.00 S, 1.00 S and 0.50 S"),
        Prediction("the missing number", "the missing number", "1"),
        Prediction("how long the link is busy with 22", "time with 22 groups", "1.68 times backward"),
    ],
    "m07_cached_shards": [
        Prediction("How much memory does the process use", "additional MB", "400 MB more than before"),
        Prediction("the time of one slice", "one slice, in µs", "0.8 µs"),
    ],
    "m08_zero_optimizer": [
        Prediction("what each of two ranks then owns", "MB on the fuller rank", "2.10 of 2.11 MB"),
        Prediction("both averages in rank 0", "the second average", "4.5"),
        Prediction("the weight's final value", "the final weight", "still 1.0"),
        Prediction("a rank keeps per fp32 parameter", "bytes per parameter on 4 ranks", "16, 12 and 10 bytes"),
        Prediction("how many collectives a step", "collectives of ZeroOptimizer", "78, 8 and 43"),
    ],
    "m09_prefetched_weights": [
        Prediction("relative to module 8", "length of a step, relative to module 8", "0.90 times"),
    ],
    "m10_grad_shards": [
        Prediction("the peak memory of gradients", "peak with one live bucket, in MiB", "10.5 MiB"),
    ],
    "m11_fully_sharded": [
        Prediction("how many bytes this frees", "bytes that it frees", "nothing"),
        Prediction("how many MB of full weights", "peak with prefetch 1, in MB", "1.07, 1.87 and 2.67 MB"),
        Prediction("how many milliseconds communication adds", "ms with prefetch 1", "73 ms"),
    ],
    "m12_lockstep": [
        Prediction(
            "how many tokens does the heavier rank have",
            "its tokens, relative to the mean",
            "1.14 times the mean",
        ),
        Prediction("the gradient, then look at the second line", "the gradient", "2.0000"),
        Prediction("in how many of 100 steps", "slow steps of four ranks", "with four ranks, 36"),
    ],
    "m14_hybrid_sharded": [
        Prediction("how many GB each node sends", "GB per node and step", "13 GB"),
        Prediction("how much shorter is a step", "how much shorter, in %, with eight cards", "1 to 8 % faster"),
    ],
    "m15_sharded_muon": [
        Prediction("How far is the result from the right update", "distance of the halves' update, in %", "33 %"),
        Prediction("with which numbers of ranks is this rule worst", "the worst number of ranks", "seven and 14 ranks"),
    ],
    "m16_half_bytes": [
        Prediction("the bf16 number that is sent", "the error of the weight", "0.001907"),
        Prediction("how large is the relative error then", "error on 2 ranks, in thousandths", "2.46"),
    ],
    "m17_prove_it": [
        Prediction("How many all-reduces does each launch", "all-reduces with no_sync around backward only", "4"),
        Prediction("we have 17 wrong wrappers", "wrong wrappers that it rejects", "It rejects 9"),
        Prediction("we have 18 wrong wrappers", "wrong wrappers that it rejects", "It rejects 8"),
    ],
}

# The scripts of a page, by what they fill there.
SCRIPTS = {
    "data-model": ("widgets", "cost_model", "explore"),
    "data-toy": ("widgets", "toys_model", "toys"),
    "data-timeline": ("widgets", "timeline_model", "timeline"),
    "data-predict": ("widgets", "predict"),
    "data-dumps": ("widgets", "post_mortem"),
}


def add_measurements(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give the figures what was measured: the all-reduces of docs/published.tsv, and the runs of planned.json."""
    if docname == "site/explore":
        with Path(app.srcdir, "docs", "published.tsv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file, delimiter="\t") if row["subject"] == "all_reduce"]
        source[0] = source[0].replace(">[]<", f">{json.dumps([*map(read_measurement, rows)])}<")
        source[0] = source[0].replace(">{}<", f">{Path(app.srcdir, 'site', 'planned.json').read_text()}<")


def read_measurement(row: dict[str, str]) -> tuple[int, int, float]:
    """Return the bytes, ranks and ms of a row. The bus bandwidth counts what a ring sends, as nccl-tests defines it."""
    nbytes, ranks, measured = int(row["sequence"]), int(row["gpus"]), float(row["measured"])
    ms = measured if row["unit"] == "ms" else 2 * (ranks - 1) / ranks * nbytes / (1e6 * measured)
    return nbytes, ranks, round(ms, 5)


def add_scripts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Load the scripts that a page needs."""
    needed = [names for attribute, names in SCRIPTS.items() if f" {attribute}" in context.get("body", "")]
    for name in dict.fromkeys(name for names in needed for name in names):
        app.add_js_file(f"{name}.js", loading_method="defer")
    if needed:
        app.add_css_file("explore.css")


def add_to_chapter(app: Sphinx, doctree: nodes.document) -> None:
    """Add the live figures and the fields for predictions to a chapter."""
    path = Path(app.env.doc2path(app.env.docname))
    chapter = path.parent.name
    if path.name != "README.md" or path.parent.parent.name != "lessons":
        return
    missing = [*add_figures(doctree, chapter), *add_predictions(doctree, chapter)]
    for image in doctree.findall(nodes.image):  # below the picture of a real step
        if image["uri"].endswith("timeline.png"):
            figure = nodes.raw("", render_step(path.parent, "timeline"), format="html")
            section = image.parent.parent
            place = section.index(image.parent) + 1
            place += isinstance(section[place], nodes.paragraph)  # it is about the picture
            section.insert(place, figure)
    for text in missing:
        logging.getLogger(__name__).warning(f"{chapter} does not contain {text!r}, which site/live.py names")


def make_box(attributes: str, content: str = "") -> nodes.raw:
    """Return a figure that is hidden until its script fills it."""
    return nodes.raw("", f'<div class="explorer" {attributes} hidden>{content}</div>', format="html")


def add_figures(doctree: nodes.document, chapter: str) -> Iterator[str]:
    """Add a chapter's live figures to its sections. Yield the headings that it lacks."""
    sections = {flatten(section[0]): section for section in doctree.findall(nodes.section)}
    for figure in FIGURES.get(chapter, ()):
        if figure.heading in sections:
            text = f"<p><em>Try:</em> {html.escape(figure.sentence)}</p>"
            sections[figure.heading].append(make_box(figure.attribute, text))
        else:
            yield figure.heading


def add_predictions(doctree: nodes.document, chapter: str) -> Iterator[str]:
    """Add a field before each answer whose prompt asks for a number. Yield the prompts and answers that are missing."""
    blocks = [node for node in doctree.findall() if isinstance(node, nodes.paragraph | nodes.raw | nodes.entry)]
    texts = [node.astext() if isinstance(node, nodes.raw) else flatten(node) for node in blocks]
    for number, (prompt, question, measured) in enumerate(PREDICTIONS.get(chapter, ())):
        first = next((i for i, text in enumerate(texts) if prompt in text and "predict" in text.lower()), len(texts))
        opens = next((i for i in range(first, len(texts)) if texts[i].startswith("<details>")), len(texts))
        closes = next((i for i in range(opens, len(texts)) if "</details>" in texts[i]), len(texts))
        if opens == len(texts) or not any(measured in text for text in texts[opens:closes]):
            yield prompt if opens == len(texts) else measured
            continue
        words = {"predict": str(number), "question": question, "measured": measured}
        field = " ".join(f'data-{name}="{html.escape(value)}"' for name, value in words.items())
        answer = blocks[opens]
        answer.parent.insert(answer.parent.index(answer), make_box(field))
    if chapter in PREDICTIONS:
        doctree[0].append(make_box("data-predictions"))


def flatten(node: nodes.Node) -> str:
    """Return the text of a node on one line, with straight quotes."""
    return re.sub(r"\s+", " ", node.astext()).replace("\u2019", "'")
