/* What all live figures share: elements, controls whose values are in the address, numbers with labels, and drawing. */
"use strict";

const widgets = (() => {
  const COLOURS = {forward: "#8fcdf0", backward: "#0072b2", all_reduce: "#e69f00", all_gather: "#fff3d6",
    reduce_scatter: "#f7cf7c", latency: "#6b4a00", exposed: "#d55e00", memory: "#009e73", finish: "#8c8c8c",
    step: "var(--color-foreground-primary)"};
  const MANY = 80; // so many launches or transfers are drawn smaller
  const LANE = 26;
  const hasAddress = location.protocol !== "about:"; // the frame of a notebook has none

  /** Return a new element with attributes and text. Names that begin with "svg:" are SVG elements. */
  function make(name, attributes = {}, text = null) {
    const element = name.startsWith("svg:")
      ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
      : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    return element;
  }

  /** Replace the content of an element by numbers: lists of a name, a label and a value. */
  function showNumbers(element, numbers) {
    element.replaceChildren(...numbers.map(([name, label, value]) => {
      const pair = make("div");
      pair.append(make("span", {}, label), make("strong", {"data-name": name}, value));
      return pair;
    }));
  }

  /** Return the settings that the address contains, such as "#buckets.alpha=10&buckets.ranks=64". */
  const readAddress = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");

  /** Write settings of one figure into the address. Those of other figures stay. */
  function writeAddress(figure, settings) {
    if (!hasAddress) return;
    const address = readAddress();
    for (const [name, value] of Object.entries(settings)) address.set(`${figure}.${name}`, value);
    history.replaceState(null, "", `#${address}`);
  }

  /** Add a slider over `values`, or a menu of `options`. Return functions that get its value, and set it from a
   * text. `set` returns whether the control has this value. */
  function addControl(element, {label, name, values, options, first, unit = "", format}, onInput) {
    const row = element.appendChild(make("label", {}, label));
    if (options) {
      const menu = row.appendChild(make("select", {name}));
      menu.append(...Object.entries(options).map(([value, text]) => make("option", {value}, text)));
      menu.addEventListener("change", onInput);
      const set = (text) => {
        if (Object.hasOwn(options, text)) menu.value = text;
        return menu.value === text;
      };
      return {get: () => menu.value, set};
    }
    const output = row.appendChild(make("output"));
    const slider = row.appendChild(make("input", {type: "range", name, min: 0, max: values.length - 1, value: values.indexOf(first)}));
    const get = () => values[slider.value];
    const show = () => {
      output.textContent = format ? format(get()) : `${get()} ${unit}`.trim();
      slider.setAttribute("aria-valuetext", output.textContent);
    };
    slider.addEventListener("input", () => {
      show();
      onInput();
    });
    show();
    const set = (text) => {
      const index = values.findIndex((value) => String(value) === text);
      if (index >= 0) slider.value = index;
      show();
      return index >= 0;
    };
    return {get, set};
  }

  /** Add the controls of a figure to an element. Return its settings, which follow the controls and the address. */
  function addControls(element, figure, controls, onChange) {
    const settings = {};
    const added = controls.map((control) => [control.name, addControl(element, control, () => {
      read();
      writeAddress(figure, settings);
      onChange();
    })]);
    const read = () => added.forEach(([name, control]) => { settings[name] = control.get(); });
    const follow = () => {
      const address = readAddress();
      const given = added.map(([name, control]) => [name, control, address.get(`${figure}.${name}`)]).filter(([, , text]) => text !== null);
      const ignored = given.filter(([, control, text]) => !control.set(text)).map(([name, , text]) => `${name} = ${text}`);
      note.textContent = ignored.length ? `The address contains settings that this figure does not have, and ignores: ${ignored.join(", ")}.` : "";
      read();
      return given.length > 0;
    };
    const last = make("div", {class: "address"});
    if (hasAddress) element.append(last);
    const button = last.appendChild(make("button", {type: "button"}, "Copy a link to these settings"));
    const note = last.appendChild(make("span", {"aria-live": "polite"}));
    button.addEventListener("click", async () => {
      writeAddress(figure, settings);
      try {
        await navigator.clipboard.writeText(location.href);
        note.textContent = "Copied.";
      } catch {
        note.textContent = "The browser did not allow it: copy the address of this page instead.";
      }
    });
    if (follow()) element.scrollIntoView({block: "center"});
    addEventListener("hashchange", () => { if (follow()) onChange(); });
    return settings;
  }

  /** Return a table with a head. The row whose number is `chosen` is marked. */
  function makeTable(head, rows, chosen = -1) {
    const table = make("table");
    const addRow = (cells, tag, cell, row) => table.appendChild(make("tr", row)).append(...cells.map((text) => make(tag, cell, text)));
    addRow(head, "th", {scope: "col"}, {});
    rows.forEach((cells, index) => addRow(cells, "td", {}, index === chosen ? {class: "chosen", "aria-current": "true"} : {}));
    return table;
  }

  const opened = {}; // the folded tables, which are drawn again with each setting

  /** Return a table that opens with a click and scrolls in its own box. */
  function foldTable(summary, table) {
    const details = make("details");
    details.open = opened[summary];
    const head = details.appendChild(make("summary", {}, summary));
    head.addEventListener("click", () => { opened[summary] = !details.open; }); // "toggle" would come after a new drawing
    const box = make("div", {class: "table-wrapper", tabindex: 0, role: "region", "aria-label": summary});
    box.append(table);
    details.append(box);
    return details;
  }

  const formatMs = (seconds) => `${(1e3 * seconds).toFixed(1)} ms`;
  const formatMB = (nbytes) => `${(nbytes / 1e6).toFixed(nbytes < 1e8 ? 1 : 0)} MB`;

  /** Return the smallest round number that is at least `value`. */
  function roundUp(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 1.2, 1.6, 2, 3, 4, 6, 8, 10].map((part) => part * power).find((round) => round >= value * (1 - 1e-9));
  }

  /** A figure with a horizontal axis of time. */
  class Figure {
    static count = 0;

    constructor(width, height, seconds, title) {
      this.width = width;
      this.svg = make("svg:svg", {width, height, role: "img", "aria-label": title});
      this.scale = (width - 12) / roundUp(seconds);
      this.hatching = `hatching-${Figure.count++}`;
      const pattern = make("svg:pattern", {id: this.hatching, width: 8, height: 8, patternUnits: "userSpaceOnUse"});
      pattern.append(make("svg:path", {d: "M-2 2L2 -2M0 8L8 0M6 10L10 6", stroke: COLOURS.exposed, "stroke-width": 2}));
      this.svg.append(pattern);
      this.drawAxis(height, roundUp(seconds));
    }

    place(seconds) {
      return 2 + seconds * this.scale;
    }

    drawAxis(height, seconds) {
      for (let tick = 0; tick <= 4; tick++) {
        const x = this.place(seconds * tick / 4);
        const anchor = ["start", "middle", "middle", "middle", "end"][tick];
        this.draw("line", {class: "grid", x1: x, x2: x, y1: 0, y2: height - 16});
        const text = `${Number((250 * seconds * tick).toPrecision(6))}${tick === 4 ? " ms" : ""}`;
        if (tick === 3 && 8 * (1.5 * text.length + 3) > this.width / 4) continue; // it would touch the last label
        this.write(x, height - 3, text, anchor);
      }
    }

    draw(name, attributes) {
      return this.svg.appendChild(make(`svg:${name}`, attributes));
    }

    write(x, y, text, anchor = "start", fill = "") {
      const element = this.svg.appendChild(make("svg:text", {x, y, "text-anchor": anchor}, text));
      if (fill) element.style.fill = fill;
    }

    /** Draw a block in a lane. Draw its label too, if there is room. */
    block(top, start, end, colour, label = "", attributes = {}) {
      const x = this.place(start);
      const width = this.place(end) - x;
      this.draw("rect", {x, y: top, width, height: LANE, fill: colour, class: "block", ...attributes});
      if (Math.round(width) > 7 * label.length + 6) {
        this.write(x + width / 2, top + 17, label, "middle", colour === COLOURS.backward ? "#ffffff" : "#1a1a1a");
      }
    }

    /** Mark each launch below the lane of computation. */
    launches(top, times) {
      const size = times.length > MANY ? 1.5 : 4;
      for (const time of times) {
        const x = this.place(time);
        this.draw("path", {class: "launch", d: `M${x - size} ${top}L${x + size} ${top}L${x} ${top + 8}Z`});
      }
    }

    /** Draw exposed communication: the rank waits from `start` to `end`. */
    exposed(top, start, end) {
      if (end > start) this.block(top, start, end, `url(#${this.hatching})`, "", {class: "block exposed"});
    }

    /** Draw a dashed line with a name. */
    mark(seconds, height, text) {
      const x = this.place(seconds);
      this.draw("line", {class: "mark", x1: x, x2: x, y1: 2, y2: height});
      this.write(x > 0.6 * this.width ? x - 5 : x + 5, 12, text, x > 0.6 * this.width ? "end" : "start");
    }
  }

  return {COLOURS, LANE, MANY, make, showNumbers, addControls, readAddress, writeAddress, makeTable, foldTable, Figure, formatMs, formatMB};
})();
