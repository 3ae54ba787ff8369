// The legend of the pictures over time: names the kinds of blocks that occur, and hides or shows each.

const RESERVED = "reserved";

class Legend {
  constructor(host, model, view) {
    const kinds = [...model.kinds.stacking].reverse().filter((kind) => model.occurs(kind));
    const mark = (kind) => swatch(model.kinds.colours[kind]);
    const line = h("span", { className: "swatch line", "aria-hidden": "true" });
    host.replaceChildren(
      ...kinds.map((kind) => this.entry(view, kind, mark(kind), model.kinds.names[kind])),
      this.entry(view, RESERVED, line, RESERVED),
    );
  }

  entry(view, kind, mark, name) {
    const button = h("button", { type: "button", className: "toggle", "aria-pressed": "true", title: `hide or show: ${name}` }, mark, name);
    button.addEventListener("click", () => button.setAttribute("aria-pressed", String(view.toggle(kind))));
    return h("li", {}, button);
  }
}

/** What the legend hides, in words; nothing in silence. */
function hiddenWords(model, view) {
  const names = [...view.hidden].map((kind) => (kind === RESERVED ? RESERVED : model.kinds.names[kind]));
  return names.length ? `hidden by the legend: ${names.join(", ")}` : "";
}
