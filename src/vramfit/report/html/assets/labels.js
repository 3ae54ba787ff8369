// Words on a picture: each stands where it covers no other, on a plate of the ground's colour.

const LABEL_LINE = 15;

class Labels {
  /** @param {object} box left, top, width, height: where words may stand, in pixels of the canvas */
  constructor(box, scale) {
    this.box = box;
    this.scale = scale;
    this.placed = [];
    this.missing = 0; // words that found no room
  }

  /** Keep a place free of words. */
  keep(x, y, width, height) {
    this.placed.push({ text: "", x, y, width, height });
  }

  /**
   * Write a text at the first of its places that is free, else in a line above or below one of them.
   *
   * @param {object[]} places x, y (the baseline) and align ("left" or "right"), the best first
   */
  put(context, text, colour, places) {
    const width = context.measureText(text).width + 6 * this.scale;
    const height = LABEL_LINE * this.scale;
    const found = this.find(places, width, height);
    if (!found) {
      this.missing++;
      return;
    }
    this.placed.push({ text, ...found });
    context.fillStyle = token("--plot");
    context.fillRect(found.x, found.y, width, height);
    context.fillStyle = colour;
    context.textAlign = "left";
    context.fillText(text, found.x + 3 * this.scale, found.y + height - 4 * this.scale);
  }

  find(places, width, height) {
    const lines = Math.ceil(this.box.height / height);
    for (let shift = 0; shift <= lines; shift++) {
      for (const { x, y, align } of places) {
        const left = align === "right" ? x - width : x;
        for (const top of new Set([y - height + shift * height, y - height - shift * height])) {
          const place = { x: left, y: top, width, height };
          if (this.inside(place) && !this.placed.some((other) => overlap(other, place))) return place;
        }
      }
    }
    return null;
  }

  inside({ x, y, width, height }) {
    const { box } = this;
    return x >= box.left && y >= box.top && x + width <= box.left + box.width && y + height <= box.top + box.height;
  }
}

function overlap(one, other) {
  return (
    one.x < other.x + other.width && other.x < one.x + one.width &&
    one.y < other.y + other.height && other.y < one.y + one.height
  );
}
