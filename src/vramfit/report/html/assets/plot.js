// A picture of rectangles: pixels that know which block they belong to, and axes drawn over them.

const PLOT_TOP = 8;
const PLOT_BOTTOM = 24;
const SHADES = [1, 0.93, 0.86, 1.07, 0.97];
const NOBODY = -1;
const LEFT_OUT = -2; // blocks that are too small for this page to hold

class Plot {
  constructor(host, view, height) {
    this.host = host;
    this.view = view;
    this.height = height;
    this.pixels = h("canvas", { className: "pixels", "aria-hidden": "true" });
    this.over = h("canvas", { className: "over", "aria-hidden": "true" });
    host.style.height = `${height}px`;
    host.append(this.pixels, this.over);
  }

  get plotHeight() {
    return this.height - PLOT_TOP - PLOT_BOTTOM;
  }

  /** Make room for the present size of the window and forget what was drawn. */
  begin() {
    this.scale = Math.min(2, window.devicePixelRatio || 1);
    this.view.fit(this.host.clientWidth);
    this.columns = Math.max(1, Math.round(this.view.width * this.scale));
    this.lines = Math.max(1, Math.round(this.plotHeight * this.scale));
    if (this.pixels.width !== this.columns || this.pixels.height !== this.lines) {
      this.pixels.width = this.columns;
      this.pixels.height = this.lines;
      this.image = new ImageData(this.columns, this.lines);
      this.words = new Uint32Array(this.image.data.buffer);
      this.owners = new Int32Array(this.columns * this.lines);
    }
    this.pixels.style.left = `${PLOT_LEFT}px`;
    this.pixels.style.top = `${PLOT_TOP}px`;
    this.pixels.style.width = `${this.view.width}px`;
    this.pixels.style.height = `${this.plotHeight}px`;
    this.words.fill(pixel(token("--plot")));
    this.owners.fill(NOBODY);
    this.shades = new Map();
    this.edge = pixel(token("--plot"));
  }

  end() {
    this.pixels.getContext("2d").putImageData(this.image, 0, 0);
    this.drawOver();
  }

  /** The colour of a block, a little lighter or darker than that of its neighbours. */
  shade(model, block) {
    const colour = model.colour(block);
    if (!this.shades.has(colour)) this.shades.set(colour, SHADES.map((light) => pixel(colour, light)));
    return this.shades.get(colour)[(block * 7) % SHADES.length];
  }

  /** Fill pixels; a rectangle of at least a few pixels gets an edge, so that neighbours can be told apart. */
  fill(x0, y0, x1, y1, word, owner) {
    const edged = x1 - x0 >= 5 && y1 - y0 >= 5;
    for (let y = y0; y < y1; y++) {
      const start = y * this.columns;
      this.words.fill(edged && y === y1 - 1 ? this.edge : word, start + x0, start + x1);
      this.owners.fill(owner, start + x0, start + x1);
      if (edged) this.words[start + x1 - 1] = this.edge;
    }
  }

  /** The owner of the pixel at a place of the plot (CSS pixels). */
  ownerAt(x, y) {
    const column = Math.floor(x * this.scale);
    const line = Math.floor((y - PLOT_TOP) * this.scale);
    if (column < 0 || line < 0 || column >= this.columns || line >= this.lines) return NOBODY;
    return this.owners[line * this.columns + column];
  }

  /** Axes, the chosen moment and the chosen block. */
  drawOver() {
    const width = this.view.width + PLOT_LEFT + PLOT_RIGHT;
    this.over.width = width * this.scale;
    this.over.height = this.height * this.scale;
    this.over.style.width = `${width}px`;
    this.over.style.height = `${this.height}px`;
    const context = this.over.getContext("2d");
    context.scale(this.scale, this.scale);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = token("--text-quiet");
    context.strokeStyle = token("--line");
    this.drawTicks(context);
    const x = PLOT_LEFT + this.view.x(this.view.moment + 0.5);
    if (x >= PLOT_LEFT && x <= PLOT_LEFT + this.view.width) {
      context.strokeStyle = token("--moment");
      context.lineWidth = 1.5;
      context.setLineDash([6, 3]);
      context.beginPath();
      context.moveTo(x, PLOT_TOP);
      context.lineTo(x, this.height - PLOT_BOTTOM);
      context.stroke();
      context.setLineDash([]);
    }
    this.drawChosen?.(context);
  }

  drawTicks(context) {
    const [low, high] = this.range;
    const byteTicks = byteStep(high - low, 5);
    context.textAlign = "right";
    for (let at = Math.ceil(low / byteTicks) * byteTicks; at <= high; at += byteTicks) {
      const y = this.y(at);
      context.fillText(tickBytes(at, byteTicks), PLOT_LEFT - 6, y + 4);
      context.beginPath();
      context.moveTo(PLOT_LEFT - 4, y);
      context.lineTo(PLOT_LEFT, y);
      context.stroke();
    }
    const { low: first, high: last, byTime } = this.view;
    const step = roundStep((last - first) / Math.max(2, Math.floor(this.view.width / 110)), byTime ? 0 : 1);
    for (let value = Math.ceil(first / step) * step; value <= last; value += step) {
      const x = PLOT_LEFT + ((value - first) / (last - first)) * this.view.width;
      context.textAlign = x < PLOT_LEFT + 20 ? "left" : x > PLOT_LEFT + this.view.width - 30 ? "right" : "center";
      context.fillText(byTime ? duration(value) : integer(value), x, this.height - 8);
    }
    context.textAlign = "left";
  }

  /** The place of an amount on the vertical axis, in CSS pixels of the host. */
  y(amount) {
    const [low, high] = this.range;
    return PLOT_TOP + this.plotHeight * (1 - (amount - low) / (high - low));
  }

  amount(y) {
    const [low, high] = this.range;
    return low + (high - low) * (1 - (y - PLOT_TOP) / this.plotHeight);
  }
}

/** Zoom in the vertical direction, between zero and a picture's full height. */
class Vertical {
  constructor(full, changed) {
    this.full = full;
    this.changed = changed;
    this.range = null;
  }

  get now() {
    return this.range ?? [0, this.full()];
  }

  set(low, high) {
    const most = this.full();
    const range = Math.min(Math.max(high - low, 4096), most);
    const start = Math.max(0, Math.min((low + high - range) / 2, most - range));
    this.range = range >= most ? null : [start, start + range];
    this.changed();
  }

  reset() {
    this.range = null;
    this.changed();
  }
}

function verticalControl(plot, vertical) {
  const zoomAt = (factor, at) => {
    const [low, high] = vertical.now;
    vertical.set(at - (at - low) * factor, at + (high - at) * factor);
  };
  return {
    zoom: (factor, y) => {
      const [low, high] = vertical.now;
      zoomAt(factor, y === undefined ? (low + high) / 2 : plot.amount(y));
    },
    pan: (share) => {
      const [low, high] = vertical.now;
      const shift = Math.max(-low, Math.min((high - low) * share, vertical.full() - high));
      vertical.set(low + shift, high + shift);
    },
    show: (y0, y1) => vertical.set(plot.amount(y1), plot.amount(y0)),
    reset: () => vertical.reset(),
  };
}
