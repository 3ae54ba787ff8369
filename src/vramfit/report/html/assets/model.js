// One device of the trace: its blocks, segments and curves, and its state at any event.

const CHECKPOINT = 2048;

/** Index of the last element of sorted values that is at most x, or -1. */
function lastAtMost(values, x) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** The sizes that hold most at the moment that the page opens with, each a kind of its own; the others together. */
function sizeKinds(model) {
  const sums = new Map();
  const shown = model.alive(model.facts.row);
  for (const block of shown.length ? shown : model.block.keys()) {
    sums.set(model.block[block], (sums.get(model.block[block]) ?? 0) + model.block[block]);
  }
  const sizes = [...sums].sort((a, b) => b[1] - a[1] || b[0] - a[0]).slice(0, PALETTE.length - 1).map(([size]) => size);
  const alike = (size) => sizes.filter((other) => bytes(other) === bytes(size)).length > 1;
  const names = ["other sizes", ...sizes.map((size) => `${alike(size) ? `${integer(size)} B` : bytes(size)} each`)];
  while (names.length < PALETTE.length) names.push("");
  const stacking = [...PALETTE.keys()].slice(1).concat(0);
  return { names, colours: PALETTE, stacking, of: new Map(sizes.map((size, i) => [size, i + 1])) };
}

/** What all devices share: names, stacks, phases, marks and times. */
class Shared {
  constructor({ columns, facts }) {
    Object.assign(this, columns);
    this.facts = facts;
    this.rows = facts.rows;
    this.stackStart = new Int32Array(this.stack_length.length + 1);
    this.stack_length.forEach((length, i) => (this.stackStart[i + 1] = this.stackStart[i] + length));
    this.hasTimes = this.time_us.length > 1 && this.time_us[this.time_us.length - 1] > 0;
    this.timesAreExact = this.time_row.length === this.rows;
  }

  op(origin) {
    return this.named("op", "ops", origin);
  }

  module(origin) {
    return this.named("module", "modules", origin);
  }

  tensor(origin) {
    return this.named("tensor", "tensors", origin);
  }

  named(property, table, origin) {
    const index = this[`origin_${property}`][origin];
    return index > 0 ? this.facts[table][index - 1] : "";
  }

  stream(origin) {
    return this.facts.streams[this.origin_stream[origin]];
  }

  /** The frames of an origin's stack, innermost first. */
  frames(origin) {
    const stack = this.origin_stack[origin] - 1;
    if (stack < 0) return [];
    const found = [];
    for (let i = this.stackStart[stack]; i < this.stackStart[stack + 1]; i++) {
      const frame = this.stack_frame[i];
      found.push(this.frame(frame));
    }
    return found;
  }

  frame(index) {
    const file = this.frame_file[index];
    return {
      index,
      file: this.facts.files[file],
      line: this.frame_line[index],
      name: this.facts.functions[this.frame_function[index]],
      origin: this.file_origin[file], // 0 torch and Python, 1 another library, 2 the program
    };
  }

  /** The line that a reader would look at: of the program, else of a library. */
  line(origin) {
    const frames = this.frames(origin);
    const found = frames.find((frame) => frame.origin === 2) ?? frames.find((frame) => frame.origin === 1);
    return found ? `${shortFile(found.file)}:${found.line}` : "";
  }

  phaseAt(row) {
    const at = lastAtMost(this.phase_row, row);
    const phase = at >= 0 ? this.phase[at] : 0;
    return phase > 0 ? this.facts.phases[phase - 1] : "";
  }

  /** Microseconds since the first event with a time; between two known ones on the line between them. */
  timeOf(row) {
    const at = Math.max(0, lastAtMost(this.time_row, row));
    const here = this.time_us[at];
    if (at + 1 >= this.time_row.length) return here + Math.max(0, row - this.time_row[at]) * this.meanStep;
    const share = (row - this.time_row[at]) / (this.time_row[at + 1] - this.time_row[at]);
    return here + share * (this.time_us[at + 1] - here);
  }

  get meanStep() {
    return this.time_us[this.time_us.length - 1] / Math.max(1, this.rows);
  }

  rowOf(time) {
    const at = Math.max(0, lastAtMost(this.time_us, time));
    if (at + 1 >= this.time_row.length) {
      return Math.min(this.rows, this.time_row[at] + (time - this.time_us[at]) / (this.meanStep || 1));
    }
    const share = (time - this.time_us[at]) / (this.time_us[at + 1] - this.time_us[at] || 1);
    return this.time_row[at] + share * (this.time_row[at + 1] - this.time_row[at]);
  }
}

