// The timelines of several ranks beneath one another: one time axis, one scale, the same colours as elsewhere.

/* global uPlot */

const RANK_HEIGHT = 130;
const RANK_AXIS = 34;

/** One rank: its bytes by category, stacked, and the reserved line. */
class RankChart {
  constructor(host, rank, view, most, isLast) {
    this.host = host;
    this.rank = rank;
    this.view = view;
    this.most = most;
    this.height = RANK_HEIGHT + (isLast ? RANK_AXIS : 0);
    const stepped = uPlot.paths.stepped({ align: 1 });
    const plain = { width: 0, points: { show: false }, paths: stepped };
    this.chart = new uPlot(
      {
        width: view.fit(host.clientWidth),
        height: this.height,
        padding: [8, PLOT_RIGHT, isLast ? 0 : 6, 0],
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, points: { show: false }, y: false, sync: { key: "ranks" } },
        select: { show: false },
        scales: { x: { time: false, range: () => [view.low, view.high] }, y: { range: () => [0, most * 1.05] } },
        axes: [this.timeAxis(isLast), byteAxis(4)],
        series: [
          {},
          ...rank.stacking.map((kind) => ({ ...plain, label: CATEGORIES[kind], fill: PALETTE[kind] })),
          { ...plain, label: "reserved", stroke: () => token("--reserved"), width: 1.5 },
        ],
        hooks: { draw: [(chart) => this.markPeak(chart)] },
      },
      this.data(),
      host,
    );
    navigate(host, view, {
      click: () => {},
      hover: (x, y, event) => this.hover(x, event),
      leave: () => tooltip.hide(),
    });
  }

  timeAxis(shown) {
    return {
      show: shown,
      stroke: () => token("--text-quiet"),
      grid: { show: false },
      ticks: { stroke: () => token("--line") },
      size: RANK_AXIS,
      font: "12px system-ui, sans-serif",
      values: (chart, values) => values.map((value) => duration(value)),
    };
  }

  /** The whole stack first: each next series is painted over it. */
  data() {
    const { time, held, reserved, stacking } = this.rank;
    const sums = stacking.map((_, first) =>
      Array.from(time, (_, i) => stacking.slice(first).reduce((sum, kind) => sum + held.get(kind)[i], 0)),
    );
    return [Array.from(time), ...sums, Array.from(reserved)];
  }

  update() {
    this.chart.setSize({ width: this.view.fit(this.host.clientWidth), height: this.height });
    this.chart.setScale("x", { min: this.view.low, max: this.view.high });
  }

  markPeak(chart) {
    const at = this.rank.facts.peak_us;
    if (at < this.view.low || at > this.view.high) return;
    const scale = window.devicePixelRatio || 1;
    const row = this.rank.rowOf(at);
    const context = chart.ctx;
    context.save();
    context.fillStyle = token("--text");
    context.strokeStyle = token("--surface");
    context.lineWidth = 2 * scale;
    context.beginPath();
    context.arc(chart.valToPos(at, "x", true), chart.valToPos(this.rank.allocated(row), "y", true), 4 * scale, 0, 7);
    context.stroke();
    context.fill();
    context.restore();
  }

  hover(x, event) {
    if (x < 0 || x > this.view.width) return tooltip.hide();
    const row = this.rank.rowOf(this.view.low + (x / this.view.width) * (this.view.high - this.view.low));
    return tooltip.show(this.rank.describe(row), event.clientX, event.clientY);
  }
}

/** The figures of one rank. */
class RankFigures {
  constructor(data, number) {
    this.facts = data.facts.ranks[number];
    this.time = data.columns[`time_${number}`];
    this.reserved = data.columns[`reserved_${number}`];
    this.held = new Map(this.facts.kinds.map((kind) => [kind, data.columns[`held_${number}_${kind}`]]));
    this.stacking = [...STACKING].reverse().filter((kind) => this.held.has(kind));
  }

  /** The last of the known moments up to a time; -1 before the first. */
  rowOf(time) {
    return lastAtMost(this.time, time);
  }

  allocated(row) {
    return row < 0 ? 0 : this.facts.kinds.reduce((sum, kind) => sum + this.held.get(kind)[row], 0);
  }

  describe(row) {
    const list = h("dl", { className: "tip-facts" });
    for (const kind of this.stacking) {
      const amount = row < 0 ? 0 : this.held.get(kind)[row];
      if (amount > 0) list.append(h("dt", {}, swatch(PALETTE[kind]), CATEGORIES[kind]), h("dd", {}, bytes(amount)));
    }
    list.append(h("dt", {}, "allocated"), h("dd", {}, bytes(this.allocated(row))));
    list.append(h("dt", {}, "reserved"), h("dd", {}, bytes(row < 0 ? 0 : this.reserved[row])));
    const when = row < 0 ? "before its first event" : duration(this.time[row]);
    return [h("p", { className: "tip-title" }, `${this.facts.name} · ${when}`), list];
  }
}

class RanksOverTime {
  constructor(data) {
    const ranks = data.facts.ranks.map((_, number) => new RankFigures(data, number));
    const end = Math.max(1, ...ranks.map((rank) => rank.time[rank.time.length - 1] ?? 0));
    let most = 1;
    for (const rank of ranks) for (const amount of rank.reserved) if (amount > most) most = amount;
    // Microseconds stand where pages of one run have events.
    this.view = new View({ facts: { row: -1 }, rows: end });
    this.charts = ranks.map(
      (rank, number) => new RankChart($(`rank-chart-${number}`), rank, this.view, most, number === ranks.length - 1),
    );
    this.view.onChange(eachFrame(() => this.redraw()));
    const kinds = [...STACKING].reverse().filter((kind) => ranks.some((rank) => rank.held.has(kind)));
    const line = h("span", { className: "swatch line", "aria-hidden": "true" });
    $("ranks-legend").replaceChildren(
      ...kinds.map((kind) => h("li", {}, swatch(PALETTE[kind]), CATEGORIES[kind])),
      h("li", {}, line, "reserved"),
    );
  }

  redraw() {
    this.charts.forEach((chart) => chart.update());
  }
}
