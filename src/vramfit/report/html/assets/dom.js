// Elements, figures in words and colours: what every other part of the page uses.

const KIB = 1024;
const UNITS = [["TiB", KIB ** 4], ["GiB", KIB ** 3], ["MiB", KIB ** 2], ["KiB", KIB]];

// The categories in the order of their numbers in a trace.
const CATEGORIES = [
  "other", "parameters", "gradients", "optimizer state", "activations", "inputs", "temporaries", "workspaces",
  "communication buffers", "unsharded parameters", "prefetch",
];
// From the bottom of a stack to its top: what stays lies below what comes and goes.
const STACKING = [1, 3, 2, 5, 7, 0, 8, 9, 10, 4, 6];
// Okabe and Ito's palette, which people with any kind of colour blindness can tell apart; then for ranks of several.
const PALETTE = [
  "#8d8d8d", "#0072b2", "#56b4e9", "#cc79a7", "#009e73", "#f0e442", "#d55e00", "#e69f00", "#9b2c5a", "#5a1fd0", "#9a9a33",
];

// For recordings without categories: muted colours that tell sizes apart.
const SIZE_PALETTE = ["#88a9c3", "#b5a27e", "#8fb89b", "#b78fae", "#7f8fa6", "#c3a6a0", "#79a8a9", "#a3a3c2", "#c2bb8d"];

function $(id) {
  return document.getElementById(id);
}

/** An element with properties, attributes (given as strings) and children; text never becomes markup. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Bytes as the rest of vramfit writes them: 1.50 GiB, 512 B. */
function bytes(count) {
  const size = Math.abs(count);
  const sign = count < 0 ? "-" : "";
  for (const [unit, factor] of UNITS) {
    if (size >= factor) return `${sign}${(size / factor).toFixed(2)} ${unit}`;
  }
  return `${sign}${Math.round(size)} B`;
}

/** Bytes for an axis: as few digits as the step allows. */
function tickBytes(count, step) {
  if (count === 0) return "0";
  for (const [unit, factor] of UNITS) {
    if (Math.abs(count) >= factor) {
      const digits = step >= factor || step === 0 ? 0 : Math.min(3, Math.ceil(-Math.log10(step / factor)));
      return `${(count / factor).toFixed(digits)} ${unit}`;
    }
  }
  return `${count} B`;
}

/** A step of 1, 2 or 5 times a power of ten that is at least this large. */
function roundStep(wanted, least) {
  const scale = 10 ** Math.floor(Math.log10(Math.max(wanted, least, 1e-9)));
  return Math.max(least, [1, 2, 5, 10].map((factor) => factor * scale).find((step) => step >= wanted) ?? scale);
}

/** A step between ticks that is a power of two, so that the figures are round ones in binary units. */
function byteStep(range, most) {
  let step = 1;
  while (range / step > most) step *= 2;
  return step;
}

function integer(count) {
  return Math.round(count).toLocaleString("en-US");
}

function percent(part, whole) {
  if (whole <= 0 || part <= 0) return "0 %";
  const share = (100 * part) / whole;
  return share < 1 ? "<1 %" : `${Math.round(share)} %`;
}

function duration(us) {
  if (us >= 1e8) return `${(us / 1e6).toFixed(0)} s`;
  if (us >= 1e6) return `${(us / 1e6).toFixed(2)} s`;
  if (us >= 1e3) return `${(us / 1e3).toPrecision(3)} ms`;
  return `${Math.round(us)} µs`;
}

/** aten.mm.default is mm; other libraries keep their name. */
function shortOp(op) {
  const parts = op.replace("::", ".").split(".");
  if (parts.length < 2) return op;
  return parts[0] === "aten" ? parts[1] : `${parts[0]}.${parts[1]}`;
}

function shortFile(file) {
  return file.replaceAll("\\", "/").split("/").filter(Boolean).slice(-2).join("/");
}

const resolved = new Map();

/** A colour of the style sheet as the present theme has it: "rgb(1, 2, 3)". */
function token(name) {
  if (!resolved.has(name)) {
    const probe = $("probe");
    probe.style.color = `var(${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

/** After a change of theme. */
function forgetTokens() {
  resolved.clear();
}

/** A colour, "#rrggbb" or "rgb(r, g, b)", as the number that a pixel of ImageData holds (little endian). */
function pixel(colour, light = 1) {
  const parts = colour.startsWith("#")
    ? [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16))
    : colour.match(/[\d.]+/g).slice(0, 3).map(Number);
  const [red, green, blue] = parts.map((part) => Math.max(0, Math.min(255, Math.round(part * light))));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** Black or white, whichever is read better on a colour "#rrggbb" (WCAG 2.2, relative luminance). */
function inkOn(colour) {
  const linear = [1, 3, 5].map((at) => {
    const part = parseInt(colour.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 ? "#ffffff" : "#000000";
}

/** Call at most once for each picture on the screen. */
function eachFrame(action) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      action();
    });
  };
}