class Model {
  constructor(shared, { columns, facts }) {
    this.shared = shared;
    this.facts = facts;
    this.rows = shared.rows;
    this.columns = columns;
    this.exact = facts.left_out === 0;
    this.readBlocks(columns);
    this.readArena(columns);
    this.readSpans(columns);
    // Recordings of torch name no categories: sizes tell more than one colour for all.
    this.bySize = this.category.every((category) => category === 0);
    this.readKinds();
    this.sumUp();
  }

  /** What the sums over time are of: categories, or sizes where no categories are known and every block is. */
  readKinds() {
    const bySize = this.bySize && this.exact && this.length > 0;
    this.kinds = bySize ? sizeKinds(this) : { names: CATEGORIES, colours: PALETTE, stacking: STACKING };
    this.kind = bySize ? Uint8Array.from(this.block, (size) => this.kinds.of.get(size) ?? 0) : this.category;
  }

  /** Whether any block is of a kind. */
  occurs(kind) {
    return this.exact ? this.kind.includes(kind) : this.points.categories[kind].some((amount) => amount > 0);
  }

  colour(block) {
    if (!this.bySize || this.exact) return this.kinds.colours[this.kind[block]];
    const size = this.block[block] / 512;
    return SIZE_PALETTE[Math.floor(size * 7 + size / 2 ** 20) % SIZE_PALETTE.length];
  }

  get length() {
    return this.born.length;
  }

  readBlocks(columns) {
    const count = columns.born.length;
    this.born = new Int32Array(count);
    this.freed = new Int32Array(count);
    this.done = new Int32Array(count);
    this.block = new Float64Array(count);
    this.size = new Float64Array(count);
    this.position = new Float64Array(count);
    this.origin = columns.origin;
    this.category = new Uint8Array(count);
    for (let i = 0; i < count; i++) {
      const born = columns.born[i] - 1;
      const freed = columns.life[i] ? born + columns.life[i] - 1 : this.rows;
      this.born[i] = born;
      this.freed[i] = freed;
      this.done[i] = columns.wait[i] ? freed + columns.wait[i] - 1 : this.rows;
      this.block[i] = columns.block[columns.size_of[i]];
      this.size[i] = columns.size[columns.size_of[i]];
      this.position[i] = columns.position[columns.place[i]] * this.facts.unit;
      this.category[i] = this.shared.origin_category[this.origin[i]];
    }
  }

  readArena(columns) {
    const count = columns.arena_start.length;
    this.arenaStart = columns.arena_start;
    this.arenaBefore = new Float64Array(count);
    let total = 0;
    for (let i = 0; i < count; i++) {
      this.arenaBefore[i] = total;
      total += columns.arena_size[i];
    }
    this.arenaTotal = total;
  }

  readSpans(columns) {
    const count = columns.span_start.length;
    this.spanStart = new Float64Array(count);
    this.spanSize = columns.span_size;
    this.spanBorn = new Int32Array(count);
    this.spanFreed = columns.span_freed;
    this.spanPage = columns.span_page; // of expandable segments; 0 for those of cudaMalloc
    this.spanKind = columns.span_kind; // stream and pool: pages of different kinds are not given back together
    for (let i = 0; i < count; i++) {
      this.spanStart[i] = this.inArena(columns.span_start[i]);
      this.spanBorn[i] = columns.span_born[i] - 1;
    }
  }

  /** An address as an offset into the ranges that were ever used, and the other way round. */
  inArena(address) {
    const at = Math.max(0, lastAtMost(this.arenaStart, address));
    return this.arenaBefore[at] + address - this.arenaStart[at];
  }

  address(position) {
    const at = Math.max(0, lastAtMost(this.arenaBefore, position));
    return this.arenaStart[at] + position - this.arenaBefore[at];
  }

  /** Allocated and reserved bytes after each event, and the categories every so many events. */
  sumUp() {
    const rows = this.rows;
    this.allocated = new Float64Array(rows);
    this.reserved = new Float64Array(rows);
    this.bornAt = new Int32Array(rows).fill(-1);
    this.freedAt = new Int32Array(rows).fill(-1);
    const before = new Float64Array(CATEGORIES.length);
    for (let i = 0; i < this.length; i++) {
      if (this.born[i] >= 0) this.bornAt[this.born[i]] = i;
      else if (this.freed[i] >= 0) before[this.kind[i]] += this.block[i];
      if (this.freed[i] >= 0 && this.freed[i] < rows) this.freedAt[this.freed[i]] = i;
    }
    this.before = before;
    this.checkpoints = [];
    const now = Float64Array.from(before);
    let allocated = now.reduce((sum, amount) => sum + amount, 0);
    this.allocatedBefore = allocated;
    for (let row = 0; row < rows; row++) {
      if (row % CHECKPOINT === 0) this.checkpoints.push(Float64Array.from(now));
      allocated += this.step(row, now);
      this.allocated[row] = allocated;
    }
    for (let i = 0; i < this.spanSize.length; i++) {
      if (this.spanBorn[i] >= 0) this.reserved[this.spanBorn[i]] += this.spanSize[i];
      if (this.spanFreed[i] < rows) this.reserved[this.spanFreed[i]] -= this.spanSize[i];
    }
    let reserved = 0;
    for (let i = 0; i < this.spanSize.length; i++) if (this.spanBorn[i] < 0) reserved += this.spanSize[i];
    this.reservedBefore = reserved;
    for (let row = 0; row < rows; row++) this.reserved[row] = reserved += this.reserved[row];
    if (!this.exact) this.fillFromPoints();
  }

