// The segments map: the reserved memory of one moment as a ribbon, every byte of it in the order of addresses.

const STATES = ["live", "awaiting a stream", "inactive (free, but its segment is in use)", "free, can be given back"];

class SegmentsMap {
  constructor(host, model, view, choose) {
    this.host = host;
    this.model = model;
    this.view = view;
    this.choose = choose;
    this.canvas = h("canvas", { className: "ribbon", "aria-hidden": "true" });
    host.append(this.canvas);
    view.onMoment(eachFrame(() => this.draw()));
    host.addEventListener("pointermove", (event) => this.hover(event));
    host.addEventListener("pointerleave", () => tooltip.hide());
    host.addEventListener("click", (event) => {
      const found = this.at(event);
      if (found?.block !== undefined) choose(found.block, this.view.moment);
    });
    host.addEventListener("keydown", (event) => this.key(event));
    this.cursor = -1;
    this.draw();
  }

  draw() {
    const { model, view } = this;
    this.segments = model.segmentsAt(view.moment);
    this.figures = model.figures(this.segments, view.moment);
    this.layOut();
    this.paint();
    this.describe();
  }

  /** The ribbon's cells: pieces of segments, each on one line or broken over several. */
  layOut() {
    const width = this.view.fit(this.host.clientWidth);
    const lines = Math.max(1, Math.min(28, Math.ceil(this.figures.reserved / (64 * KIB * KIB))));
    this.perLine = Math.max(1, this.figures.reserved / lines);
    this.lineHeight = lines > 12 ? 18 : 24;
    this.lines = lines;
    this.width = width;
    this.cells = [];
    let at = 0;
    this.segments.forEach((segment, index) => {
      const parts = [
        ...segment.blocks.map((block) => ({ start: this.model.position[block], block, segment: index })),
        ...segment.gaps.map((gap) => ({ start: gap.start, gap, segment: index })),
      ].sort((a, b) => a.start - b.start);
      for (const part of parts) {
        const size = part.gap ? part.gap.end - part.gap.start : this.model.block[part.block];
        this.cells.push({ ...part, at, size, state: this.state(part, segment) });
        at += size;
      }
    });
  }

  state(part, segment) {
    if (part.gap) return part.gap.releasable >= part.gap.end - part.gap.start || (segment.expandable && part.gap.releasable) ? 3 : 2;
    return this.model.freed[part.block] > this.view.moment ? 0 : 1;
  }

  paint() {
    const scale = Math.min(2, window.devicePixelRatio || 1);
    const height = this.lines * this.lineHeight + 2;
    this.host.style.height = `${height}px`;
    this.canvas.width = this.width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.fillStyle = token("--plot");
    context.fillRect(0, 0, this.width, height);
    this.hatches = { 1: hatch(context, token("--text"), token("--plot")), 2: hatch(context, token("--bad"), token("--inactive")) };
    this.cells.forEach((cell) => this.eachPiece(cell, (x, y, width) => this.paintPiece(context, cell, x, y, width)));
    this.paintBorders(context);
    if (this.cursor >= 0 && this.cursor < this.cells.length) this.paintCursor(context, this.cells[this.cursor]);
  }

