// The order of search results. A heading with the words comes before a page that only contains them, then lessons come first.
var Scorer = {
  score: ([page, , , , score, , kind]) => score + (kind === "title" ? 2 : 0) + (page.startsWith("lessons/") ? 1 : 0),
  // Sphinx's own numbers, which it does not use together with the line above.
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
