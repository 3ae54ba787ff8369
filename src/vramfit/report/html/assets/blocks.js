// Every allocation as a rectangle: where it lies over time, and how the sizes stack up over time.

/** Address-time: a block is a rectangle from its birth to its end, at its address. */
class AddressChart {
  constructor(host, model, view, choose) {
    this.model = model;
    this.view = view;
    this.plot = new Plot(host, view, 360);
    this.vertical = new Vertical(() => model.arenaTotal || 1, eachFrame(() => this.draw()));
    this.plot.drawChosen = (context) => this.drawChosen(context);
    view.onChange(eachFrame(() => this.draw()));
    view.onMoment(eachFrame(() => this.plot.drawOver()));
    navigate(host, view, {
      vertical: verticalControl(this.plot, this.vertical),
      hover: (x, y, event) => this.hover(x, y, event),
      leave: () => tooltip.hide(),
      click: (x, y) => choose(this.plot.ownerAt(x, y), Math.floor(view.row(x))),
    });
    this.draw();
  }

  draw() {
    const { model, plot } = this;
    plot.range = this.vertical.now;
    plot.begin();
    this.merged = 0;
    this.spanWord = pixel(token("--cached"));
    for (let i = 0; i < model.spanStart.length; i++) this.drawSpan(i);
    let shown = 0;
    for (let i = 0; i < model.length; i++) shown += this.drawBlock(i);
    plot.end();
    this.note(shown);
  }

  /** Edges in pixels of the raster, or nothing where the rectangle lies outside. */
  box(born, freed, start, size) {
    const { plot, view } = this;
    const [low, high] = plot.range;
    if (start >= high || start + size <= low) return null;
    const scaleX = plot.scale;
    const x0 = view.x(Math.max(0, born)) * scaleX;
    const x1 = view.x(freed) * scaleX;
    if (x1 <= 0 || x0 >= plot.columns || x1 <= x0) return null;
    const perByte = plot.lines / (high - low);
    return [x0, plot.lines - (start + size - low) * perByte, x1, plot.lines - (start - low) * perByte];
  }

  drawSpan(i) {
    const { model, plot } = this;
    const box = this.box(model.spanBorn[i], model.spanFreed[i], model.spanStart[i], model.spanSize[i]);
    if (!box) return;
    const [x0, y0, x1, y1] = inside(box, plot);
    plot.fill(x0, y0, x1, y1, this.spanWord, NOBODY);
  }

  drawBlock(i) {
    const { model, plot } = this;
    const box = this.box(model.born[i], model.freed[i], model.position[i], model.block[i]);
    if (!box) return 0;
    const [x0, y0, x1, y1] = inside(box, plot);
    const word = plot.shade(model, i);
    if (box[2] - box[0] < 1 || box[3] - box[1] < 1) {
      this.merged++;
      this.fillMerged(x0, y0, x1, y1, word, i);
    } else plot.fill(x0, y0, x1, y1, word, i);
    return 1;
  }

  /** Of blocks that share a pixel, the largest is seen. */
  fillMerged(x0, y0, x1, y1, word, owner) {
    const { plot, model } = this;
    for (let y = y0; y < y1; y++) {
      for (let at = y * plot.columns + x0, end = y * plot.columns + x1; at < end; at++) {
        const other = plot.owners[at];
        if (other >= 0 && model.block[other] > model.block[owner]) continue;
        plot.words[at] = word;
        plot.owners[at] = owner;
      }
    }
  }

  note(shown) {
    const parts = [`${integer(shown)} of ${integer(this.model.facts.blocks)} blocks in view`];
    if (this.merged) {
      parts.push(`${integer(this.merged)} are thinner than a pixel and share it with others (the largest is seen): zoom in`);
    }
    parts.push(...colouring(this.model), ...leftOut(this.model));
    $("address-note").textContent = `${parts.join("; ")}.`;
  }

  hover(x, y, event) {
    const owner = this.plot.ownerAt(x, y);
    if (owner >= 0) {
      const lines = describeBlock(this.model, owner);
      const others = this.sharing(x, y) - 1;
      if (others > 0) {
        lines.push(h("p", { className: "quiet" }, `${integer(others)} more share this pixel: zoom in to see them.`));
      }
      tooltip.show(lines, event.clientX, event.clientY);
      return;
    }
    if (x < 0 || x > this.view.width || y < PLOT_TOP || y > this.plot.height - PLOT_BOTTOM) return tooltip.hide();
    const position = this.plot.amount(y);
    const row = Math.floor(this.view.row(x));
    const held = this.heldAt(position, row);
    const what = held ? "reserved by torch, not in use" : "not held at this moment";
    return tooltip.show(
      [h("p", {}, `0x${Math.floor(this.model.address(position)).toString(16)}: ${what}`)],
      event.clientX,
      event.clientY,
    );
  }

