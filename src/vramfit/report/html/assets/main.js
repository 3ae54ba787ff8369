// Puts the page together: decodes the data after the first paint, builds the pictures of the chosen device.

/** An empty element in place of one that listens for the device shown before. */
function fresh(id) {
  const old = $(id);
  const element = old.cloneNode(false);
  old.replaceWith(element);
  return element;
}

class DevicePage {
  constructor(shared, data) {
    this.model = new Model(shared, data);
    this.view = new View(this.model);
    this.legend = new Legend($("legend"), this.model, this.view);
    const choose = (block, row) => this.choose(block, row);
    this.timeline = new TimelineChart(fresh("timeline"), this.model, this.view);
    this.address = new AddressChart(fresh("address"), this.model, this.view, choose);
    this.stacked = new StackedChart(fresh("stacked"), this.model, this.view, choose);
    this.segments = new SegmentsMap(fresh("segments"), this.model, this.view, choose);
    this.modules = new FlameGraph(fresh("flame-modules"), $("flame-modules-trail"), () =>
      moduleTree(this.model, this.view.moment),
    );
    this.stacks = new FlameGraph(fresh("flame-stacks"), $("flame-stacks-trail"), () =>
      stackTree(this.model, this.view.moment, $("own-frames").checked),
    );
    this.view.onMoment(eachFrame(() => this.momentChanged()));
    this.view.onMoment(rememberPlace);
    this.view.onChange(rememberPlace);
    this.timeline.note();
    this.momentChanged();
  }

  momentChanged() {
    const { model, view } = this;
    const slider = $("moment-slider");
    slider.min = -1;
    slider.max = Math.max(-1, model.rows - 1);
    slider.value = view.moment;
    const name = momentName(model, view.moment);
    slider.setAttribute("aria-valuetext", name);
    document.querySelectorAll(".moment-name").forEach((element) => (element.textContent = name));
    this.modules.update();
    this.stacks.update();
    this.listAlive();
  }

  /** The largest of what is alive, in words. */
  listAlive() {
    const { model, view } = this;
    const groups = new Map();
    for (const block of model.alive(view.moment)) {
      const key = `${model.origin[block]}/${model.block[block]}`;
      const known = groups.get(key);
      if (known) known.count++;
      else groups.set(key, { block, count: 1 });
    }
    const sorted = [...groups.values()].sort((a, b) => b.count * model.block[b.block] - a.count * model.block[a.block]);
    const rows = sorted.slice(0, 30).map((group) => this.aliveRow(group));
    setRows($("alive-rows"), rows);
    const more = sorted.length - rows.length;
    $("alive-more").textContent = more > 0 ? `${integer(more)} smaller groups are not listed.` : "";
  }

  aliveRow({ block, count }) {
    const { model } = this;
    const origin = model.origin[block];
    const { shared } = model;
    const show = h("button", { type: "button", className: "link" }, shared.tensor(origin) || (model.bySize ? "block" : CATEGORIES[model.category[block]]));
    show.addEventListener("click", () => this.choose(block, this.view.moment));
    const cells = [
      bytes(count * model.block[block]), count > 1 ? `${integer(count)} × ${bytes(model.block[block])}` : "",
      h("span", {}, swatch(model.colour(block)), CATEGORIES[model.category[block]]),
      show, shortOp(shared.op(origin)), shared.module(origin), shared.line(origin),
    ];
    return h("tr", {}, ...cells.map((content) => h("td", {}, content)));
  }

  /** Show all about a block, and look at the moment at which it was pointed to. */
  choose(block, row) {
    tooltip.hide();
    this.view.selected = block >= 0 ? block : -1;
    const panel = $("chosen");
    panel.hidden = block < 0;
    if (block >= 0) {
      const zoom = h("button", { type: "button" }, "Zoom to its life");
      zoom.addEventListener("click", () => {
        const { born, freed } = this.model;
        const margin = Math.max(2, (freed[block] - born[block]) * 0.05);
        this.view.showRows(Math.max(0, born[block] - margin), Math.min(this.model.rows, freed[block] + margin));
      });
      const close = h("button", { type: "button" }, "Close");
      close.addEventListener("click", () => this.choose(-1, this.view.moment));
      const copy = copyButton(this.model, block);
      const buttons = h("div", { className: "buttons" }, copy, " ", zoom, " ", close);
      $("chosen-block").replaceChildren(buttons, ...describeBlock(this.model, block, 1000));
    }
    this.view.setMoment(row);
    for (const chart of [this.address, this.stacked]) chart.plot.drawOver();
    this.segments.paint();
  }

