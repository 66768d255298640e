/* The toys of ring.md: messages around a ring, and the queue of buckets. toys_model.js computes what they show. */
"use strict";

(() => {
  const {make, showNumbers, addControls} = widgets;
  const PLAY_MS = 700;
  const SIZES = [4, 1, 8, 1, 8, 1, 8, 1, 4, 1]; // MB of the parameters 0 to 9, in the order of registration
  const SAME_ORDER = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0];
  const OTHER_ORDER = [9, 8, 7, 4, 3, 6, 5, 2, 1, 0]; // a model with two branches, whose gradients come in the other order

  const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

  /** A ring all-reduce, or the way through a root. */
  const ring = {
    controls: [
      {name: "size", label: "N, number of ranks", values: [2, 3, 4, 5, 6, 7, 8], first: 4},
      {name: "numel", label: "elements of each tensor", values: [1, 2, 4, 8, 10, 16, 24], first: 8},
      {name: "plan", label: "algorithm", options: {ring: "a ring", root: "through rank 0"}},
      {name: "order", label: "in each step of the ring, a rank", options: {
        isend: "starts to send, receives, then waits", send: "sends, then receives",
        even: "sends first if its number is even"}},
    ],

    begin({size, plan, order}) {
      const ranks = new toysModel.Ranks(plan === "ring" ? toysModel.planRing(size, order) : toysModel.planRoot(size));
      return {ranks, steps: 0, crossing: [], isStuck: false};
    },

    isOver: (state) => state.isStuck || state.ranks.isFinished,

    step(state) {
      state.crossing = state.ranks.step();
      if (state.crossing.length) state.steps++;
      else state.isStuck = true;
    },

    describe({ranks, steps, crossing, isStuck}, {size, numel, plan}) {
      const lengths = toysModel.splitIntoChunks(numel, size);
      const elements = ranks.sent.map((messages) => messages.flat().reduce((sum, chunk) => sum + lengths[chunk], 0));
      const busiest = Math.max(...elements);
      const messages = Math.max(...ranks.sent.map((sent) => sent.length));
      const bound = 2 * (size - 1) / size * numel;
      const numbers = [["steps", "steps", String(steps)], ["messages", "messages of the busiest rank", String(messages)],
        ["elements", "elements that it sent", String(busiest)],
        ["bound", plan === "ring" ? "2(N − 1)/N · S" : "(N − 1) · S", String(Number((plan === "ring" ? bound : (size - 1) * numel).toFixed(2)))]];
      let text = crossing.map(({from, to, chunks, adds}) => `Rank ${from} → rank ${to}: `
        + `${chunks.length > 1 || size === 1 ? "the whole tensor" : `chunk ${chunks[0]}`}, ${adds ? "added" : "copied"}.`).join(" ");
      if (!steps) text = "Each rank has its own values in every chunk. Press “Step”.";
      if (ranks.isFinished) text = `Every rank has the sum of all ${size} tensors.`;
      if (isStuck) {
        const waits = ranks.plans.map((_, rank) => `rank ${rank} in ${ranks.call(rank).op} with rank ${ranks.call(rank).peer}`);
        text = `Deadlock. All wait for each other: ${waits.join(", ")}. A send ends only when its receiver has called recv.`;
      }
      return {numbers, text};
    },

    draw({ranks, crossing, isStuck}, {size, numel}, width) {
      const height = Math.max(Math.min(width, 460), 60 * size); // on a phone, eight ranks need more height than width
      const svg = make("svg:svg", {width, height, role: "img", "aria-label": `The chunks of ${size} ranks on a circle`});
      const boxWidth = Math.min(128, width / 3.4);
      const cell = boxWidth / size;
      const place = (rank) => {
        const angle = 2 * Math.PI * rank / size - Math.PI / 2;
        return [width / 2 + (Math.min(width, 620) / 2 - boxWidth / 2 - 4) * Math.cos(angle), height / 2 + 4 + (height / 2 - 40) * Math.sin(angle)];
      };
      const arrow = (from, to, label, isWaiting) => {
        const [[x0, y0], [x1, y1]] = [place(from), place(to)];
        const length = Math.hypot(x1 - x0, y1 - y0);
        const [ux, uy] = [(x1 - x0) / length, (y1 - y0) / length];
        // The line begins and ends at the boxes' borders.
        const gap = Math.min((boxWidth / 2 + 6) / Math.max(Math.abs(ux), 1e-6), 30 / Math.max(Math.abs(uy), 1e-6), length / 2.6);
        const [ax, ay, bx, by] = [x0 + gap * ux, y0 + gap * uy, x1 - gap * ux, y1 - gap * uy];
        svg.append(make("svg:path", {class: isWaiting ? "waits" : "message", d: `M${ax} ${ay}L${bx} ${by}`}));
        svg.append(make("svg:path", {class: isWaiting ? "waits tip" : "message tip",
          d: `M${bx} ${by}L${bx - 9 * ux + 5 * uy} ${by - 9 * uy - 5 * ux}L${bx - 9 * ux - 5 * uy} ${by - 9 * uy + 5 * ux}Z`}));
        const away = 12 + 3 * label.length * Math.abs(uy); // so that a word does not touch its arrow
        const [mx, my] = [(ax + bx) / 2 - away * uy, (ay + by) / 2 + away * ux + 4];
        svg.append(make("svg:text", {x: mx, y: my, "text-anchor": "middle"}, label));
      };
      const lengths = toysModel.splitIntoChunks(numel, size);
      ranks.cells.forEach((chunks, rank) => {
        const [x, y] = place(rank);
        const left = x - boxWidth / 2;
        svg.append(make("svg:text", {x, y: y - 16, "text-anchor": "middle", class: "name"}, `rank ${rank}`));
        chunks.forEach((values, chunk) => {
          const arrived = crossing.some((message) => message.to === rank && message.chunks.includes(chunk));
          const level = values.size === size ? "complete" : values.size > 1 ? "partial" : "own";
          svg.append(make("svg:rect", {x: left + chunk * cell, y: y - 10, width: cell, height: 24, class: `cell ${level}${arrived ? " arrived" : ""}`}));
          const label = make("svg:text", {x: left + (chunk + 0.5) * cell, y: y + 6, "text-anchor": "middle", class: level}, String(values.size));
          label.append(make("svg:title", {}, `chunk ${chunk}, ${count(lengths[chunk], "element")}: the values of ${count(values.size, "rank")}`));
          svg.append(label);
        });
      });
      for (const {from, to, chunks} of crossing) arrow(from, to, chunks.length > 1 ? "all" : String(chunks[0]), false);
      if (isStuck) ranks.plans.forEach((_, rank) => arrow(rank, ranks.call(rank).peer, ranks.call(rank).op, true));
      return svg;
    },
  };

  /** Two ranks that launch buckets during backward. */
  const buckets = {
    controls: [
      {name: "cap", label: "cap of a bucket in MB", values: [1, 5, 9, 14, 18, 40], first: 9},
      {name: "orders", label: "on rank 1, gradients are ready", options: {same: "in the same order", other: "in another order"}},
      {name: "unused", label: "parameter 5 of rank 1", options: {no: "has a gradient", yes: "is not used in this step"}},
      {name: "rule", label: "a bucket is launched", options: {ordered: "when it and all before it are complete", eager: "as soon as it is complete"}},
    ],

    begin({cap, orders, unused, rule}) {
      const plan = toysModel.planBuckets(SIZES, cap);
      const second = (orders === "same" ? SAME_ORDER : OTHER_ORDER).filter((index) => unused === "no" || index !== 5);
      const readyOrders = [SAME_ORDER, second];
      const launches = readyOrders.map((order) => toysModel.launchBuckets(plan, order, rule === "ordered"));
      return {plan, readyOrders, launches, steps: 0};
    },

    isOver: (state) => state.steps > SIZES.length,
    step: (state) => state.steps++,

    /** Return which buckets each rank has launched so far. After backward, the finish launches the others. */
    list(state) {
      return state.launches.map((launches) => launches.slice(0, this.isOver(state) ? launches.length : Math.min(state.steps, launches.length - 1)).flat());
    },

    describe(state) {
      const launched = this.list(state);
      const numCalls = Math.min(...launched.map((list) => list.length));
      const wrong = launched[0].slice(0, numCalls).findIndex((bucket, call) => bucket !== launched[1][call]);
      let text = state.steps ? `After ${count(Math.min(state.steps, SIZES.length), "gradient")}${this.isOver(state) ? " and the finish" : ""}, `
        + `rank 0 has launched ${launched[0].join(", ") || "nothing"}; rank 1 ${launched[1].join(", ") || "nothing"}.` : "Backward begins. Press “Step”.";
      if (wrong >= 0) text += ` Launch ${wrong + 1} is bucket ${launched[0][wrong]} on rank 0 and bucket ${launched[1][wrong]} on rank 1: `
        + "gradients of different parameters are added, or the ranks hang.";
      else if (this.isOver(state)) text += " Both ranks have launched the same buckets in the same order.";
      return {text, numbers: [["buckets", "buckets", String(state.plan.length)],
        ["overlapped", "launched during backward so far",
          state.launches.map((launches) => launches.slice(0, -1).slice(0, state.steps).flat().length).join(" and ")]]};
    },

    draw(state, settings, width) {
      const rowHeight = 112;
      const svg = make("svg:svg", {width, height: 2 * rowHeight, role: "img", "aria-label": "The buckets of two ranks"});
      const total = SIZES.reduce((sum, size) => sum + size);
      const scale = (width - 4 - 6 * (state.plan.length - 1)) / total;
      const launched = this.list(state);
      state.readyOrders.forEach((order, rank) => {
        const top = rank * rowHeight + 20;
        const ready = order.slice(0, state.steps);
        svg.append(make("svg:text", {x: 2, y: top - 6, class: "name"}, `rank ${rank}`));
        let x = 2;
        state.plan.forEach((bucket, number) => {
          const start = x;
          for (const index of bucket) {
            const isNew = ready.at(-1) === index && state.steps <= order.length;
            const level = ready.includes(index) ? "complete" : order.includes(index) ? "own" : "unused";
            svg.append(make("svg:rect", {x, y: top, width: SIZES[index] * scale, height: 28, class: `cell ${level}${isNew ? " arrived" : ""}`}));
            if (SIZES[index] * scale > 7) svg.append(make("svg:text", {x: x + SIZES[index] * scale / 2, y: top + 18, "text-anchor": "middle", class: level}, String(index)));
            x += SIZES[index] * scale;
          }
          const place = launched[rank].indexOf(number);
          svg.append(make("svg:path", {class: place < 0 ? "bracket" : "bracket launched", d: `M${start + 1} ${top + 34}V${top + 39}H${x - 1}V${top + 34}`}));
          svg.append(make("svg:text", {x: (start + x) / 2, y: top + 54, "text-anchor": "middle"}, String(number)));
          if (place >= 0) {
            const isWrong = place < launched[1 - rank].length && launched[1 - rank][place] !== number;
            svg.append(make("svg:text", {x: (start + x) / 2, y: top + 72, "text-anchor": "middle", class: isWrong ? "wrong" : "right"}, `#${place + 1}`));
          }
          x += 6;
        });
      });
      return svg;
    },
  };

  /** Fill an element with controls, numbers and a figure. */
  function start(element) {
    const toy = {ring, buckets}[element.dataset.toy];
    const controls = element.appendChild(make("div", {class: "sliders"}));
    const buttons = element.appendChild(make("div", {class: "buttons"}));
    const status = make("p", {role: "status"});
    const numbers = element.appendChild(make("div", {class: "numbers"}));
    const figures = element.appendChild(make("div", {class: "figures"}));
    element.append(status);
    let state = null;
    let timer = null;

    function show() {
      const {text, numbers: pairs} = toy.describe(state, settings);
      status.textContent = text;
      showNumbers(numbers, pairs);
      if (figures.clientWidth) figures.replaceChildren(toy.draw(state, settings, figures.clientWidth));
      // The attribute "disabled" would take the focus from a button.
      for (const button of [step, play]) button.setAttribute("aria-disabled", toy.isOver(state));
    }

    function pause() {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
    }

    function advance() {
      if (toy.isOver(state)) return;
      toy.step(state);
      if (toy.isOver(state)) pause();
      show();
    }

    function reset() {
      pause();
      state = toy.begin(settings);
      show();
    }

    const addButton = (text, action) => {
      const button = buttons.appendChild(make("button", {type: "button"}, text));
      button.addEventListener("click", action);
      return button;
    };
    const step = addButton("Step", advance);
    const play = addButton("Play", () => {
      if (timer) return pause();
      if (toy.isOver(state)) return;
      timer = setInterval(advance, PLAY_MS);
      play.textContent = "Pause";
    });
    addButton("Start again", reset);

    const settings = addControls(controls, {ring: "ring", buckets: "launches"}[element.dataset.toy], toy.controls, reset);
    element.hidden = false;
    reset();
    new ResizeObserver(show).observe(figures);
  }

  document.querySelectorAll("[data-toy]").forEach(start);
})();
