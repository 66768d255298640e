/* The α–β model of brigade/lab/program.py for the browser; tests/repository/test_browser.py compares their numbers. */
"use strict";

const costModel = (() => {
  const GRAD_BYTES = 400e6; // 100 million parameters in fp32
  const BACKWARD_S = 0.1;
  const UNIT_BYTES = [25e6, 100e6, 100e6, 100e6, 100e6]; // the root and four blocks of module 11
  const FORWARD_S = 0.05;
  // The actions of module 11 in forward and in backward, for each prefetch: gather, compute or reduce a unit.
  const PLANS = [
    ["g0 c0 g1 c1 g2 c2 g3 c3 g4 c4", "g4 c4 g3 r4 c3 g2 r3 c2 g1 r2 c1 r1 c0 r0"],
    ["g0 g1 c0 g2 c1 g3 c2 g4 c3 c4", "g4 g3 c4 g2 r4 c3 g1 r3 c2 r2 c1 r1 c0 r0"],
    ["g0 g1 g2 c0 g3 c1 g4 c2 c3 c4", "g4 g3 g2 c4 g1 r4 c3 r3 c2 r2 c1 r1 c0 r0"],
    ["g0 g1 g2 g3 c0 g4 c1 c2 c3 c4", "g4 g3 g2 g1 c4 r4 c3 r3 c2 r2 c1 r1 c0 r0"],
  ];

  /**
   * Return the seconds that a collective takes. A link is {latencyS, bytesPerS, algorithm}. All-reduces can use a tree,
   * in which data travels up and down; with two trees at once, as in NCCL, each rank sends the buffer twice.
   */
  function computeSeconds(link, op, nbytes, worldSize) {
    if (worldSize === 1) return 0;
    if (link.algorithm === "tree" && op === "all_reduce") {
      return 2 * Math.floor(Math.log2(worldSize)) * link.latencyS + 2 * nbytes / link.bytesPerS;
    }
    const rounds = op === "all_reduce" ? 2 : 1;
    const wireBytes = rounds * (worldSize - 1) / worldSize * nbytes;
    return rounds * (worldSize - 1) * link.latencyS + wireBytes / link.bytesPerS;
  }

  /** A rank that computes, launches and waits. The link carries one collective at a time, in launch order. */
  class Rank {
    constructor(link, worldSize) {
      Object.assign(this, {link, worldSize, now: 0, linkFree: 0, transfers: []});
    }

    compute(seconds) {
      this.now += seconds;
    }

    launch(op, nbytes) {
      const start = Math.max(this.now, this.linkFree);
      this.linkFree = start + computeSeconds(this.link, op, nbytes, this.worldSize);
      const transfer = {op, nbytes, launched: this.now, start, end: this.linkFree};
      this.transfers.push(transfer);
      return transfer;
    }

    wait(transfer) {
      this.now = Math.max(this.now, transfer.end);
    }
  }

  /** Simulate a backward pass with K equal buckets of at most `bucketBytes`, which become ready at equal intervals. */
  function simulateBuckets(link, worldSize, bucketBytes) {
    const numBuckets = Math.ceil(GRAD_BYTES / bucketBytes);
    const rank = new Rank(link, worldSize);
    for (let bucket = 0; bucket < numBuckets; bucket++) {
      rank.compute(BACKWARD_S / numBuckets);
      rank.launch("all_reduce", GRAD_BYTES / numBuckets);
    }
    rank.transfers.forEach((transfer) => rank.wait(transfer));
    return {numBuckets, backward: BACKWARD_S, transfers: rank.transfers, end: rank.now, exposed: rank.now - BACKWARD_S};
  }

  /** Simulate a forward and a backward pass of module 11. Only one reduction is in progress at a time. */
  function simulatePrefetch(link, worldSize, prefetch) {
    const total = UNIT_BYTES.reduce((sum, nbytes) => sum + nbytes);
    const rank = new Rank(link, worldSize);
    const computed = [];
    const allocations = [];
    let reduction = null;
    PLANS[prefetch].forEach((plan, isBackward) => {
      const gathers = {};
      for (const [kind, digit] of plan.split(" ")) {
        const unit = Number(digit);
        if (kind === "g") {
          gathers[unit] = rank.launch("all_gather", UNIT_BYTES[unit]);
          allocations.push({unit, start: rank.now, end: null});
        } else if (kind === "r") {
          if (reduction) rank.wait(reduction);
          reduction = rank.launch("reduce_scatter", UNIT_BYTES[unit]);
        } else {
          if (gathers[unit]) rank.wait(gathers[unit]);
          const start = rank.now;
          rank.compute(UNIT_BYTES[unit] / total * (isBackward ? 2 : 1) * FORWARD_S);
          computed.push({unit, start, end: rank.now});
          if (unit || isBackward) allocations.find((one) => one.unit === unit && one.end === null).end = rank.now;
        }
      }
    });
    rank.wait(reduction);
    const countBytes = (time) =>
      allocations.reduce((sum, one) => sum + (one.start <= time && time < one.end ? UNIT_BYTES[one.unit] : 0), 0);
    const peakBytes = Math.max(...allocations.map((one) => countBytes(one.start)));
    return {computed, transfers: rank.transfers, allocations, peakBytes, end: rank.now, exposed: rank.now - 3 * FORWARD_S};
  }

  return {PLANS, UNIT_BYTES, computeSeconds, simulateBuckets, simulatePrefetch};
})();
