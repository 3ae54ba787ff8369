// What part of the trace is on the screen, and which moment is looked at: shared by all pictures of a device.

const PLOT_LEFT = 76;
const PLOT_RIGHT = 14;
const ZOOM_STEP = 1.25;

/** Events or time on the horizontal axis: row <-> value <-> pixel. Row r fills the values from r to r + 1. */
class View {
  constructor(model) {
    this.model = model;
    this.byTime = false;
    this.width = 800;
    this.moment = model.facts.row;
    this.selected = -1;
    this.hidden = new Set(); // kinds of blocks that the legend hides
    this.listeners = [];
    this.momentListeners = [];
    this.reset();
  }

  value(row) {
    return this.byTime ? this.model.shared.timeOf(row) : row;
  }

  rowOfValue(value) {
    return this.byTime ? this.model.shared.rowOf(value) : value;
  }

  get full() {
    return [this.value(0), Math.max(this.value(this.model.rows), this.value(0) + 1)];
  }

  /** The pixel (from the left of the plot) at which a row begins. */
  x(row) {
    return ((this.value(row) - this.low) / (this.high - this.low)) * this.width;
  }

  /** The row, with a fraction, at a pixel. */
  row(x) {
    return this.rowOfValue(this.low + (x / this.width) * (this.high - this.low));
  }

  get lowRow() {
    return this.rowOfValue(this.low);
  }

  get highRow() {
    return this.rowOfValue(this.high);
  }

  get isFull() {
    const [low, high] = this.full;
    return this.low <= low && this.high >= high;
  }

  show(low, high) {
    const [least, most] = this.full;
    const narrowest = this.byTime ? Math.min(most - least, 2) : Math.min(most - least, 4);
    const range = Math.min(Math.max(high - low, narrowest), most - least);
    const start = Math.max(least, Math.min((low + high - range) / 2, most - range));
    this.low = start;
    this.high = start + range;
    this.changed();
  }

  showRows(first, last) {
    this.show(this.value(first), this.value(last));
  }

  reset() {
    [this.low, this.high] = this.full;
    this.changed();
  }

  zoom(factor, x = this.width / 2) {
    const at = this.low + (x / this.width) * (this.high - this.low);
    this.show(at - (at - this.low) * factor, at + (this.high - at) * factor);
  }

  pan(share) {
    const shift = (this.high - this.low) * share;
    const [least, most] = this.full;
    const bounded = Math.max(least - this.low, Math.min(shift, most - this.high));
    this.show(this.low + bounded, this.high + bounded);
  }

  useTime(byTime) {
    const [first, last] = [this.lowRow, this.highRow];
    this.byTime = byTime;
    this.showRows(first, last);
  }

  setMoment(row) {
    const bounded = Math.max(-1, Math.min(this.model.rows - 1, Math.round(row)));
    if (bounded === this.moment) return;
    this.moment = bounded;
    this.momentListeners.forEach((listener) => listener());
  }

  /** Hide a kind of blocks or show it again; gives whether it is shown. */
  toggle(kind) {
    const shown = this.hidden.has(kind);
    if (shown) this.hidden.delete(kind);
    else this.hidden.add(kind);
    this.changed();
    return shown;
  }

  /** Fit the pictures into a width; 0 is that of a folded section, which changes nothing. */
  fit(outer) {
    if (outer > 0) this.outer = Math.max(120, outer);
    this.outer ??= 800;
    this.width = this.outer - PLOT_LEFT - PLOT_RIGHT;
    return this.outer;
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  onMoment(listener) {
    this.momentListeners.push(listener);
  }

  changed() {
    this.listeners.forEach((listener) => listener());
  }
}

/**
 * Wheel, drag and keys on a picture whose horizontal axis is the view.
 *
 * @param {HTMLElement} element takes the events and the focus
 * @param {View} view
 * @param {object} more `left()`: where its plot begins; `vertical`: an object with zoom(factor, y), pan(share),
 *   show(y0, y1) and reset() for pictures that zoom in both directions; `click(x, y)`; `hover(x, y)`; `leave()`
 */
function navigate(element, view, more = {}) {
  const place = (event) => {
    const box = element.getBoundingClientRect();
    return [event.clientX - box.left - PLOT_LEFT, event.clientY - box.top];
  };
  element.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.shiftKey && !event.altKey && document.activeElement !== element) return;
      event.preventDefault();
      const [x, y] = place(event);
      const turn = event.deltaY || event.deltaX;
      const factor = turn > 0 ? ZOOM_STEP : 1 / ZOOM_STEP;
      if (event.shiftKey && more.vertical) more.vertical.zoom(factor, y);
      else view.zoom(factor, x);
    },
    { passive: false },
  );
  drag(element, view, more, place);
  element.addEventListener("dblclick", () => resetAll(view, more));
  element.addEventListener("keydown", (event) => {
    if (press(event, view, more)) event.preventDefault();
  });
}

