// The address of the page holds what is looked at (device, moment, stretch), so that a link leads back to it.

/** What an address asks for: {event, gpu, from, to} as far as it says so; null where it names no event. */
function placeOf(hash) {
  const found = {};
  for (const part of hash.replace(/^#/, "").split("&")) {
    const known = /^(event|gpu|from|to)=(-?\d{1,15})$/.exec(part);
    if (known) found[known[1]] = Number(known[2]);
  }
  return "event" in found ? found : null;
}

/** What is looked at as the end of an address; empty for the page as it opens. */
function placeText(device, first, view, several) {
  const start = device === first && view.moment === view.model.facts.row && view.isFull;
  if (start) return "";
  const parts = [`event=${view.moment}`];
  if (several) parts.push(`gpu=${device}`);
  if (!view.isFull) parts.push(`from=${Math.floor(view.lowRow)}`, `to=${Math.ceil(view.highRow)}`);
  return `#${parts.join("&")}`;
}

/** Look at what an address asks for, within what this device has. */
function goTo(view, place) {
  if ("from" in place && "to" in place && place.to > place.from) view.showRows(Math.max(0, place.from), place.to);
  view.setMoment(place.event);
}

let waiting = 0;

/** Write the address a moment after the last change: browsers limit how often it may change. */
function keepPlace(text) {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    const now = text();
    const held = placeOf(location.hash) !== null;
    if (now === location.hash || (!now && !held)) return;
    history.replaceState(null, "", now || location.href.split("#")[0]);
  }, 150);
}
