/* `replay` of tools/live_timelines.py for the browser; tests/repository/test_browser.py compares their numbers. */
"use strict";

const timelineModel = (() => {
  /** Return a recorded step on a link that is `speed` times as fast as when it was recorded. Times are in µs. */
  function replay(run, speed) {
    const now = [...run.starts];
    const next = now.map(() => 0);
    const [phases, waits, launched] = [0, 1, 2].map(() => now.map(() => []));
    const transfers = [];

    function startTransfers() {
      while (launched.every((times) => times.length > transfers.length)) {
        const [, , lag, took] = run.collectives[transfers.length];
        const ready = Math.max(...launched.map((times) => times[transfers.length]), transfers.at(-1)?.[1] ?? 0);
        transfers.push([ready + lag, ready + lag + took / speed]);
      }
    }

    /** Let a rank take its next action. Return false if it has none, or must wait for another rank's launch. */
    function advance(actions, rank) {
      if (next[rank] === actions.length) return false;
      const [computed, kind, number, more] = actions[next[rank]];
      if (kind === "wait" && number >= transfers.length) return false;
      now[rank] += computed;
      next[rank]++;
      if (kind === "phase") phases[rank].push(now[rank]);
      else if (kind === "launch") {
        launched[rank].push(now[rank]);
        startTransfers();
      } else {
        const start = now[rank];
        now[rank] = Math.max(start, transfers[number][1]) + more;
        waits[rank].push([start, now[rank], number]);
      }
      return true;
    }

    while (run.ranks.map(advance).some(Boolean));
    const exposed = phases.map((ends, rank) => waits[rank].reduce(
      (sum, [start, end]) => sum + (start < ends[1] || start >= ends[2] ? end - start : 0), ends[2] - ends[1]));
    return {phases, waits, launched, transfers, exposed, end: Math.max(...now)};
  }

  return {replay};
})();
