// Flame graphs of what is alive at a moment: by module and by stack, from the root down.

const ROW = 22;

/** A tree of named parts with bytes: {name, title, bytes, count, own, children}. */
function grow(root, path, amount, count) {
  root.bytes += amount;
  root.count += count;
  let node = root;
  for (const [key, name, title, category] of path) {
    if (!node.children.has(key)) {
      node.children.set(key, { name, title, category, bytes: 0, count: 0, children: new Map() });
    }
    node = node.children.get(key);
    node.bytes += amount;
    node.count += count;
  }
}

/** What is alive, summed up by origin and size: {origin, size, bytes, count}. */
function byOrigin(model, row) {
  const sums = new Map();
  const sizes = model.columns.size_of;
  for (const block of model.alive(row)) {
    const [origin, size] = [model.origin[block], model.block[block]];
    const key = origin * model.columns.block.length + sizes[block]; // a number: this runs for every block of every moment
    if (!sums.has(key)) sums.set(key, { origin, size, bytes: 0, count: 0 });
    const known = sums.get(key);
    known.bytes += size;
    known.count++;
  }
  return [...sums.values()].sort((a, b) => b.bytes - a.bytes);
}

/** The part of a tree for blocks of which nothing is known but their size. */
function sizePart(size) {
  return [`=${size}`, `${bytes(size)} each`, `blocks of ${integer(size)} B each`];
}

function moduleTree(model, row) {
  const root = { name: "all", title: "everything that is allocated", bytes: 0, count: 0, children: new Map() };
  for (const sum of byOrigin(model, row)) {
    const { origin } = sum;
    const module = model.shared.module(origin);
    const category = model.shared.origin_category[origin];
    const path = module
      ? module.split(".").map((part, i, parts) => [part, part, parts.slice(0, i + 1).join(".")])
      : [["", "no module", "belongs to no module"]];
    if (model.bySize) path.push(sizePart(sum.size));
    else path.push([`#${category}`, CATEGORIES[category], `${CATEGORIES[category]} of ${module || "no module"}`, category]);
    grow(root, path, sum.bytes, sum.count);
  }
  return root;
}

function stackTree(model, row, ownOnly) {
  const root = { name: "all", title: "everything that is allocated", bytes: 0, count: 0, children: new Map() };
  for (const sum of byOrigin(model, row)) {
    const { origin } = sum;
    let frames = model.shared.frames(origin).reverse();
    if (ownOnly) frames = frames.filter((frame) => frame.origin > 0);
    const path = frames.map((frame) => [
      frame.index, `${frame.name} ${shortFile(frame.file)}:${frame.line}`, `${frame.file}:${frame.line} in ${frame.name}`,
    ]);
    if (!path.length) path.push(["", "no stack", "the recording holds no stack for these"]);
    const op = model.shared.op(origin);
    const category = model.shared.origin_category[origin];
    if (model.bySize && !op) path.push(sizePart(sum.size));
    else path.push([`#${category}${op}`, op ? shortOp(op) : CATEGORIES[category], `${op || CATEGORIES[category]}: ${CATEGORIES[category]}`, category]);
    grow(root, path, sum.bytes, sum.count);
  }
  return root;
}

/** The largest first; numbered layers in their order. */
function ordered(children) {
  const entries = [...children];
  if (entries.every(([key]) => /^\d+$/.test(key) && typeof key === "string")) {
    return entries.sort((a, b) => Number(a[0]) - Number(b[0]));
  }
  return entries.sort((a, b) => b[1].bytes - a[1].bytes);
}

class FlameGraph {
  /** @param {function} tree gives the tree of a moment */
  constructor(host, trail, tree) {
    this.host = host;
    this.trail = trail;
    this.tree = tree;
    this.path = [];
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("pointerleave", () => tooltip.hide());
  }

  update() {
    this.root = this.tree();
    this.draw();
  }

  get node() {
    let node = this.root;
    const path = [];
    for (const key of this.path) {
      if (!node.children.has(key)) break;
      path.push(key);
      node = node.children.get(key);
    }
    this.path = path;
    return node;
  }

  draw() {
    const focused = this.host.contains(document.activeElement);
    const node = this.node;
    this.host.replaceChildren();
    this.depth = 0;
    const width = this.host.clientWidth || 800;
    if (!node.bytes) this.host.append(h("p", { className: "quiet" }, "Nothing is allocated at this moment."));
    else this.place(node, this.path, 0, width, 0, node.bytes);
    this.host.style.height = `${(this.depth + 1) * ROW + 2}px`;
    this.drawTrail();
    const first = this.host.querySelector("button");
    if (first) {
      first.tabIndex = 0;
      if (focused) first.focus();
    }
  }

