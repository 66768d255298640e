/* Messages between ranks and the queue of buckets, for toys.js. tests/repository/test_browser.py compares them with solutions. */
"use strict";

const toysModel = (() => {
  const modulo = (number, size) => ((number % size) + size) % size;

  /** Return the elements of each chunk. The first chunks may have one element more. */
  const splitIntoChunks = (numel, size) =>
    Array.from({length: size}, (_, chunk) => Math.floor(numel / size) + (chunk < numel % size ? 1 : 0));

  /** Return one call per element: {op, peer, chunks, adds}. `order` says how a rank sends and receives at once. */
  function writeExchange(rank, to, from, sent, received, adds, order) {
    const receive = {op: "recv", peer: from, chunks: received, adds};
    if (order === "isend") return [{op: "isend", peer: to, chunks: sent}, receive, {op: "wait", peer: to}];
    const send = {op: "send", peer: to, chunks: sent};
    return order === "even" && rank % 2 ? [receive, send] : [send, receive];
  }

  /** Return the calls of each rank in a ring all-reduce. */
  function planRing(size, order) {
    return Array.from({length: size}, (_, rank) => {
      const calls = [];
      for (let lap = 0; lap < 2; lap++) {
        for (let step = 0; step < size - 1; step++) {
          const first = modulo(rank - step - 1 + lap, size); // in the first lap, a chunk ends where it belongs
          const next = modulo(first - 1, size);
          const [to, from] = [modulo(rank + 1, size), modulo(rank - 1, size)];
          calls.push(...writeExchange(rank, to, from, [first], [next], lap === 0, order));
        }
      }
      return calls;
    });
  }

  /** Return the calls of each rank if rank 0 collects all tensors and sends the sum back. */
  function planRoot(size) {
    const chunks = Array.from({length: size}, (_, chunk) => chunk);
    const peers = chunks.slice(1);
    const root = [...peers.map((peer) => ({op: "recv", peer, chunks, adds: true})),
      ...peers.map((peer) => ({op: "send", peer, chunks}))];
    return [root, ...peers.map(() => [{op: "send", peer: 0, chunks}, {op: "recv", peer: 0, chunks, adds: false}])];
  }

  /** Ranks that make their calls one after the other. A message crosses as soon as both sides have made their call. */
  class Ranks {
    constructor(plans) {
      this.plans = plans;
      this.next = plans.map(() => 0);
      this.posted = []; // isends whose message has not crossed: {from, peer, chunks}
      this.cells = plans.map((_, rank) => plans.map(() => new Set([rank]))); // whose values each chunk contains
      this.sent = plans.map(() => []); // the chunks of each message
      this.post();
    }

    call(rank) {
      return this.plans[rank][this.next[rank]];
    }

    get isFinished() {
      return this.plans.every((_, rank) => !this.call(rank));
    }

    /** Make all calls that do not wait: isend, and wait after its message has crossed. */
    post() {
      this.plans.forEach((_, rank) => {
        for (let call = this.call(rank); call; call = this.call(rank)) {
          if (call.op === "isend") this.posted.push({from: rank, peer: call.peer, chunks: call.chunks});
          else if (call.op !== "wait" || this.posted.some((message) => message.from === rank)) return;
          this.next[rank]++;
        }
      });
    }

    /** Let every message cross whose sender and receiver are ready. Return these messages; none means a deadlock. */
    step() {
      const crossing = [];
      this.plans.forEach((_, rank) => {
        const call = this.call(rank);
        if (call?.op !== "recv") return;
        const index = this.posted.findIndex(({from, peer}) => from === call.peer && peer === rank);
        const peers = this.call(call.peer);
        const waits = peers?.op === "send" && peers.peer === rank;
        if (index < 0 && !waits) return;
        const {chunks} = waits ? peers : this.posted[index];
        const values = chunks.map((chunk) => new Set(this.cells[call.peer][chunk]));
        crossing.push({from: call.peer, to: rank, chunks, values, adds: call.adds, waits});
      });
      for (const {from, to, chunks, values, adds, waits} of crossing) {
        chunks.forEach((chunk, index) => {
          this.cells[to][chunk] = adds ? new Set([...this.cells[to][chunk], ...values[index]]) : values[index];
        });
        this.sent[from].push(chunks);
        this.next[to]++;
        if (waits) this.next[from]++;
        else this.posted.splice(this.posted.findIndex((message) => message.from === from && message.peer === to), 1);
      }
      this.post();
      return crossing;
    }
  }

  /** Return the buckets of module 4, as lists of indices. A bucket closes before a parameter that would exceed the cap. */
  function planBuckets(sizes, cap) {
    const buckets = [];
    let total = Infinity;
    for (let index = sizes.length - 1; index >= 0; index--) {
      if (total + sizes[index] > cap) {
        buckets.push([]);
        total = 0;
      }
      buckets.at(-1).push(index);
      total += sizes[index];
    }
    return buckets;
  }

  /** Return the buckets that a rank launches after each gradient, and last those that its finish launches. */
  function launchBuckets(buckets, readyOrder, inOrder) {
    const pending = buckets.map((bucket) => bucket.length);
    const launched = [];
    const launches = readyOrder.map((index) => {
      const ready = buckets.findIndex((bucket) => bucket.includes(index));
      pending[ready]--;
      const now = [];
      const isComplete = (bucket) => bucket < buckets.length && pending[bucket] === 0;
      if (inOrder) while (isComplete(launched.length)) launched.push(now[now.push(launched.length) - 1]);
      else if (isComplete(ready)) launched.push(now[now.push(ready) - 1]);
      return now;
    });
    return [...launches, buckets.map((_, bucket) => bucket).filter((bucket) => !launched.includes(bucket))];
  }

  return {splitIntoChunks, planRing, planRoot, Ranks, planBuckets, launchBuckets};
})();
