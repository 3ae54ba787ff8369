// Sections that fold: each heading is a button that hides and shows what stands below it.

function makeFolds(unfolded) {
  document.querySelectorAll("main section > h2").forEach((heading) => {
    const section = heading.parentElement;
    if (section.classList.contains("verdict")) return;
    const button = h("button", { type: "button", className: "fold", "aria-expanded": "true" }, ...heading.childNodes);
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      fold(section, !section.classList.contains("folded"));
      unfolded();
    });
  });
  document.querySelectorAll("nav a").forEach((link) => {
    link.addEventListener("click", (event) => follow(event, link, unfolded));
  });
}

function fold(section, away) {
  section.classList.toggle("folded", away);
  section.querySelector("h2 > .fold").setAttribute("aria-expanded", String(!away));
}

/** Go to a section, open it, and keep the moment in the address. */
function follow(event, link, unfolded) {
  const heading = $(link.getAttribute("href").slice(1));
  const section = heading?.closest("section");
  if (!section) return;
  if (section.classList.contains("folded")) {
    fold(section, false);
    unfolded();
  }
  if (!placeOf(location.hash)) return;
  event.preventDefault();
  section.scrollIntoView();
  section.querySelector("h2 > .fold")?.focus({ preventScroll: true });
}