function resetAll(view, more) {
  if (more.vertical) more.vertical.reset();
  view.reset();
}

function press(event, view, more) {
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  const page = event.shiftKey ? 0.9 : 0.2;
  const actions = {
    ArrowLeft: () => view.pan(-page),
    ArrowRight: () => view.pan(page),
    "+": () => view.zoom(1 / ZOOM_STEP ** 2, Math.max(0, Math.min(view.width, view.x(view.moment + 0.5)))),
    "=": () => view.zoom(1 / ZOOM_STEP ** 2, Math.max(0, Math.min(view.width, view.x(view.moment + 0.5)))),
    "-": () => view.zoom(ZOOM_STEP ** 2),
    "0": () => resetAll(view, more),
    Home: () => resetAll(view, more),
    ",": () => view.setMoment(view.moment - 1),
    ".": () => view.setMoment(view.moment + 1),
    "<": () => view.setMoment(view.row(Math.max(0, view.x(view.moment) - 10))),
    ">": () => view.setMoment(view.row(view.x(view.moment) + 10)),
  };
  if (more.vertical) {
    actions.ArrowUp = () => more.vertical.pan(page);
    actions.ArrowDown = () => more.vertical.pan(-page);
    actions.PageUp = () => more.vertical.zoom(1 / ZOOM_STEP ** 2);
    actions.PageDown = () => more.vertical.zoom(ZOOM_STEP ** 2);
  }
  const action = actions[event.key];
  if (action) action();
  return action !== undefined;
}

/** Drag a frame to zoom into it; a press without movement is a click. */
function drag(element, view, more, place) {
  let start = null;
  const frame = h("div", { className: "drag-frame", hidden: true });
  element.append(frame);
  const draw = (x0, y0, x1, y1) => {
    frame.hidden = false;
    const whole = !more.vertical;
    frame.style.left = `${Math.min(x0, x1) + PLOT_LEFT}px`;
    frame.style.width = `${Math.abs(x1 - x0)}px`;
    frame.style.top = whole ? "0" : `${Math.min(y0, y1)}px`;
    frame.style.height = whole ? "100%" : `${Math.abs(y1 - y0)}px`;
  };
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = place(event);
    element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (!start) more.hover?.(x, y, event);
    else if (Math.hypot(x - start[0], y - start[1]) > 4) {
      more.leave?.();
      draw(...start, x, y);
    }
  });
  element.addEventListener("pointerup", (event) => {
    if (!start) return;
    const [x, y] = place(event);
    const [x0, y0] = start;
    start = null;
    frame.hidden = true;
    if (Math.hypot(x - x0, y - y0) <= 4) {
      more.click?.(x, y);
      return;
    }
    if (more.vertical && Math.abs(y - y0) > 8) more.vertical.show(Math.min(y0, y), Math.max(y0, y));
    if (Math.abs(x - x0) > 4) {
      const low = view.low + (Math.min(x0, x) / view.width) * (view.high - view.low);
      const high = view.low + (Math.max(x0, x) / view.width) * (view.high - view.low);
      view.show(low, high);
    }
  });
  element.addEventListener("pointercancel", () => {
    start = null;
    frame.hidden = true;
  });
  element.addEventListener("pointerleave", () => more.leave?.());
}

/** The axis of bytes of a timeline, with about so many ticks. */
function byteAxis(most) {
  return {
    stroke: () => token("--text-quiet"),
    grid: { stroke: () => token("--line"), width: 1 },
    ticks: { show: false },
    size: PLOT_LEFT,
    font: "12px system-ui, sans-serif",
    splits: (chart, axis, low, high) => {
      const step = byteStep(high - low, most);
      const found = [];
      for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
      return found;
    },
    values: (chart, values) => values.map((value) => tickBytes(value, values.length > 1 ? values[1] - values[0] : 0)),
  };
}