  /** After a change of theme or width. */
  redraw() {
    forgetTokens();
    this.view.changed();
    this.segments.draw();
    this.modules.draw();
    this.stacks.draw();
  }
}

const page = { devices: new Map(), current: null };
window.vramfit = page; // for those who want to look further in the browser's console

async function openDevice(index) {
  if (!page.devices.has(index)) page.devices.set(index, await decode(`data-device-${index}`));
  page.index = index;
  page.current = new DevicePage(page.shared, page.devices.get(index));
  document.querySelectorAll("[data-device]").forEach((part) => (part.hidden = part.dataset.device !== String(index)));
  $("chosen").hidden = true;
  document.documentElement.dataset.ready = String(index);
}

/** The device that the page opens with. */
function firstDevice() {
  return Number(document.documentElement.dataset.first);
}

function rememberPlace() {
  keepPlace(() => placeText(page.index, firstDevice(), page.current.view, $("device-choice") !== null));
}

/** Look at what the address asks for, on the device that it names. */
async function followAddress() {
  const place = placeOf(location.hash);
  if (!place) return;
  const wanted = place.gpu ?? firstDevice();
  if (wanted !== page.index && $(`data-device-${wanted}`)) {
    await openDevice(wanted);
    $("device-choice").value = String(wanted);
    settle();
  }
  goTo(page.current.view, place);
}

function connect() {
  $("moment-slider").addEventListener("input", (event) => page.current.view.setMoment(Number(event.target.value)));
  const jumps = {
    "to-peak": (model) => model.peakRow,
    "to-reserved": (model) => model.reservedPeakRow,
    "to-oom": (model) => model.columns.oom_row[model.columns.oom_row.length - 1] ?? model.facts.row,
    "to-end": (model) => model.rows - 1,
    "step-back": () => page.current.view.moment - 1,
    "step-on": () => page.current.view.moment + 1,
  };
  for (const [id, row] of Object.entries(jumps)) {
    $(id).addEventListener("click", () => page.current.view.setMoment(row(page.current.model)));
  }
  $("reset-zoom").addEventListener("click", () => {
    page.current.address.vertical.reset();
    page.current.stacked.vertical.reset();
    page.current.view.reset();
  });
  $("zoom-in").addEventListener("click", () => page.current.view.zoom(0.5));
  $("zoom-out").addEventListener("click", () => page.current.view.zoom(2));
  $("by-time").addEventListener("change", (event) => page.current.view.useTime(event.target.checked));
  $("show-limit").addEventListener("change", (event) => {
    page.current.timeline.showLimit = event.target.checked;
    page.current.timeline.update();
  });
  $("own-frames").addEventListener("change", () => page.current.stacks.update());
  $("device-choice")?.addEventListener("change", (event) => openDevice(Number(event.target.value)).then(settle).then(rememberPlace));
  window.addEventListener("hashchange", followAddress);
  $("theme").addEventListener("click", switchTheme);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.current?.redraw());
  window.addEventListener("resize", eachFrame(() => page.current?.redraw()));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    tooltip.hide();
    const free = !document.activeElement?.classList.contains("flame-cell");
    if (free && !$("chosen").hidden) page.current.choose(-1, page.current.view.moment);
  });
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
  page.current?.redraw();
  page.ranks?.redraw();
}

function nameTheme() {
  $("theme").textContent = isDark() ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
}

/** Bring the controls in line with the device that is shown. */
function settle() {
  const { model, timeline, view } = page.current;
  $("by-time").disabled = !model.shared.hasTimes;
  $("by-time").checked = view.byTime;
  $("show-limit").disabled = !timeline.limit;
  $("show-limit").checked = Boolean(timeline.showLimit);
  $("to-oom").hidden = model.columns.oom_row.length === 0;
}

async function begin() {
  nameTheme();
  makeSheets();
  makeFolds(() => {
    page.current?.redraw();
    page.ranks?.redraw();
  });
  if (typeof DecompressionStream === "undefined") {
    $("loading").textContent = "This browser is too old for the pictures; the tables hold the same facts.";
    return;
  }
  page.shared = new Shared(await decode("data-shared"));
  if ($("data-ranks")) page.ranks = new RanksOverTime(await decode("data-ranks"));
  // The pictures measure their room, so they must be seen before they are drawn.
  $("pictures").hidden = false;
  const first = document.documentElement.dataset.first;
  if (first !== undefined && first !== "") {
    await openDevice(firstDevice());
    connect();
    settle();
    await followAddress();
  }
  $("loading").hidden = true;
}

// After the first paint: the words of the page are there at once, its pictures a moment later.
requestAnimationFrame(() => setTimeout(begin, 0));