  heldAt(position, row) {
    const { model } = this;
    for (let i = 0; i < model.spanStart.length; i++) {
      const here = model.spanStart[i] <= position && position < model.spanStart[i] + model.spanSize[i];
      if (here && model.spanBorn[i] <= row && row < model.spanFreed[i]) return true;
    }
    return false;
  }

  /** How many blocks touch the pixel. */
  sharing(x, y) {
    const { model, plot, view } = this;
    const step = 1 / plot.scale;
    const [left, top] = [Math.floor(x / step) * step, PLOT_TOP + Math.floor((y - PLOT_TOP) / step) * step];
    const [first, last] = [view.row(left), view.row(left + step)];
    const [high, low] = [plot.amount(top), plot.amount(top + step)];
    let count = 0;
    for (let i = 0; i < model.length; i++) {
      if (model.position[i] >= high || model.position[i] + model.block[i] <= low) continue;
      if (Math.max(0, model.born[i]) < last && model.freed[i] > first) count++;
    }
    return count;
  }

  drawChosen(context) {
    const block = this.view.selected;
    if (block < 0) return;
    const { model, plot, view } = this;
    const x0 = Math.max(0, view.x(Math.max(0, model.born[block])));
    const x1 = Math.min(view.width, view.x(model.freed[block]));
    const y0 = Math.max(PLOT_TOP, plot.y(model.position[block] + model.block[block]));
    const y1 = Math.min(plot.height - PLOT_BOTTOM, plot.y(model.position[block]));
    if (x1 < x0 || y1 < y0) return;
    context.strokeStyle = token("--text");
    context.lineWidth = 2;
    context.strokeRect(PLOT_LEFT + x0 - 1, y0 - 1, x1 - x0 + 2, y1 - y0 + 2);
  }
}

/** Edges in whole pixels, at least one in each direction, within the raster. */
function inside([x0, y0, x1, y1], plot) {
  const left = Math.max(0, Math.min(plot.columns - 1, Math.round(x0)));
  const top = Math.max(0, Math.min(plot.lines - 1, Math.round(y0)));
  return [
    left,
    top,
    Math.min(plot.columns, Math.max(left + 1, Math.round(x1))),
    Math.min(plot.lines, Math.max(top + 1, Math.round(y1))),
  ];
}

/** How the colours are to be read where they are not those of the categories. */
function colouring(model) {
  return model.bySize ? ["the recording names no categories, so colours tell sizes apart"] : [];
}

function leftOut(model) {
  if (model.exact) return [];
  const { left_out: count, left_out_below: below } = model.facts;
  return [`${integer(count)} blocks of at most ${bytes(below)} are left out of this page: the trace file holds all`];
}

/** Size-time: the blocks of each moment stacked in the order in which they were allocated. */
class StackedChart {
  constructor(host, model, view, choose) {
    this.model = model;
    this.view = view;
    this.plot = new Plot(host, view, 360);
    this.vertical = new Vertical(() => this.full, eachFrame(() => this.draw()));
    this.plot.drawChosen = (context) => this.drawChosen(context);
    view.onChange(eachFrame(() => this.draw()));
    view.onMoment(eachFrame(() => this.plot.drawOver()));
    navigate(host, view, {
      vertical: verticalControl(this.plot, this.vertical),
      hover: (x, y, event) => this.hover(x, y, event),
      leave: () => tooltip.hide(),
      click: (x, y) => choose(this.plot.ownerAt(x, y), Math.floor(view.row(x))),
    });
    this.draw();
  }

  /** The highest sum of the moments in view. */
  get full() {
    let most = 1;
    for (const amount of this.totals ?? []) if (amount > most) most = amount;
    return most * 1.02;
  }