  /** Apply the event of a row to the bytes by category; gives the change of their sum. */
  step(row, now) {
    let change = 0;
    const born = this.bornAt[row];
    if (born >= 0) {
      now[this.kind[born]] += this.block[born];
      change += this.block[born];
    }
    const freed = this.freedAt[row];
    if (freed >= 0) {
      now[this.kind[freed]] -= this.block[freed];
      change -= this.block[freed];
    }
    return change;
  }

  /** Where small blocks are left out, the sums come from the points that were counted with all of them. */
  fillFromPoints() {
    const { point_row: rows, point_reserved: reserved } = this.columns;
    this.points = { rows, reserved, categories: CATEGORIES.map((_, i) => this.columns[`point_${i}`]) };
  }

  /** Bytes by kind right after an event; -1 is before the first. */
  categoriesAt(row) {
    if (!this.exact) return this.pointAt(row);
    if (row < 0) return Float64Array.from(this.before);
    const checkpoint = Math.floor(row / CHECKPOINT);
    const now = Float64Array.from(this.checkpoints[checkpoint]);
    for (let at = checkpoint * CHECKPOINT; at <= row; at++) this.step(at, now);
    return now;
  }

  pointAt(row) {
    const at = Math.max(0, lastAtMost(this.points.rows, row));
    return Float64Array.from(this.points.categories, (amounts) => amounts[at]);
  }

  allocatedAt(row) {
    if (!this.exact) return this.pointAt(row).reduce((sum, amount) => sum + amount, 0);
    return row < 0 ? this.allocatedBefore : this.allocated[row];
  }

  reservedAt(row) {
    return row < 0 ? this.reservedBefore : this.reserved[row];
  }

  /**
   * The events from lo to hi in groups that are each about a pixel wide; of each group the fullest moment.
   * With fewer events than pixels each event is a group of its own, so that nothing is left out.
   */
  sample(axis, width) {
    if (!this.exact) return this.samplePoints(axis);
    const first = Math.max(0, Math.floor(axis.row(0)));
    const last = Math.min(this.rows - 1, Math.ceil(axis.row(width)) - 1);
    const rows = [];
    const starts = [];
    const categories = CATEGORIES.map(() => []);
    const reserved = [];
    const held = new Float64Array(CATEGORIES.length);
    const now = first > 0 ? this.categoriesAt(first - 1) : Float64Array.from(this.before);
    let row = first;
    while (row <= last) {
      const start = row;
      const end = Math.min(last, Math.max(row, Math.ceil(axis.row(Math.floor(axis.x(row)) + 1)) - 1));
      let best = -1;
      let most = 0;
      for (; row <= end; row++) {
        this.step(row, now);
        if (best < 0 || this.allocated[row] > this.allocated[best]) {
          best = row;
          held.set(now);
        }
        most = Math.max(most, this.reserved[row]);
      }
      starts.push(start);
      rows.push(best);
      reserved.push(most);
      held.forEach((amount, category) => categories[category].push(amount));
    }
    return { rows, starts, end: last + 1, reserved, categories, most: this.mostPerGroup(starts, last + 1) };
  }

  mostPerGroup(starts, end) {
    return starts.reduce((most, start, i) => Math.max(most, (starts[i + 1] ?? end) - start), 0);
  }

  samplePoints(axis) {
    const { rows, reserved, categories } = this.points;
    const low = Math.max(0, lastAtMost(rows, axis.lowRow));
    const high = Math.min(rows.length, lastAtMost(rows, axis.highRow) + 2);
    const starts = Array.from(rows.subarray(low, high));
    return {
      rows: starts,
      starts,
      end: Math.min(this.rows, Math.ceil(axis.highRow)),
      reserved: Array.from(reserved.subarray(low, high)),
      categories: categories.map((amounts) => Array.from(amounts.subarray(low, high))),
      most: this.mostPerGroup(starts, this.rows),
    };
  }

