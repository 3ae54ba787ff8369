// The stacked timeline: bytes by category, the reserved line, the card's limit, phases and marks.

/* global uPlot */

class TimelineChart {
  constructor(host, model, view) {
    this.host = host;
    this.model = model;
    this.view = view;
    this.showLimit = this.limitIsNear;
    this.hoverRow = null;
    this.build();
    view.onChange(eachFrame(() => this.update()));
    view.onMoment(eachFrame(() => this.chart.redraw(false)));
  }

  /** Bytes of the card that torch can use, 0 where the card is not known. */
  get limit() {
    return Math.max(0, this.model.facts.total - this.model.facts.context);
  }

  get limitIsNear() {
    return this.limit > 0 && this.limit < 3 * Math.max(1, this.mostReserved);
  }

  get mostReserved() {
    let most = this.model.reservedBefore;
    for (const amount of this.model.reserved) if (amount > most) most = amount;
    return most;
  }

  build() {
    const { kinds } = this.model;
    const order = [...kinds.stacking].reverse(); // the whole stack first, each next one painted over it
    const stepped = uPlot.paths.stepped({ align: 1 });
    const series = order.map((kind) => ({
      label: kinds.names[kind],
      fill: kinds.colours[kind],
      width: 0,
      points: { show: false },
      paths: stepped,
    }));
    this.chart = new uPlot(
      {
        width: this.view.fit(this.host.clientWidth),
        height: 320,
        padding: [26, PLOT_RIGHT, 0, 0],
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
        select: { show: false },
        scales: { x: { time: false, range: () => [this.view.low, this.view.high] }, y: { range: () => this.range() } },
        axes: [this.xAxis(), byteAxis(6)],
        series: [
          {},
          ...series,
          { label: "reserved", stroke: () => token("--reserved"), width: 2, points: { show: false }, paths: stepped },
        ],
        hooks: { draw: [(chart) => this.decorate(chart)] },
      },
      this.data(),
      this.host,
    );
    navigate(this.host, this.view, {
      click: (x) => this.view.setMoment(Math.floor(this.view.row(x))),
      hover: (x, y, event) => this.hover(x, event),
      leave: () => tooltip.hide(),
    });
  }

  xAxis() {
    return {
      stroke: () => token("--text-quiet"),
      grid: { show: false },
      ticks: { stroke: () => token("--line") },
      size: 34,
      font: "12px system-ui, sans-serif",
      values: (chart, values) =>
        values.map((value) => (this.view.byTime ? duration(value) : Number.isInteger(value) ? integer(value) : "")),
    };
  }

  data() {
    this.view.fit(this.host.clientWidth);
    const sample = this.model.sample(this.view, this.view.width);
    this.sample = sample;
    const x = sample.starts.map((row) => this.view.value(row));
    const stacked = [];
    const sum = new Float64Array(sample.rows.length);
    for (const kind of this.model.kinds.stacking) {
      const amounts = sample.categories[kind];
      const shown = !this.view.hidden.has(kind);
      for (let i = 0; shown && i < sum.length; i++) sum[i] += amounts[i];
      stacked.push(Array.from(sum));
    }
    const reserved = this.view.hidden.has(RESERVED) ? sample.reserved.map(() => null) : sample.reserved.slice();
    const columns = [...stacked.reverse(), reserved];
    if (x.length) {
      x.push(this.view.value(sample.end));
      columns.forEach((column) => column.push(column[column.length - 1]));
    }
    return [x, ...columns];
  }

  range() {
    const { hidden } = this.view;
    let most = 1;
    if (!hidden.has(RESERVED)) for (const amount of this.sample.reserved) if (amount > most) most = amount;
    const shown = this.sample.categories.filter((_, kind) => !hidden.has(kind));
    this.sample.rows.forEach((_, i) => {
      let sum = 0;
      for (const amounts of shown) sum += amounts[i];
      if (sum > most) most = sum;
    });
    if (this.showLimit && this.limit) most = Math.max(most, this.limit);
    return [0, most * 1.05];
  }

  update() {
    this.chart.setSize({ width: this.view.fit(this.host.clientWidth), height: 320 });
    this.chart.setData(this.data());
  }

