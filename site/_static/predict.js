/* A field for each prediction of a chapter. What readers write stays in their browser, and the chapter's end compares it. */
"use strict";

(() => {
  const {make} = widgets;
  const fields = [...document.querySelectorAll("[data-predict]")];
  const place = `predictions:${location.pathname.split("/").slice(-2)[0]}`;
  const summary = document.querySelector("[data-predictions]");
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(place)) ?? {};
  } catch { /* nothing is stored, or the browser stores nothing */ }

  function keep(changed) {
    kept = changed;
    try {
      localStorage.setItem(place, JSON.stringify(kept));
    } catch { /* then the predictions last until the page is closed */ }
    show();
  }

  const compare = ({dataset: {predict, measured}}) => `You predicted “${kept[predict].text}”. Our answer: ${measured}.`;

  /** Show the list at the chapter's end: every prediction whose answer has been opened. */
  function show() {
    const over = fields.filter(({dataset: {predict}}) => kept[predict]?.opened && kept[predict].text);
    const list = make("ul");
    list.append(...over.map((field) => make("li", {}, `${field.dataset.question}: ${compare(field)}`)));
    const button = make("button", {type: "button"}, "Forget my predictions in this chapter");
    button.addEventListener("click", () => {
      keep({});
      fields.forEach((field) => field.dispatchEvent(new Event("refresh")));
    });
    summary.hidden = !Object.keys(kept).length;
    summary.replaceChildren(make("p", {class: "name"}, "Your predictions"), ...(over.length ? [list] : []),
      make("p", {}, "They are stored only in this browser. A prediction appears here after you have opened its answer."), button);
  }

  for (const field of fields) {
    const {predict, question} = field.dataset;
    const label = field.appendChild(make("label", {}, `Your prediction: ${question}`));
    const input = label.appendChild(make("input", {type: "text", name: predict, autocomplete: "off", maxlength: 40}));
    const status = field.appendChild(make("p", {role: "status"}));
    const refresh = () => {
      const {text = "", opened} = kept[predict] ?? {};
      input.value = text;
      input.readOnly = Boolean(opened);
      status.textContent = opened ? (text ? compare(field) : "You have opened the answer.") : "";
    };
    let answer = field.nextElementSibling;
    while (answer && answer.localName !== "details") answer = answer.nextElementSibling;
    input.addEventListener("input", () => keep({...kept, [predict]: {text: input.value.trim()}}));
    answer?.addEventListener("toggle", () => {
      if (!answer.open || kept[predict]?.opened) return;
      keep({...kept, [predict]: {text: input.value.trim(), opened: true}});
      refresh();
    });
    field.addEventListener("refresh", refresh);
    refresh();
    field.hidden = false;
  }
  if (summary) show();
})();