  /** Blocks that count as allocated after an event (or, with `waiting`, that a stream still uses). */
  alive(row, waiting = false) {
    const ends = waiting ? this.done : this.freed;
    const found = [];
    for (let i = 0; i < this.length; i++) {
      if (this.born[i] > row) break; // sorted by birth
      if (ends[i] > row) found.push(i);
    }
    return found;
  }

  /** The segments after an event with the blocks in them and the gaps between, in the order of addresses. */
  segmentsAt(row) {
    const segments = [];
    for (let i = 0; i < this.spanStart.length; i++) {
      if (this.spanBorn[i] > row || this.spanFreed[i] <= row) continue;
      const start = this.spanStart[i];
      const last = segments[segments.length - 1];
      const page = this.spanPage[i];
      const kind = this.spanKind[i];
      const follows = last && last.end === start && page > 0 && last.page > 0 && this.touches(start);
      if (follows && last.kind === kind) last.end += this.spanSize[i];
      else {
        const end = start + this.spanSize[i];
        segments.push({ start, end, page, kind, follows, expandable: page > 0, blocks: [], gaps: [] });
      }
    }
    const starts = Float64Array.from(segments, (segment) => segment.start);
    const blocks = this.alive(row, true).sort((a, b) => this.position[a] - this.position[b]);
    for (const block of blocks) {
      const home = segments[lastAtMost(starts, this.position[block])];
      if (home && this.position[block] < home.end) home.blocks.push(block);
    }
    segments.forEach((segment) => this.findGaps(segment));
    return segments;
  }

  /** Whether what lies before a place of the arena is its neighbour in the address space too. */
  touches(position) {
    return lastAtMost(this.arenaBefore, position) === lastAtMost(this.arenaBefore, position - 1);
  }

  findGaps(segment) {
    let at = segment.start;
    for (const block of segment.blocks) {
      if (this.position[block] > at) segment.gaps.push({ start: at, end: this.position[block] });
      at = this.position[block] + this.block[block];
    }
    if (at < segment.end) segment.gaps.push({ start: at, end: segment.end });
    for (const gap of segment.gaps) gap.releasable = this.releasable(segment, gap);
  }

  /** Bytes of a gap that can be given back: all of a free segment, or the whole pages of an expandable one. */
  releasable(segment, gap) {
    if (!segment.expandable) return segment.blocks.length ? 0 : gap.end - gap.start;
    const first = Math.ceil((gap.start - segment.start) / segment.page);
    const last = Math.floor((gap.end - segment.start) / segment.page);
    return Math.max(0, last - first) * segment.page;
  }

  /** The figures of analysis.fragmentation, from the segments of a moment. */
  figures(segments, row) {
    const found = { reserved: 0, free: 0, releasable: 0, largestFree: 0, slack: 0, segments: 0 };
    let open = 0; // free bytes at the end of the stretch before, if it goes on
    for (const segment of segments) {
      if (!segment.follows) found.segments++;
      found.reserved += segment.end - segment.start;
      for (const gap of segment.gaps) {
        found.free += gap.end - gap.start;
        found.releasable += gap.releasable;
        const before = segment.follows && gap.start === segment.start ? open : 0;
        found.largestFree = Math.max(found.largestFree, before + gap.end - gap.start);
      }
      open = this.openEnd(segment, open);
    }
    for (const block of this.alive(row, true)) found.slack += this.block[block] - this.size[block];
    found.occupied = found.reserved - found.free;
    found.inactiveSplit = found.free - found.releasable;
    found.allocated = this.allocatedAt(row);
    return found;
  }

  /** Free bytes that reach to the end of a stretch, with those of the one before where all of it is free. */
  openEnd(segment, before) {
    const last = segment.gaps[segment.gaps.length - 1];
    if (!last || last.end !== segment.end) return 0;
    const size = last.end - last.start;
    return segment.follows && size === segment.end - segment.start ? before + size : size;
  }

  /** The event with the most allocated bytes, of equals the first; -1 if there was as much before the first. */
  get peakRow() {
    let best = -1;
    for (let row = 0; row < this.rows; row++) {
      const now = this.exact ? this.allocated[row] : 0;
      if (now > (best < 0 ? this.allocatedBefore : this.allocated[best])) best = row;
    }
    return this.exact ? best : this.facts.row;
  }

  get reservedPeakRow() {
    let best = -1;
    for (let row = 0; row < this.rows; row++) {
      if (this.reserved[row] > this.reservedAt(best)) best = row;
    }
    return best;
  }
}