  /** Say what a point of the picture stands for. */
  note() {
    if (!this.sample) return;
    const { most } = this.sample;
    const rows = Math.round(this.view.highRow - this.view.lowRow);
    let text =
      most > 1
        ? `${integer(rows)} events; each pixel shows the fullest moment of up to ${integer(most)} events. Zoom in for each.`
        : `${integer(rows)} events, each drawn by itself.`;
    if (!this.model.exact) {
      text += ` Counted at ${integer(this.model.points.rows.length)} moments, the fullest of each stretch.`;
    }
    if (this.labels?.missing) text += ` ${integer(this.labels.missing)} names of marks find no room: zoom in.`;
    const hidden = hiddenWords(this.model, this.view);
    if (hidden) text += ` ${hidden[0].toUpperCase()}${hidden.slice(1)}.`;
    if (this.model.kinds.of) text += " The recording names no categories, so blocks are grouped by their sizes.";
    $("timeline-note").textContent = text;
  }

  hover(x, event) {
    const row = Math.max(-1, Math.min(this.model.rows - 1, Math.floor(this.view.row(x))));
    if (x < 0 || x > this.view.width) return tooltip.hide();
    return tooltip.show(this.describe(row), event.clientX, event.clientY);
  }

  describe(row) {
    const amounts = this.model.categoriesAt(row);
    const list = h("dl", { className: "tip-facts" });
    const { kinds } = this.model;
    for (const kind of [...kinds.stacking].reverse()) {
      if (amounts[kind] > 0) {
        list.append(h("dt", {}, swatch(kinds.colours[kind]), kinds.names[kind]), h("dd", {}, bytes(amounts[kind])));
      }
    }
    list.append(h("dt", {}, "allocated"), h("dd", {}, bytes(this.model.allocatedAt(row))));
    list.append(h("dt", {}, "reserved"), h("dd", {}, bytes(this.model.reservedAt(row))));
    return [h("p", { className: "tip-title" }, momentName(this.model, row)), list];
  }

  decorate(chart) {
    const scale = window.devicePixelRatio || 1;
    const context = chart.ctx;
    const { left, top, width, height } = chart.bbox;
    const at = (row) => left + this.view.x(row) * scale;
    context.save();
    context.font = `${11 * scale}px system-ui, sans-serif`;
    drawPhases(context, this.model.shared, this.view, { left, top: top - 22 * scale, width, height: 16 * scale, scale });
    context.beginPath();
    context.rect(left, top - 4 * scale, width, height + 4 * scale);
    context.clip();
    this.labels = new Labels({ left, top: top - 4 * scale, width, height: height + 4 * scale }, scale);
    this.wanted = []; // words come last, so that no line runs through them
    if (this.showLimit && this.limit) this.drawLimit(context, chart, scale);
    this.model.columns.oom_row.forEach((row, i) => {
      const asked = `out of memory: asked for ${bytes(this.model.columns.oom_size[i])}`;
      this.vertical(context, at(row), chart, token("--bad"), [], asked);
    });
    this.drawPeak(context, chart, at, scale);
    this.model.shared.mark_row.forEach((row, i) =>
      this.vertical(context, at(row), chart, token("--mark"), [2, 3], this.model.shared.facts.marks[i]),
    );
    this.vertical(context, at(this.view.moment + 0.5), chart, token("--moment"), [6, 3], "");
    for (const { text, colour, places } of this.wanted) this.labels.put(context, text, colour, places);
    context.restore();
    this.note();
  }

  drawLimit(context, chart, scale) {
    const y = chart.valToPos(this.limit, "y", true);
    const { left, width } = chart.bbox;
    context.strokeStyle = token("--bad");
    context.lineWidth = 1.5 * scale;
    context.setLineDash([8 * scale, 4 * scale]);
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(left + width, y);
    context.stroke();
    context.setLineDash([]);
    const [above, below] = [y - 3 * scale, y + (LABEL_LINE + 3) * scale];
    const [start, end] = [left + 4 * scale, left + width - 4 * scale];
    const places = [
      { x: start, y: above, align: "left" }, { x: end, y: above, align: "right" },
      { x: start, y: below, align: "left" }, { x: end, y: below, align: "right" },
    ];
    this.wanted.push({ text: `the card less its context: ${bytes(this.limit)}`, colour: token("--bad"), places });
  }

