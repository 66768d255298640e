// The order of search results. A heading with the words comes before a page that only contains them. Then pages by question
// come first, then lessons. The API reference, which contains every word of a name, comes last.
const PLACES = { "site/questions/": 3, "lessons/": 1, "site/api": -20 };
var Scorer = {
  score: ([page, , , , score, , kind]) => score + (kind === "title" ? 2 : 0)
    + (PLACES[Object.keys(PLACES).find((place) => page.startsWith(place))] ?? 0),
  // Sphinx's own numbers, which it does not use together with the line above.
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