  draw() {
    const { model, plot, view } = this;
    plot.begin();
    const sample = model.sample(view, view.width);
    this.sample = sample;
    const shown = sample.categories.filter((_, kind) => !view.hidden.has(kind));
    this.totals = sample.rows.map((_, i) => shown.reduce((sum, amounts) => sum + amounts[i], 0));
    plot.range = this.vertical.now;
    this.merged = 0;
    let alive = [];
    let next = 0;
    sample.rows.forEach((row, i) => {
      alive = alive.filter((block) => model.freed[block] > row);
      for (; next < model.length && model.born[next] <= row; next++) {
        if (model.freed[next] > row && !view.hidden.has(model.kind[next])) alive.push(next);
      }
      const x0 = Math.max(0, Math.round(view.x(sample.starts[i]) * plot.scale));
      const x1 = Math.min(plot.columns, Math.round(view.x(sample.starts[i + 1] ?? sample.end) * plot.scale));
      if (x1 > x0) this.drawColumn(x0, x1, alive, this.totals[i]);
    });
    this.addEdges();
    plot.end();
    this.note();
  }

  /** One stack; a block covers the pixels whose middle it covers, so that none takes more room than it has. */
  drawColumn(x0, x1, alive, total) {
    const { model, plot } = this;
    const [low, high] = plot.range;
    const perByte = plot.lines / (high - low);
    let sum = 0;
    for (const block of alive) {
      const bottom = (sum - low) * perByte;
      sum += model.block[block];
      const top = (sum - low) * perByte;
      if (top - bottom < 1) this.merged++;
      if (top <= 0) continue;
      if (bottom >= plot.lines) break;
      const y0 = Math.max(0, plot.lines - Math.round(top));
      const y1 = Math.min(plot.lines, plot.lines - Math.round(bottom));
      const word = plot.shade(model, block);
      for (let y = y0; y < y1; y++) {
        const start = y * plot.columns;
        plot.words.fill(word, start + x0, start + x1);
        plot.owners.fill(block, start + x0, start + x1);
      }
    }
    if (total > sum) this.fillRest(x0, x1, sum, total);
  }

  /** What the small blocks that the page does not hold add to the stack. */
  fillRest(x0, x1, from, to) {
    const { plot } = this;
    const [low, high] = plot.range;
    const perByte = plot.lines / (high - low);
    const y0 = Math.max(0, plot.lines - Math.round((to - low) * perByte));
    const y1 = Math.min(plot.lines, plot.lines - Math.round((from - low) * perByte));
    for (let y = y0; y < y1; y++) {
      const start = y * plot.columns;
      plot.words.fill(pixel(token("--cached")), start + x0, start + x1);
      plot.owners.fill(LEFT_OUT, start + x0, start + x1);
    }
  }

  /** A line between neighbours that both are tall enough to spare a pixel. */
  addEdges() {
    const { owners, words, columns, lines } = this.plot;
    for (let y = 4; y < lines; y++) {
      for (let at = y * columns, end = at + columns; at < end; at++) {
        const above = owners[at - columns];
        if (owners[at] !== above && owners[at] >= 0 && above >= 0) {
          if (owners[at - 4 * columns] === above) words[at - columns] = this.plot.edge;
        }
      }
    }
  }

  note() {
    const { most, rows } = this.sample;
    const parts = [
      most > 1
        ? `each column is the fullest moment of up to ${integer(most)} events`
        : `each of the ${integer(rows.length)} events is a column of its own`,
    ];
    if (this.merged) parts.push("blocks lower than a pixel are merged with their neighbours: zoom in to see them");
    const hidden = [...this.view.hidden].some((kind) => kind !== RESERVED) ? [hiddenWords(this.model, this.view)] : [];
    parts.push(...colouring(this.model), ...leftOut(this.model), ...hidden);
    const text = parts.join("; ");
    $("stacked-note").textContent = `${text[0].toUpperCase()}${text.slice(1)}.`;
  }

  hover(x, y, event) {
    const owner = this.plot.ownerAt(x, y);
    if (owner >= 0) tooltip.show(describeBlock(this.model, owner), event.clientX, event.clientY);
    else if (owner === LEFT_OUT) tooltip.show([h("p", {}, leftOut(this.model)[0])], event.clientX, event.clientY);
    else tooltip.hide();
  }

  drawChosen(context) {
    const { owners, columns, lines, scale } = this.plot;
    const block = this.view.selected;
    if (block < 0) return;
    context.fillStyle = token("--text");
    for (let y = 0; y < lines; y++) {
      for (let x = 0; x < columns; x++) {
        const at = y * columns + x;
        if (owners[at] !== block) continue;
        const inner =
          x > 0 && x < columns - 1 && y > 0 && y < lines - 1 &&
          owners[at - 1] === block && owners[at + 1] === block &&
          owners[at - columns] === block && owners[at + columns] === block;
        if (!inner) context.fillRect(PLOT_LEFT + x / scale, PLOT_TOP + y / scale, 1 / scale, 1 / scale);
      }
    }
  }
}