  paintPiece(context, cell, x, y, width) {
    const height = this.lineHeight - 4;
    if (cell.state === 0) context.fillStyle = this.model.colour(cell.block);
    else context.fillStyle = cell.state === 3 ? token("--cached") : this.hatches[cell.state];
    context.fillRect(x, y, width > 2.5 ? width - 0.5 : width, height);
    if (cell.block !== undefined && cell.block === this.view.selected) {
      context.strokeStyle = token("--text");
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, Math.max(1, width - 2), height - 2);
    }
  }

  /** Where one segment ends and the next begins. */
  paintBorders(context) {
    context.fillStyle = token("--text");
    let previous = -1;
    for (const cell of this.cells) {
      if (cell.segment !== previous) {
        const line = Math.min(this.lines - 1, Math.floor(cell.at / this.perLine));
        const x = ((cell.at - line * this.perLine) / this.perLine) * this.width;
        context.fillRect(x, line * this.lineHeight, 1.5, this.lineHeight - 1);
      }
      previous = cell.segment;
    }
  }

  paintCursor(context, cell) {
    context.strokeStyle = token("--focus");
    context.lineWidth = 3;
    this.eachPiece(cell, (x, y, width) => context.strokeRect(x, y, Math.max(3, width), this.lineHeight - 4));
  }

  eachPiece(cell, action) {
    let at = cell.at;
    const end = cell.at + cell.size;
    // Lines are counted, not divided anew: at their ends a quotient may round to the line before.
    for (let line = Math.min(this.lines - 1, Math.floor(at / this.perLine)); line < this.lines && at < end; line++) {
      const last = line === this.lines - 1 ? end : Math.min(end, (line + 1) * this.perLine);
      const x = ((at - line * this.perLine) / this.perLine) * this.width;
      if (last > at) action(x, line * this.lineHeight + 1, ((last - at) / this.perLine) * this.width);
      at = Math.max(at, last);
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top) / this.lineHeight);
    const place = (line + (event.clientX - box.left) / this.width) * this.perLine;
    return this.cells[lastAtMost(this.cells.map((cell) => cell.at), place)];
  }

  hover(event) {
    const cell = this.at(event);
    if (cell) tooltip.show(this.words(cell), event.clientX, event.clientY);
    else tooltip.hide();
  }

  words(cell) {
    const segment = this.segments[cell.segment];
    const kind = segment.expandable ? "mapped range of an expandable segment" : "segment";
    const where = `${kind} of ${bytes(segment.end - segment.start)} at 0x${this.model.address(segment.start).toString(16)}`;
    const inUse = segment.blocks.reduce((sum, block) => sum + this.model.block[block], 0);
    const tail = h("p", { className: "quiet" }, `${where}, ${bytes(inUse)} of it in use by ${integer(segment.blocks.length)} blocks`);
    if (cell.block !== undefined) {
      const lines = describeBlock(this.model, cell.block);
      if (cell.state === 1) lines.splice(1, 0, h("p", {}, "Given back by the program; a stream still uses it."));
      return [...lines, tail];
    }
    return [h("p", { className: "tip-title" }, `${bytes(cell.size)} ${STATES[cell.state]}`), tail];
  }

  /** With the keyboard: from cell to cell; what it is stands below. */
  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 };
    if (!(event.key in steps) || !this.cells.length) {
      const block = this.cells[this.cursor]?.block;
      if (event.key === "Enter" && block !== undefined) this.choose(block, this.view.moment);
      return;
    }
    event.preventDefault();
    this.cursor = Math.max(0, Math.min(this.cells.length - 1, this.cursor + steps[event.key]));
    this.paint();
    $("segments-cursor").replaceChildren(...this.words(this.cells[this.cursor]));
  }

  describe() {
    const found = this.figures;
    const values = {
      allocated: found.allocated, reserved: found.reserved, occupied: found.occupied,
      inactive: found.inactiveSplit, releasable: found.releasable, largest: found.largestFree, slack: found.slack,
    };
    for (const [name, amount] of Object.entries(values)) {
      const element = $(`moment-${name}`);
      element.textContent = bytes(amount);
      element.dataset.bytes = amount;
    }
    $("moment-segments").textContent = integer(found.segments);
    const notes = leftOut(this.model);
    $("segments-note").textContent = notes.length
      ? `${notes[0]}; where they lie counts as free here, so that what is free is at most this much.`
      : `${integer(found.segments)} segments, ${integer(this.cells.length)} pieces; every byte of reserved memory has its place.`;
    this.describeSegments();
  }

  describeSegments() {
    const rows = [...this.segments]
      .sort((a, b) => b.end - b.start - (a.end - a.start))
      .slice(0, 40)
      .map((segment) => {
        const inUse = segment.blocks.reduce((sum, block) => sum + this.model.block[block], 0);
        const gap = segment.gaps.reduce((most, one) => Math.max(most, one.end - one.start), 0);
        const cells = [
          `0x${this.model.address(segment.start).toString(16)}${segment.expandable ? " (expandable)" : ""}`,
          bytes(segment.end - segment.start), bytes(inUse), integer(segment.blocks.length), bytes(gap),
        ];
        return h("tr", {}, ...cells.map((text) => h("td", {}, text)));
      });
    setRows($("segments-rows"), rows);
    const more = this.segments.length - rows.length;
    $("segments-more").textContent = more > 0 ? `${integer(more)} smaller segments are not listed.` : "";
  }
}


function hatch(context, line, ground) {
  const tile = h("canvas", { width: 6, height: 6 });
  const paint = tile.getContext("2d");
  paint.fillStyle = ground;
  paint.fillRect(0, 0, 6, 6);
  paint.strokeStyle = line;
  paint.lineWidth = 1;
  paint.beginPath();
  paint.moveTo(-1, 7);
  paint.lineTo(7, -1);
  paint.stroke();
  return context.createPattern(tile, "repeat");
}
