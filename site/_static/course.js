/* What readers with a keyboard or a screen reader need in addition: blocks that scroll can be focused, headings have levels. */
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("pre, .table-wrapper, .output_area").forEach((block) => { block.tabIndex = 0; });
  document.querySelectorAll("[role=heading]:not([aria-level])").forEach((heading) => heading.setAttribute("aria-level", "2"));
});
