/* The sliders of the cost model: they change the settings of cost_model.js, and redraw the figures and the numbers. */
"use strict";

(() => {
  const {make, showNumbers, addControls, makeTable, foldTable, Figure, COLOURS, LANE, MANY, formatMs, formatMB} = widgets;
  const MIB = 2 ** 20;
  const BUCKETS_MIB = [1, 2, 3, 4, 6, 8, 12, 16, 25, 32, 48, 64, 96, 128, 192, 384];
  const LINK_CONTROLS = [
    {name: "alpha", label: "α, latency of a message", unit: "µs", first: 10,
      values: [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]},
    {name: "beta", label: "β, bandwidth of the link", unit: "Gbit/s", first: 100,
      values: [1, 2.5, 5, 10, 25, 50, 100, 200, 400, 800]},
    {name: "ranks", label: "N, number of ranks", unit: "", first: 64, values: [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]},
    {name: "cards", label: "network cards of a node, each with a ring", unit: "", first: 1, values: [1, 2, 4, 8]},
  ];
  const ALGORITHM = {name: "algorithm", label: "algorithm of the all-reduce", first: "ring", values: ["ring", "tree"]};

  /** Draw the transfers on the link. The latency of each transfer is dark. */
  function drawTransfers(figure, top, transfers, labels, link, ranks) {
    const border = transfers.length > MANY ? {"stroke-width": 0} : {};
    transfers.forEach(({op, start, end}, index) => {
      figure.block(top, start, end, COLOURS[op], labels[index], border);
      const latency = costModel.computeSeconds(link, op, 0, ranks);
      const width = latency * figure.scale;
      if (width >= 0.5) {
        figure.draw("rect", {x: figure.place(start), y: top + LANE - 7, width, height: 7, fill: COLOURS.latency});
      }
    });
  }

  function drawBuckets(settings, width) {
    const {link, ranks} = settings;
    const step = costModel.simulateBuckets(link, ranks, settings.bucket * MIB);
    const {numBuckets, transfers, backward} = step;
    const figure = new Figure(width, 148, step.end, `A step with ${numBuckets} buckets`);
    const names = transfers.map((_, index) => String(index));
    const shown = numBuckets > MANY ? [{start: 0, end: backward}] : names.map((_, index) => ({
      start: backward * index / numBuckets, end: backward * (index + 1) / numBuckets}));
    figure.write(2, 30, "computation: backward");
    shown.forEach(({start, end}, index) => figure.block(34, start, end, COLOURS.backward, shown.length > 1 ? names[index] : ""));
    figure.exposed(34, backward, step.end);
    figure.launches(62, transfers.map(({launched}) => launched));
    figure.write(2, 86, "link: all-reduce");
    drawTransfers(figure, 90, transfers, names, link, ranks);
    figure.mark(backward, 118, "end of backward");
    const [first] = transfers;
    return {
      figures: [figure.svg, drawCurve(settings, width)],
      numbers: [
        ["buckets", "buckets", `${numBuckets} of ${formatMB(first.nbytes)}`],
        ["collective", "one all-reduce", formatMs(first.end - first.start)],
        ["latency", "latency per all-reduce", formatMs(costModel.computeSeconds(link, "all_reduce", 0, ranks))],
        ["backward", "backward", formatMs(backward)],
        ["exposed", "exposed", formatMs(step.exposed)],
        ["end", "backward and exposed", formatMs(step.end)],
      ],
    };
  }

  const listPowers = (low, high) => Array.from({length: high - low + 1}, (_, index) => Number((10 ** (low + index)).toPrecision(1)));

  /** Return a picture with logarithmic axes between the first and the last of their ticks, and what places values there. */
  function drawAxes(title, width, height, {ticks, levels, names}) {
    const [lowest, highest] = [levels[0], levels.at(-1)].map(Math.log10);
    const svg = make("svg:svg", {width, height, role: "img", "aria-label": title});
    const left = 58;
    const [first, last] = [ticks[0], ticks.at(-1)].map(Math.log);
    const findX = (mib) => left + 12 + (width - left - 34) * (Math.log(mib) - first) / (last - first);
    const findY = (ms) => 26 + (height - 62) * (highest - Math.log10(ms)) / (highest - lowest);
    const write = (x, y, text, anchor) => svg.append(make("svg:text", {x, y, "text-anchor": anchor}, text));
    for (const level of levels) {
      const y = findY(level);
      svg.append(make("svg:line", {class: "grid", x1: left, x2: width, y1: y, y2: y}));
      write(left - 5, y + 4, String(level), "end");
    }
    for (const mib of ticks) write(findX(mib), height - 20, String(Number(mib.toPrecision(5))).slice(0, 5), "middle");
    write(2, 12, names[1], "start");
    write(width - 2, height - 4, names[0], "end");
    const curve = (points) => svg.append(make("svg:polyline", {class: "curve", points: points.map(([mib, ms]) => `${findX(mib)},${findY(ms)}`).join(" ")}));
    const point = (mib, ms, attributes) => svg.append(make("svg:circle", {cx: findX(mib), cy: findY(ms), ...attributes}));
    return {svg, curve, point};
  }

  /** Draw the exposed time against the size of a bucket, and mark the chosen size. */
  function drawCurve({link, ranks, bucket}, width) {
    const values = BUCKETS_MIB.map((mib) => 1e3 * costModel.simulateBuckets(link, ranks, mib * MIB).exposed);
    const {svg, curve, point} = drawAxes("Exposed time against the size of a bucket", width, 170, {
      ticks: [1, 4, 16, 64, 384],
      levels: listPowers(Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)))),
      names: ["size of a bucket (MiB)", "exposed (ms)"]});
    curve(values.map((ms, index) => [BUCKETS_MIB[index], ms]));
    point(bucket, values[BUCKETS_MIB.indexOf(bucket)], {r: 6, fill: COLOURS.exposed});
    return svg;
  }

  /** Draw measured all-reduces, lists of bytes, ranks and ms, and the model's line for the chosen settings. */
  function drawMeasured({link, ranks}, width, measured) {
    const compute = (nbytes) => 1e3 * costModel.computeSeconds(link, "all_reduce", nbytes, ranks);
    const {svg, curve, point} = drawAxes("Time of an all-reduce against its size", width, 250,
      {ticks: [1 / 32, 1, 32, 1024, 16384], levels: listPowers(-2, 3), names: ["size (MiB)", "time (ms)"]});
    const sizes = Array.from({length: 40}, (_, index) => 2 ** (index / 39 * 19 - 5));
    curve(sizes.map((mib) => [mib, Math.min(1e3, Math.max(1e-2, compute(mib * MIB)))]));
    const own = measured.filter((one) => one[1] === ranks);
    for (const [nbytes, n, ms] of measured) point(nbytes / MIB, ms, n === ranks ? {r: 5, fill: COLOURS.exposed} : {r: 3, class: "other"});
    const ratios = own.map(([nbytes, , ms]) => compute(nbytes) / ms).sort((one, other) => one - other);
    return {
      figures: [svg],
      numbers: [
        ["latency", "latencies", formatMs(compute(0) / 1e3)],
        ["gigabyte", "an all-reduce of 1 GiB", formatMs(compute(1024 * MIB) / 1e3)],
        ["points", `measured on ${ranks} ranks`, String(own.length)],
        ["ratio", "computed ÷ measured", own.length ? `${ratios[0].toFixed(2)} to ${ratios.at(-1).toFixed(2)}` : "–"],
      ],
    };
  }

  const PLANNED = {calibrated: [6, "calibrated by a smaller run"], half: [7, "the same, with --network-efficiency 0.5"],
    guessed: [5, "with a guessed utilisation"], null: [8, "as many tokens/s per GPU as in the smaller run"]};

  /** Draw published runs, lists as of `list_planned` in tools/validate_plan.py: planned ÷ measured against the GPUs. */
  function drawPlanned(settings, width, runs) {
    const [column] = PLANNED[settings.prediction];
    const isIn = (value, range) => {
      const [low, high] = range.split("-").map(Number);
      return range === "all" || (value !== null && value >= low && value <= (high || Infinity));
    };
    const known = runs.filter((run) => run[column] !== null);
    const own = known.filter(([model, gpu, , nodes, , , , , , share, kind]) => isIn(nodes, settings.nodes)
      && isIn(share && Math.floor(100 * share), settings.communication)
      && [[settings.model, model], [settings.gpu, gpu], [settings.smaller, kind]].every(([asked, one]) => asked === "all" || asked === one));
    const {svg, curve, point} = drawAxes("Planned divided by measured seconds of a step, against the number of GPUs", width, 250,
      {ticks: [2, 8, 32, 128, 512, 2048], levels: [0.25, 0.5, 1, 2], names: ["GPUs", "planned ÷ measured step time"]});
    curve([[2, 1], [2048, 1]]);
    for (const run of known) if (!own.includes(run)) point(run[2], 1 + run[column], {r: 3, class: "other"});
    for (const run of own) point(run[2], 1 + run[column], {r: 4, fill: COLOURS.exposed, class: "block"});
    const sizes = own.map((run) => Math.abs(run[column])).sort((one, other) => one - other);
    const percent = (value) => `${(100 * value).toFixed(1)} %`;
    const pick = (index) => sizes[Math.ceil(index) - 1];
    return {
      figures: [svg, foldTable("The runs as text", makeTable(["model", "GPUs", "measured", "planned", "error"], own.map((run) =>
        [run[0], `${run[2]} ${run[1]}`, `${run[4].toFixed(2)} s`, `${(run[4] * (1 + run[column])).toFixed(2)} s`, percent(run[column])])))],
      numbers: [
        ["count", "runs", `${own.length} of ${known.length}`],
        ["median", "median error", own.length ? percent((pick(sizes.length / 2) + pick((sizes.length + 1) / 2)) / 2) : "–"],
        ["most", "nine of ten within", own.length ? percent(pick(0.9 * sizes.length)) : "–"],
        ["short", "planned too short", String(own.filter((run) => run[column] < 0).length)],
      ],
    };
  }

  function drawPrefetch({link, ranks, prefetch}, width) {
    const steps = costModel.PLANS.map((_, depth) => costModel.simulatePrefetch(link, ranks, depth));
    const step = steps[prefetch];
    const total = costModel.UNIT_BYTES.reduce((sum, nbytes) => sum + nbytes);
    const figure = new Figure(width, 246, step.end, `A step with prefetch ${prefetch}`);
    const {computed, transfers, allocations} = step;
    const numUnits = costModel.UNIT_BYTES.length;
    const name = (unit) => (unit ? String(unit) : "root");
    figure.write(2, 30, "computation: forward, backward");
    let free = 0;
    computed.forEach(({unit, start, end}, index) => {
      figure.exposed(34, free, start);
      figure.block(34, start, end, index < numUnits ? COLOURS.forward : COLOURS.backward, name(unit));
      free = end;
    });
    figure.exposed(34, free, step.end);
    figure.launches(62, transfers.map(({launched}) => launched));
    const units = costModel.PLANS[prefetch].join(" ").split(" ").filter((action) => action[0] !== "c");
    figure.write(2, 86, "link: all-gather g, reduce-scatter r");
    drawTransfers(figure, 90, transfers, units, link, ranks);
    figure.mark(computed[numUnits].start, 118, "backward");

    figure.write(2, 140, "memory of full weights");
    const times = [...new Set(allocations.flatMap(({start, end}) => [start, end]))].sort((one, other) => one - other);
    const base = 224;
    times.slice(0, -1).forEach((time, index) => {
      const alive = allocations.filter(({start, end}) => start <= time && time < end);
      const nbytes = alive.reduce((sum, {unit}) => sum + costModel.UNIT_BYTES[unit], 0);
      const height = 72 * nbytes / total;
      const x = figure.place(time);
      const width = figure.place(times[index + 1]) - x;
      figure.draw("rect", {x, y: base - height, width: width + 0.5, height, fill: COLOURS.memory}); // the extra 0.5 avoids seams
    });
    const peak = base - 72 * step.peakBytes / total;
    figure.draw("line", {class: "mark", x1: 2, x2: width - 10, y1: peak, y2: peak});
    figure.write(width - 10, peak - 4, `peak ${formatMB(step.peakBytes)} of ${formatMB(total)}`, "end");

    const rows = steps.map(({peakBytes, exposed}, depth) => [depth, formatMB(peakBytes), formatMs(exposed)]);
    const table = makeTable(["prefetch", "peak of full weights", "exposed"], rows, prefetch);
    return {
      figures: [figure.svg, table],
      numbers: [
        ["peak", "peak of full weights", formatMB(step.peakBytes)],
        ["exposed", "exposed", formatMs(step.exposed)],
        ["end", "forward, backward and exposed", formatMs(step.end)],
      ],
    };
  }

  /** Return a menu of all values that the data has in a column. */
  const chooseFrom = (name, label, data, column) => ({name, label, first: "all",
    options: Object.fromEntries(["all", ...new Set(data.map((row) => row[column]))].map((text) => [text, text]))});

  const listPlannedControls = (runs) => [
    {name: "prediction", label: "plan", options: Object.fromEntries(Object.entries(PLANNED).map(([name, [, text]]) => [name, text]))},
    {name: "smaller", label: "the smaller run has", options: {same: "the same micro-batch and sequences",
      batch: "another micro-batch", sequence: "another sequence length", all: "all"}},
    {name: "communication", label: "communication, of a calibrated step", options: {all: "all", "0-9": "below 10 %", "10-19": "10 to 20 %", "20-": "20 % or more"}},
    {name: "nodes", label: "nodes", options: {all: "all", "1-4": "1 to 4", "5-16": "5 to 16", "17-64": "17 to 64", "65-": "more than 64"}},
    chooseFrom("model", "model", runs, 0), chooseFrom("gpu", "GPU", runs, 1),
  ];

  const MODELS = {
    buckets: {draw: drawBuckets, controls: [
      {name: "bucket", label: "size of a bucket", unit: "MiB", first: 25, values: BUCKETS_MIB},
      ...LINK_CONTROLS, ALGORITHM]},
    measured: {draw: drawMeasured, controls: [
      ...LINK_CONTROLS.map((control) => ({...control, first: {beta: 200, ranks: 16, cards: 8}[control.name] ?? control.first})), ALGORITHM]},
    planned: {draw: drawPlanned, controls: listPlannedControls},
    prefetch: {draw: drawPrefetch, controls: [
      {name: "prefetch", label: "prefetch", unit: "", first: 1, values: [0, 1, 2, 3]}, ...LINK_CONTROLS]},
  };

  /** Fill an element with sliders, numbers and figures. */
  function start(element) {
    const {draw, controls} = MODELS[element.dataset.model];
    const data = JSON.parse(element.querySelector("script")?.textContent ?? null);
    const sliders = element.appendChild(make("div", {class: "sliders"}));
    const numbers = element.appendChild(make("div", {class: "numbers", role: "status"}));
    const figures = element.appendChild(make("div", {class: "figures"}));
    const settings = addControls(sliders, element.dataset.model, controls.call ? controls(data) : controls, update);

    function update() {
      if (!figures.clientWidth) return; // the page has no layout yet
      const bytesPerS = 1.25e8 * settings.beta * settings.cards;
      const link = {latencyS: 1e-6 * settings.alpha, bytesPerS, algorithm: settings.algorithm};
      const drawn = draw({...settings, link}, figures.clientWidth, data);
      showNumbers(numbers, drawn.numbers);
      figures.replaceChildren(...drawn.figures);
    }

    element.hidden = false;
    new ResizeObserver(update).observe(sliders); // as wide as the figures; also calls update() once
  }

  document.querySelectorAll("[data-model]").forEach(start);
})();