  place(node, path, left, width, depth, whole) {
    this.depth = Math.max(this.depth, depth);
    this.host.append(this.cell(node, path, left, width, depth, whole));
    let at = left;
    let small = 0;
    let smallCount = 0;
    for (const [key, child] of ordered(node.children)) {
      const share = (width * child.bytes) / node.bytes;
      if (share < 3) {
        small += child.bytes;
        smallCount++;
        continue;
      }
      this.place(child, [...path, key], at, share, depth + 1, whole);
      at += share;
    }
    if (small && (width * small) / node.bytes >= 2) this.rest(small, smallCount, at, (width * small) / node.bytes, depth + 1);
  }

  cell(node, path, left, width, depth, whole) {
    const words = `${node.name}: ${bytes(node.bytes)}, ${percent(node.bytes, whole)}, ${integer(node.count)} blocks`;
    const cell = h("button", { type: "button", className: "flame-cell", tabIndex: -1, "aria-label": words });
    if (width > 30) cell.textContent = width > 150 ? `${node.name}  ${bytes(node.bytes)}` : node.name;
    this.at(cell, left, width, depth);
    if (node.category !== undefined) {
      cell.style.background = PALETTE[node.category];
      cell.style.color = inkOn(PALETTE[node.category]);
    } else cell.style.background = token(depth % 2 ? "--flame-odd" : "--flame-even");
    cell.addEventListener("click", () => {
      this.path = path;
      tooltip.hide();
      this.draw();
    });
    const tell = (x, y) =>
      tooltip.show(
        [h("p", { className: "tip-title" }, bytes(node.bytes), ` · ${percent(node.bytes, whole)} · ${integer(node.count)} blocks`), h("p", {}, node.title)],
        x,
        y,
      );
    cell.addEventListener("pointermove", (event) => tell(event.clientX, event.clientY));
    cell.addEventListener("focus", () => {
      const box = cell.getBoundingClientRect();
      if (cell.matches(":focus-visible")) tell(box.left, box.bottom);
    });
    cell.addEventListener("blur", () => tooltip.hide());
    return cell;
  }

  rest(amount, count, left, width, depth) {
    const cell = h("span", { className: "flame-cell rest", title: `${integer(count)} smaller: ${bytes(amount)}; click the part above to see them` });
    this.depth = Math.max(this.depth, depth);
    this.at(cell, left, width, depth);
    this.host.append(cell);
  }

  at(cell, left, width, depth) {
    cell.style.left = `${left}px`;
    cell.style.top = `${depth * ROW}px`;
    cell.style.width = `${Math.max(1, width - 1)}px`;
  }

  drawTrail() {
    const parts = [];
    let node = this.root;
    const keys = [null, ...this.path];
    keys.forEach((key, i) => {
      if (i > 0) node = node.children.get(key);
      const to = this.path.slice(0, i);
      const button = h("button", { type: "button", className: "link" }, node.name);
      button.addEventListener("click", () => {
        this.path = to;
        this.draw();
      });
      parts.push(button);
    });
    this.trail.replaceChildren(...(this.path.length ? parts : []));
  }

  /** Arrows go to the neighbour in a direction, Escape one step out. */
  key(event) {
    if (event.key === "Escape") {
      this.path = this.path.slice(0, -1);
      this.draw();
      return;
    }
    const here = document.activeElement;
    if (!here || !here.classList.contains("flame-cell")) return;
    const found = this.neighbour(here, event.key);
    if (!found) return;
    event.preventDefault();
    here.tabIndex = -1;
    found.tabIndex = 0;
    found.focus();
  }

  neighbour(here, name) {
    const place = (cell) => [cell.offsetLeft, cell.offsetTop];
    const [left, top] = place(here);
    const row = { ArrowUp: -ROW, ArrowDown: ROW, ArrowLeft: 0, ArrowRight: 0 }[name];
    if (row === undefined) return null;
    const cells = [...this.host.querySelectorAll("button")].filter((cell) => cell.offsetTop === top + row);
    if (name === "ArrowLeft") return cells.filter((cell) => cell.offsetLeft < left).pop() ?? null;
    if (name === "ArrowRight") return cells.find((cell) => cell.offsetLeft > left) ?? null;
    if (name === "ArrowDown") return cells.find((cell) => cell.offsetLeft >= left) ?? null;
    return cells.filter((cell) => cell.offsetLeft <= left).pop() ?? null;
  }
}
