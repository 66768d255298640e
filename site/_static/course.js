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
    table.classList.add("listed");
    cells.forEach((cell) => {
      cell.dataset.heading = headings[cell.cellIndex];
      cell.classList.toggle("empty", !cell.textContent.trim());
    });
  }
  // Paths break after slashes.
  document.querySelectorAll("code.literal .pre").forEach((code) => {
    code.replaceChildren(...code.textContent.split(/(?<=\/)(?=.)/).flatMap((part) => [part, document.createElement("wbr")]));
  });
});
