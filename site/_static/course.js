/* What readers with a keyboard, a screen reader or a phone need in addition. */
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  // Blocks that scroll can be focused, and headings have levels.
  document.querySelectorAll("pre, .table-wrapper, .output_area, article p:has(> img:only-child)").forEach((block) => { block.tabIndex = 0; });
  document.querySelectorAll("[role=heading]:not([aria-level])").forEach((heading) => heading.setAttribute("aria-level", "2"));
  // A table with long texts becomes a list on a phone, in which each cell repeats its column's heading.
  for (const table of document.querySelectorAll("table.docutils:has(thead)")) {
    const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")];
    if (headings.length < 4 || cells.every((cell) => cell.textContent.length < 24)) continue;
    const isShort = headings.map((_, column) => cells.every((cell) => cell.cellIndex !== column || cell.textContent.length < 15));
    table.classList.add("listed");
    cells.forEach((cell) => {
      cell.dataset.heading = headings[cell.cellIndex];
      cell.classList.toggle("empty", !cell.textContent.trim());
      cell.classList.toggle("short", isShort[cell.cellIndex]);
    });
  }
  // Paths break after slashes, and long names in tables after underscores. In the contents and after a table's first column,
  // names also break after dots and before capitals. A break at the end would remove a space that follows.
  document.querySelectorAll("code.literal .pre, .toc-tree a:not(:has(*))").forEach((code) => {
    code.classList.toggle("option", /^--\S{1,24}$/.test(code.textContent));
    const isLong = code.closest("td:not(:first-child), .toc-tree");
    const inTable = code.closest("table") ? /(?<=[/_=(])(?=\w{3})/ : /(?<=\/)(?=.)/;
    const parts = code.textContent.split(isLong ? /(?<=[./_=(])(?=\w{3})|(?<=[a-z]{4})(?=[A-Z][a-z]{3})/ : inTable);
    code.replaceChildren(...parts.flatMap((part, index) => (index ? [document.createElement("wbr"), part] : [part])));
  });
  // Blocks that contain only commands wrap, and not inside an option.
  const isCommand = (line) => /^(brigade|make|pytest|python|torchrun) /.test(line);
  document.querySelectorAll(".highlight-none pre").forEach((block) => {
    block.closest(".highlight-none").classList.toggle("highlight-sh", block.textContent.trim().split("\n").every(isCommand));
  });
  for (const block of document.querySelectorAll(".highlight-sh pre")) {
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts) {
      text.replaceWith(...text.data.split(/(--[\w-]+)/).map((part, index) => {
        if (index % 2 === 0) return part;
        const option = document.createElement("span");
        option.className = "option";
        option.textContent = part;
        return option;
      }));
    }
  }
});