  drawPeak(context, chart, at, scale) {
    if ([...this.view.hidden].some((kind) => kind !== RESERVED)) return; // the stack no longer reaches it
    if (this.peak === undefined) this.peak = this.model.peakRow;
    const { left, width } = chart.bbox;
    const x = at(Math.max(0, this.peak) + 0.5);
    const y = chart.valToPos(this.model.allocatedAt(this.peak), "y", true);
    if (x < left || x > left + width) return;
    context.fillStyle = token("--text");
    context.strokeStyle = token("--surface");
    context.lineWidth = 3 * scale;
    context.beginPath();
    context.arc(x, y, 4 * scale, 0, 7);
    context.stroke();
    context.fill();
    this.labels.keep(x - 5 * scale, y - 5 * scale, 10 * scale, 10 * scale);
    const line = y + (LABEL_LINE + 2) * scale; // below the dot: above it the reserved line is close
    const sides = [{ x: x + 8 * scale, y: line, align: "left" }, { x: x - 8 * scale, y: line, align: "right" }];
    const places = x > left + width * 0.75 ? sides.reverse() : sides;
    this.wanted.push({ text: `peak ${bytes(this.model.allocatedAt(this.peak))}`, colour: token("--text"), places });
  }

  vertical(context, x, chart, colour, dash, text) {
    const scale = window.devicePixelRatio || 1;
    const { left, top, width, height } = chart.bbox;
    if (x < left || x > left + width) return;
    context.strokeStyle = colour;
    context.lineWidth = 1.5 * scale;
    context.setLineDash(dash.map((part) => part * scale));
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, top + height);
    context.stroke();
    context.setLineDash([]);
    if (!text) return;
    const y = top + height - 4 * scale;
    const sides = [{ x: x + 4 * scale, y, align: "left" }, { x: x - 4 * scale, y, align: "right" }];
    this.wanted.push({ text, colour, places: x > left + width * 0.7 ? sides.reverse() : sides });
  }
}

/** A moment in words: its event, its time and its phase. */
function momentName(model, row) {
  if (row < 0) return document.body.classList.contains("of-dump") ? "the time of the dump" : "before the first event";
  const parts = [`event ${integer(row)} of ${integer(model.rows)}`];
  if (model.shared.hasTimes) {
    parts.push(`${model.shared.timesAreExact ? "" : "about "}${duration(model.shared.timeOf(row))}`);
  }
  const phase = model.shared.phaseAt(row);
  if (phase) parts.push(phase);
  return parts.join(" · ");
}

/** The phases as a band; where they are too narrow for their names, iterations; else nothing. */
function drawPhases(context, shared, view, box) {
  const first = Math.max(0, lastAtMost(shared.phase_row, view.lowRow));
  const last = lastAtMost(shared.phase_row, view.highRow);
  const visits = [];
  for (let i = first; i <= last; i++) {
    const end = i + 1 < shared.phase_row.length ? shared.phase_row[i + 1] : shared.rows;
    const name = shared.phase[i] > 0 ? shared.facts.phases[shared.phase[i] - 1] : "";
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : name;
    visits.push({ name, group, start: shared.phase_row[i], end });
  }
  const pixels = view.width / Math.max(1, visits.filter((visit) => visit.name).length);
  const shown = pixels >= 34 ? visits : grouped(visits);
  context.textAlign = "left";
  shown.forEach((visit, i) => {
    if (!visit.name) return;
    const x0 = Math.max(0, view.x(visit.start)) * box.scale + box.left;
    const x1 = Math.min(view.width, view.x(visit.end)) * box.scale + box.left;
    if (x1 - x0 < 2 * box.scale) return;
    context.fillStyle = token(i % 2 ? "--phase-odd" : "--phase-even");
    context.fillRect(x0, box.top, x1 - x0 - box.scale, box.height);
    const text = fitting(context, visit.name, x1 - x0 - 8 * box.scale);
    context.fillStyle = token("--text");
    if (text) context.fillText(text, x0 + 4 * box.scale, box.top + box.height - 4 * box.scale);
  });
}

function grouped(visits) {
  const found = [];
  for (const visit of visits) {
    const last = found[found.length - 1];
    if (last && last.name === visit.group) last.end = visit.end;
    else found.push({ name: visit.group, start: visit.start, end: visit.end });
  }
  return found;
}

/** The text if it fits, its end if that does ("step 3/forward" as "forward"), else nothing. */
function fitting(context, text, width) {
  const forms = [text, text.slice(text.lastIndexOf("/") + 1), text.replace(/^.*?(\d+)$/, "$1")];
  return forms.find((form) => form && context.measureText(form).width <= width) ?? "";
}
