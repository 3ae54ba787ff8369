// A block with its stack as plain text, for a ticket or an editor.

/** What the panel of a block says, a line each; frames innermost first. */
function blockText(model, block) {
  const { shared } = model;
  const origin = model.origin[block];
  const names = [CATEGORIES[model.category[block]], shared.tensor(origin), shared.op(origin), shared.module(origin)];
  const title = [`${bytes(model.block[block])} (${integer(model.block[block])} B)`, ...names.filter(Boolean)].join(", ");
  const frames = shared.frames(origin).map((frame) => `  ${frame.file}:${frame.line} ${frame.name}`);
  return [title, ...frames].join("\n");
}

/** Copy a text; also where the browser keeps its clipboard from pages on the disk. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { value: text, className: "skip" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function copyButton(model, block) {
  const button = h("button", { type: "button" }, "Copy the stack");
  button.addEventListener("click", async () => {
    const done = await copyText(blockText(model, block));
    button.textContent = done ? "Copied" : "The browser does not allow it";
  });
  return button;
}
