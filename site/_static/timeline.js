/* The live figure below a chapter's picture of a real step: recorded runs, and the same runs on a link of another speed. */
"use strict";

(() => {
  const {make, showNumbers, addControls, readAddress, writeAddress, makeTable, foldTable, Figure, COLOURS, LANE, formatMs, formatMB} = widgets;
  const PHASES = ["forward", "backward", "finish", "step"]; // COLOURS has these names
  const SPEEDS = [0.25, 0.5, 1, 2, 4, 16];
  const ROW = 104; // the height of a rank
  const SHORT_US = 100; // shorter waits are not mentioned

  const us = (time) => time / 1e6;

  /** Return the names of a run's collectives, such as "all-reduce 3". */
  function nameCollectives(run) {
    const counts = {};
    return run.collectives.map(([op]) => `${op.replace("_", "-")} ${counts[op] = (counts[op] ?? -1) + 1}`);
  }

  /** Return what happens in a step, in order: lists of a time and a sentence. */
  function listEvents(run, step, names) {
    const events = [];
    const add = (time, text) => events.push([time, text]);
    step.launched.forEach((times, rank) => times.forEach((time, index) =>
      add(time, `Rank ${rank} launches ${names[index]}, ${formatMB(run.collectives[index][1])}.`)));
    step.transfers.forEach(([start, end], index) => {
      add(start, `The link begins ${names[index]}: every rank has launched it, and the link is free.`);
      add(end, `${names[index]} is complete on every rank.`);
    });
    step.waits.forEach((waits, rank) => waits.filter(([start, end]) => end - start > SHORT_US).forEach(([start, end, index]) => {
      add(start, `Rank ${rank} begins to wait for ${names[index]}.`);
      add(end, `Rank ${rank} has waited ${formatMs(us(end - start))} for ${names[index]}.`);
    }));
    step.phases.forEach((ends, rank) => ends.forEach((end, phase) =>
      add(end, `Rank ${rank} ends ${["forward", "backward", "finish_grad_sync", "the step"][phase]}.`)));
    return events.sort(([one], [other]) => one - other);
  }

  /** Draw a step. What happens after `time` is faded. */
  function draw(run, step, time, width, longest) {
    const height = ROW * run.ranks.length + 18;
    const figure = new Figure(width, height, us(longest), `A step of ${run.name} on ${run.ranks.length} ranks. The numbers follow as text.`);
    const short = run.collectives.map(([op], index) => run.collectives.slice(0, index).filter((other) => other[0] === op).length);
    run.ranks.forEach((_, rank) => {
      const top = ROW * rank;
      const waits = step.waits[rank].filter(([start, end]) => end - start > SHORT_US);
      step.phases[rank].forEach((end, phase, ends) => {
        const start = phase ? ends[phase - 1] : run.starts[rank];
        const isPlain = phase < 2 && !waits.some((wait) => wait[0] < end && wait[1] > start);
        figure.block(top + 18, us(start), us(end), COLOURS[PHASES[phase]], isPlain ? PHASES[phase] : "");
      });
      for (const [start, end] of waits) {
        figure.block(top + 18, us(start), us(end), "var(--color-background-primary)", "", {class: "ground"});
        figure.exposed(top + 18, us(start), us(end));
      }
      figure.launches(top + 46, step.launched[rank].map(us));
      step.transfers.forEach(([start, end], index) => start < longest
        && figure.block(top + 58, us(start), us(Math.min(end, longest)), COLOURS[run.collectives[index][0]], String(short[index])));
    });
    if (time < step.end) {
      const x = figure.place(us(time));
      figure.draw("rect", {class: "later", x, y: 0, width: Math.max(0, width - x), height: height - 16});
      figure.draw("line", {class: "mark", x1: x, x2: x, y1: 0, y2: height - 16});
    }
    run.ranks.forEach((_, rank) => figure.write(2, ROW * rank + 13, `rank ${rank} computes; its collectives below`));
    return figure.svg;
  }

  /** Return a line that says what the colours and marks of a run mean. */
  function makeLegend(run) {
    const line = make("p", {class: "legend"});
    const ops = [...new Set(run.collectives.map(([op]) => op))].map((op) => [op, op.replace("_", "-")]);
    for (const [kind, name] of [["forward", "forward"], ["backward", "backward"], ["finish", "finish_grad_sync"], ["step", "optimizer step"], ...ops]) {
      line.append(make("i", {style: `background: ${COLOURS[kind]}`}), `${name} `);
    }
    line.append("▼\u00a0launch, hatched:\u00a0waits; the numbers count each kind of collective");
    return line;
  }

  /** Return a folded table with the times of every collective. */
  function makeTimes(run, step, names) {
    const ms = (time) => (time / 1e3).toFixed(1);
    const head = ["times in ms", "size", ...run.ranks.map((_, rank) => `launched by rank ${rank}`), "begins", "ends"];
    const rows = names.map((name, index) => [name, formatMB(run.collectives[index][1]),
      ...step.launched.map((times) => ms(times[index])), ...step.transfers[index].map(ms)]);
    return foldTable("The times as text", makeTable(head, rows));
  }

  /** Fill an element with sliders, buttons, numbers and the figure. */
  function start(element) {
    const runs = JSON.parse(element.querySelector("script").textContent);
    const sliders = element.appendChild(make("div", {class: "sliders"}));
    const buttons = element.appendChild(make("div", {class: "buttons"}));
    const status = element.appendChild(make("p", {role: "status"}));
    const numbers = element.appendChild(make("div", {class: "numbers"}));
    const figures = element.appendChild(make("div", {class: "figures"}));
    const text = element.appendChild(make("div"));
    let at = null; // the number of the event that is shown last; null for the whole step
    let events = [];
    element.hidden = false;

    function show() {
      const run = runs[settings.run];
      const step = timelineModel.replay(run, settings.link);
      const names = nameCollectives(run);
      events = listEvents(run, step, names);
      if (at !== null) at = Math.max(0, Math.min(at, events.length - 1));
      const exposed = step.exposed.map((time) => formatMs(us(time)));
      const own = run.collectives.filter((_, index) => step.launched[0][index] > run.starts[0]); // others: the step before
      const nbytes = own.reduce((sum, one) => sum + one[1], 0);
      showNumbers(numbers, [["step", settings.link === 1 ? "step, recorded" : "step, computed", formatMs(us(step.end))],
        ["exposed", `exposed on ranks 0 to ${exposed.length - 1}`, exposed.join(", ")],
        ["count", "collectives launched", `${own.length}, ${formatMB(nbytes)}`]]);
      status.textContent = at === null ? `The whole step of ${run.name}. “Step” begins with its first event.`
        : `${formatMs(us(events[at][0]))}: ${events[at][1]} (${at + 1} of ${events.length})`;
      const longest = Math.max(...runs.map((other) => timelineModel.replay(other, settings.link).end));
      if (figures.clientWidth) figures.replaceChildren(draw(run, step, at === null ? Infinity : events[at][0], figures.clientWidth, longest), makeLegend(run));
      text.replaceChildren(makeTimes(run, step, names));
    }

    function go(target) {
      at = target;
      show();
      writeAddress("timeline", {at: at ?? "all"});
    }

    const settings = addControls(sliders, "timeline", [
      {name: "run", label: "recorded: the run", values: runs.map((_, index) => index), first: (runs.length - 2) >> 1, format: (index) => runs[index].name},
      {name: "link", label: "computed: speed of the link", values: SPEEDS, first: 1, format: (speed) => (speed === 1 ? "as recorded" : `${speed} × as fast`)},
    ], show);
    for (const [label, move] of [["Step back", () => (at ?? events.length) - 1], ["Step", () => (at ?? -1) + 1], ["Whole step", () => null]]) {
      buttons.appendChild(make("button", {type: "button"}, label)).addEventListener("click", () => go(move()));
    }
    const asked = readAddress().get("timeline.at");
    if (/^\d+$/.test(asked)) at = Number(asked);
    new ResizeObserver(show).observe(figures); // also calls show() once
  }

  document.querySelectorAll("[data-timeline]").forEach(start);
})();
