// What lies under the pointer, and the block that was chosen, in words.

const tooltip = {
  get element() {
    return $("tooltip");
  },

  show(lines, clientX, clientY) {
    const element = this.element;
    element.replaceChildren(...lines);
    element.hidden = false;
    const box = element.getBoundingClientRect();
    const left = clientX + 14 + box.width > window.innerWidth ? clientX - 14 - box.width : clientX + 14;
    const top = clientY + 14 + box.height > window.innerHeight ? clientY - 14 - box.height : clientY + 14;
    element.style.left = `${Math.max(4, left)}px`;
    element.style.top = `${Math.max(4, top)}px`;
  },

  hide() {
    this.element.hidden = true;
  },
};

function swatch(colour) {
  const mark = h("span", { className: "swatch", "aria-hidden": "true" });
  mark.style.background = colour;
  return mark;
}

/** The life of a block in words. */
function lifeOf(model, block) {
  const born = model.born[block] < 0 ? "before the recording" : `event ${integer(model.born[block])}`;
  const freed = model.freed[block] < model.rows ? `event ${integer(model.freed[block])}` : "the end, still held";
  const shared = model.shared;
  let time = "";
  if (shared.hasTimes && model.born[block] >= 0 && model.freed[block] < model.rows) {
    const us = shared.timeOf(model.freed[block]) - shared.timeOf(model.born[block]);
    time = ` (${shared.timesAreExact ? "" : "about "}${duration(us)})`;
  }
  return `from ${born} to ${freed}${time}`;
}

/** A block in a few lines; all frames of its stack, or the first of them. */
function describeBlock(model, block, frames = 8) {
  const { shared } = model;
  const origin = model.origin[block];
  const lines = [
    h(
      "p",
      { className: "tip-title" },
      swatch(model.colour(block)),
      h("strong", {}, bytes(model.block[block])),
      model.bySize ? "" : ` ${CATEGORIES[model.category[block]]}`,
      shared.tensor(origin) ? ` · ${shared.tensor(origin)}` : "",
    ),
  ];
  const facts = [];
  if (shared.op(origin)) facts.push(["operator", shortOp(shared.op(origin))]);
  if (shared.module(origin)) facts.push(["module", shared.module(origin)]);
  facts.push(["asked for", `${integer(model.size[block])} B of a block of ${integer(model.block[block])} B`]);
  facts.push(["address", `0x${model.address(model.position[block]).toString(16)}, stream ${shared.stream(origin)}`]);
  facts.push(["alive", lifeOf(model, block)]);
  const list = h("dl", { className: "tip-facts" });
  for (const [name, value] of facts) list.append(h("dt", {}, name), h("dd", {}, value));
  lines.push(list, stackList(shared.frames(origin), frames));
  return lines;
}

function stackList(frames, most) {
  if (!frames.length) return h("p", { className: "quiet" }, "The recording holds no stack for it.");
  // With little room, the program's own lines are what tells.
  const own = frames.filter((frame) => frame.origin > 0);
  const chosen = frames.length <= most ? frames : (own.length ? own : frames).slice(0, most);
  const list = h("ol", { className: "stack" });
  for (const frame of chosen) {
    const name = most > 50 ? frame.file : shortFile(frame.file);
    list.append(
      h("li", { className: frame.origin === 2 ? "own" : "" }, `${name}:${frame.line} `, h("em", {}, frame.name)),
    );
  }
  if (chosen.length < frames.length) {
    list.append(h("li", { className: "quiet" }, `${frames.length} frames in all: click for the whole stack`));
  }
  return list;
}
