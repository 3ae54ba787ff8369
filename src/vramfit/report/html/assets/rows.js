// Tables that sort by a click on a heading, and long ones that a word filters.

const FILTER_FROM = 8;
const FACTORS = { TiB: KIB ** 4, GiB: KIB ** 3, MiB: KIB ** 2, KiB: KIB, s: 1e6, ms: 1e3 };
const FIGURE = /^[×<+]?(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s?(TiB|GiB|MiB|KiB|B|%|s|ms|µs)?(?: or more)?$/;

const sheets = new Map();

/** A figure of a cell as a number to sort by; NaN for words. */
function figureOf(text) {
  const address = /^0x[0-9a-f]+/.exec(text);
  if (address) return parseInt(address[0], 16);
  const found = FIGURE.exec(text.replace(/ × .*$/, "")); // "12 × 48.00 MiB" counts
  if (!found) return NaN;
  return Number(found[1].replaceAll(",", "")) * (FACTORS[found[2]] ?? 1) * (text.startsWith("<") ? 0.5 : 1);
}

/** Figures before words before nothing, in either direction. */
function compareCells(one, other, direction) {
  const [a, b] = [figureOf(one), figureOf(other)];
  if (!Number.isNaN(a) && !Number.isNaN(b)) return direction * (a - b);
  if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1;
  if (!one || !other) return Number(!one) - Number(!other);
  return direction * one.localeCompare(other, "en", { numeric: true });
}

class Sheet {
  constructor(table) {
    this.body = table.tBodies[0];
    this.heads = [...table.tHead.rows[0].cells];
    this.column = -1;
    this.direction = 0;
    this.words = [];
    this.rows = [...this.body.rows];
    const tree = this.body.querySelector("[class^='indent-']"); // its order is what it says
    if (!tree) this.heads.forEach((head, column) => this.addSort(head, column));
    if (this.rows.length >= FILTER_FROM || this.body.id) this.addFilter(table.parentElement);
  }

  addSort(head, column) {
    const button = h("button", { type: "button", className: "sort" }, ...head.childNodes);
    head.replaceChildren(button);
    button.addEventListener("click", () => this.sortBy(column));
  }

  addFilter(box) {
    const input = h("input", { type: "search", className: "filter" });
    this.count = h("span", { className: "quiet", role: "status" });
    input.addEventListener("input", () => {
      this.words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      this.show();
    });
    box.before(h("div", { className: "tools" }, h("label", {}, "Filter these rows ", input), this.count));
  }

  /** The first click puts the largest figure or the first word on top, the second turns it round, the third undoes it. */
  sortBy(column) {
    const figures = this.rows.some((row) => !Number.isNaN(figureOf(cellText(row, column))));
    const first = figures ? -1 : 1;
    if (column !== this.column) [this.column, this.direction] = [column, first];
    else if (this.direction === first) this.direction = -first;
    else [this.column, this.direction] = [-1, 0];
    this.show();
  }

  /** Other rows, such as those of another moment, in the same order and by the same filter. */
  renew() {
    this.rows = [...this.body.rows];
    this.show();
  }

  show() {
    const { column, direction } = this;
    const order = [...this.rows];
    if (column >= 0) order.sort((a, b) => compareCells(cellText(a, column), cellText(b, column), direction));
    let seen = 0;
    for (const row of order) {
      const text = row.textContent.toLowerCase();
      row.hidden = !this.words.every((word) => text.includes(word));
      seen += row.hidden ? 0 : 1;
    }
    this.body.replaceChildren(...order);
    this.heads.forEach((head, at) => {
      if (at === column) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    if (this.count) this.count.textContent = this.words.length ? `${integer(seen)} of ${integer(this.rows.length)} rows` : "";
  }
}

function cellText(row, column) {
  return row.cells[column]?.textContent.trim() ?? "";
}

function makeSheets() {
  document.querySelectorAll("main table").forEach((table) => sheets.set(table.tBodies[0], new Sheet(table)));
}

/** Put rows into a table that is drawn by the scripts. */
function setRows(body, rows) {
  body.replaceChildren(...rows);
  sheets.get(body)?.renew();
}
